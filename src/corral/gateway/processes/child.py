"""A child of a gateway with several processes: accepts connections and serves requests (ADR 0018).

Composed like `main.open_gateway`, but the parent sends the view, requests that must wait are sent to the parent, and
counters of the whole gateway are in the shared table.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping
from functools import partial
from typing import TypeVar

import msgspec

from corral.contract.codec import decode
from corral.contract.view import FleetView
from corral.gateway import wiring
from corral.gateway.processes import messages
from corral.gateway.processes.in_flight import SharedEjection, SharedInFlight
from corral.gateway.processes.messages import Channel
from corral.gateway.processes.metrics import MetricsSnapshot, restore_metrics, take_snapshot
from corral.gateway.processes.rate_limits import SharedLimiters
from corral.gateway.processes.routers import ChildRouter
from corral.gateway.processes.table import SharedTable
from corral.gateway.receipts.metrics import Metrics, RouteClass, render
from corral.gateway.receipts.running import RunningReporter
from corral.gateway.receipts.sender import ReceiptSender
from corral.gateway.responses import Response
from corral.gateway.routing.ingress_monitor import IngressMonitor
from corral.gateway.routing.load_watcher import LoadWatcher
from corral.gateway.routing.replicas import ReplicaTarget
from corral.gateway.routing.request import WaitTimes
from corral.gateway.settings import GatewaySettings
from corral.gateway.view.controller_link import controller_trust, open_link, parse_controller
from corral.gateway.view.fleet import Fleet, prepare_fleet
from corral.kit.clock import Clock, SystemClock
from corral.kit.log import get_log
from corral.relay import RelayServer

log = get_log(__name__)
T = TypeVar("T")

INHERITED_ENV = "CORRAL_INTERNAL_GATEWAY_PLACE"
ACCEPTS, ACCEPTS_WITH_VIEW = 1.0, 2.0  # first number of a process in row 0; second: its open connections
_PROCESSES_ROW = 0
_REFRESH_TIMEOUT_S = 2.0
_METRICS_TIMEOUT_S = 2.0
FIRST_VIEW_S = 3.0
_REPORT_INTERVAL_S = 1.0  # a killed process loses the counts since its last report
_PUBLISH_S = 0.05


class Inherited(msgspec.Struct, frozen=True):
    """What a child inherits from the parent: its column of the table, and numbers of file descriptors."""

    column: int
    columns: int
    table: int
    channel: int
    listeners: tuple[int, ...]
    waits_for_view: bool = False  # before it accepts: clients wait in the queues of the sockets meanwhile


def read_inherited(environ: MutableMapping[str, str]) -> Inherited | None:
    """None: this process is not a child."""
    found = environ.pop(INHERITED_ENV, "")
    return msgspec.json.decode(found, type=Inherited) if found else None


async def serve_child(settings: GatewaySettings, inherited: Inherited, *, stopped: asyncio.Event) -> None:
    clock = SystemClock()
    for descriptor in (inherited.table, inherited.channel, *inherited.listeners):
        os.set_inheritable(descriptor, False)
    listeners = [socket.socket(fileno=each) for each in inherited.listeners]
    table = SharedTable(inherited.table, columns=inherited.columns, column=inherited.column)
    async with _open(_share_of(settings, inherited.columns - 1), inherited, table, clock) as (server, parent):
        if inherited.waits_for_view:
            await parent.wait_for_view(stopped)
        server.listen_shared(listeners, partial(_is_turn, server, table))
        parent.on_serving()
        await stopped.wait()
        table.cells[table.first(_PROCESSES_ROW) + table.column] = 0.0
        await wiring.drain(server, settings.drain_timeout_s)


def _share_of(settings: GatewaySettings, processes: int) -> GatewaySettings:
    """The settings with limits of the whole gateway divided. Connections get a margin: they do not spread exactly."""
    connections = settings.max_connections if processes == 1 else settings.max_connections * 5 // (processes * 4)
    return dataclasses.replace(
        settings,
        max_connections=max(1, connections),
        bodies_limit_bytes=settings.bodies_limit_bytes // processes,
        spool_limit_bytes=settings.spool_limit_bytes // processes,
    )


def _is_turn(server: RelayServer, table: SharedTable) -> bool:
    """Whether no other process that accepts has fewer connections open."""
    own, cells = server.open_connections, table.cells
    first, second = table.first(_PROCESSES_ROW), table.second(_PROCESSES_ROW)
    cells[second + table.column] = own + 1  # it will be accepted: the next process to check counts it
    return all(own <= cells[second + each] or not cells[first + each] for each in table.others if each)


@contextlib.asynccontextmanager
async def _open(
    settings: GatewaySettings, inherited: Inherited, table: SharedTable, clock: Clock
) -> AsyncIterator[tuple[RelayServer, ParentLink]]:
    address = parse_controller(settings.controller)
    gateway_key = wiring.read_gateway_key(settings)
    tls = controller_trust(settings.controller_ca) if address.target.tls else None
    metrics = Metrics()
    in_flight, limiters = SharedInFlight(table), SharedLimiters(table, clock.monotonic)
    state = wiring.GatewayState(settings, in_flight, limiters)
    state.ejection = ejection = wiring.new_ejection(SharedEjection, settings, in_flight)
    async with open_link(address, gateway_key, tls=tls, timeout_s=settings.controller_timeout_s) as link:
        parent = ParentLink(table, metrics, clock, settings.routing.retry_after_s)
        loads = LoadWatcher(link, parent.hint, clock, poll_s=settings.routing.load_poll_s)
        router = ChildRouter(
            in_flight,
            loads,
            clock,
            settings.routing,
            parent.refresh,
            controller=address.target,
            local_sockets=wiring.local_sockets(settings, clock),
        )
        router.request_slot, router.on_slot_free = parent.request_slot, parent.on_slot_free
        ejection.on_change = parent.on_ejection
        wiring.count_prefix_misses(metrics, router)

        def apply_view(view: FleetView, rows: dict[str, int]) -> None:
            limiters.use(rows)
            limiters.retain({key.id for key in view.keys})
            router.apply_shared_view(view, rows, in_flight)
            router.read_queues(table, rows)

        sender = ReceiptSender(
            state.receipts,
            metrics.routes[RouteClass.INFERENCE],
            link,
            clock,
            parent.server_now,
            dict,  # the parent reports waiting requests
            interval_s=settings.receipts_interval_s,
            take_pressure=router.take_pressure,
        )
        tracer = wiring.new_tracer(settings, metrics, parent.server_now)
        handler = wiring.build_handler(
            settings,
            parent,
            router,
            metrics,
            clock,
            gateway_key=gateway_key,
            state=state,
            processes=parent,
            tracer=tracer,
        )
        certificates = wiring.server_certificates(settings)
        trust = wiring.new_trust(settings, address.target, tls)
        async with (
            wiring.open_server(settings, handler, trust, metrics, wiring.tls_context(certificates)) as server,
            asyncio.TaskGroup() as tasks,
        ):
            requests = RunningReporter(link, clock, parent.server_now, state.running)
            requests.use(server.running_forwards)
            parent.use(server, apply_view, router.find, ejection.apply_remote, requests.on_wanted)
            await parent.open(inherited.channel)
            monitor = IngressMonitor(
                server.pool, state.ejection, router.nodes_at, clock, silent_s=settings.ingress_silent_s
            )
            running = [
                tasks.create_task(sender.run(), name="receipts"),
                tasks.create_task(requests.run(), name="requests under way"),
                tasks.create_task(monitor.run(), name="ingress monitor"),
                tasks.create_task(parent.report_metrics(), name="metrics"),
                tasks.create_task(parent.publish_connections(), name="connections"),
            ]
            if tracer is not None:
                running.append(tasks.create_task(tracer.exporter.run(), name="traces"))
            if certificates:
                watching = wiring.watch_certificates(certificates, settings, clock)
                running.append(tasks.create_task(watching, name="certificate"))
            try:
                yield server, parent
            finally:
                for task in running:
                    task.cancel()
                await loads.close()
                await wiring.send_last_receipts(sender)


class ParentLink:
    """The parent for the parts of a child: implements `FleetSource` and `GatewayProcesses`, and provides slots."""

    def __init__(self, table: SharedTable, metrics: Metrics, clock: Clock, retry_after_s: float) -> None:
        self.fleet: Fleet | None = None
        self._table = table
        self._metrics = metrics
        self._clock = clock
        self._clock_offset_s = 0.0
        self._ids = itertools.count(1)
        self._slots: dict[int, tuple[str, str, WaitTimes, asyncio.Future[ReplicaTarget | Response]]] = {}
        self._refreshes: dict[int, asyncio.Future[None]] = {}
        self._snapshots: dict[int, asyncio.Future[MetricsSnapshot]] = {}
        self._channel: Channel | None = None
        self._has_view = asyncio.Event()

    def use(
        self,
        server: RelayServer,
        apply_view: Callable[[FleetView, dict[str, int]], None],
        find: Callable[[str], ReplicaTarget | None],
        on_ejection: Callable[[str, str], None],
        on_running_wanted: Callable[[float], None],
    ) -> None:
        self._server = server
        self._apply_view = apply_view
        self._find = find
        self._on_ejection = on_ejection
        self._on_running_wanted = on_running_wanted

    async def open(self, descriptor: int) -> None:
        self._channel = await Channel.open(socket.socket(fileno=descriptor), self._on_frame, _on_lost)

    async def wait_for_view(self, stopped: asyncio.Event) -> None:
        """At most as long as a gateway of one process waits: without a controller it serves as it is."""
        waits = [asyncio.ensure_future(each.wait()) for each in (self._has_view, stopped)]
        try:
            await asyncio.wait(waits, timeout=FIRST_VIEW_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    # A `FleetSource`.

    def server_now(self) -> float:
        return self._clock.now().timestamp() + self._clock_offset_s

    def hint(self) -> None:
        self._send(messages.RefreshView(0))

    async def refresh(self) -> None:
        await self._request(self._refreshes, messages.RefreshView, _REFRESH_TIMEOUT_S)

    # `GatewayProcesses`.

    def on_serving(self) -> None:
        self._publish_state()
        self._send(messages.ChildServes())

    def are_ready(self) -> bool:
        first = self._table.first(_PROCESSES_ROW)
        return ACCEPTS not in self._table.cells[first : first + self._table.columns].tolist()

    async def render(self, now: float) -> bytes:
        snapshot = await self._request(self._snapshots, messages.RequestMetrics, _METRICS_TIMEOUT_S)
        snapshot = snapshot or take_snapshot(self._metrics)  # one process is better than none
        return render(restore_metrics(snapshot), now=now, processes=snapshot.process)

    # Slots and ejections.

    def request_slot(self, model: str, key_id: str, wait_times: WaitTimes) -> asyncio.Future[ReplicaTarget | Response]:
        number, slot = next(self._ids), asyncio.get_running_loop().create_future()
        self._slots[number] = (model, key_id, wait_times, slot)
        slot.add_done_callback(lambda _: self._cancel_wait(number) if slot.cancelled() else None)
        self._send(messages.WaitForSlot(number, model, key_id))
        return slot

    def _cancel_wait(self, number: int) -> None:
        if self._slots.pop(number, None) is not None:
            self._send(messages.CancelWait(number))

    def on_slot_free(self, model: str) -> None:
        self._send(messages.SlotFreed(model))

    def on_ejection(self, action: str, target_id: str) -> None:
        self._send(messages.EjectionChange(action, target_id))

    # Tasks.

    async def report_metrics(self) -> None:
        while True:
            await self._clock.sleep(_REPORT_INTERVAL_S)
            self._send(messages.ReportMetrics(0, take_snapshot(self._metrics)))

    async def publish_connections(self) -> None:
        """Write the number of open connections to the table."""
        at = self._table.second(_PROCESSES_ROW) + self._table.column
        while True:
            await self._clock.sleep(_PUBLISH_S)
            self._table.cells[at] = self._server.open_connections

    # Frames.

    def _on_frame(self, frame: messages.Frame) -> None:
        match frame:
            case messages.ViewUpdate():
                self._on_view_update(frame)
            case messages.SlotGranted():
                self._on_slot_granted(frame)
            case messages.SlotRefused():
                if (waiting := self._slots.pop(frame.id, None)) is not None:
                    _, _, wait_times, slot = waiting
                    _add_wait_times(wait_times, frame)
                    slot.set_result(Response(frame.status, frame.body, frame.headers))
            case messages.EjectionChange():
                self._on_ejection(frame.action, frame.id)
            case messages.RunningWanted():
                self._on_running_wanted(frame.for_s)
            case messages.ViewRefreshed():
                _resolve(self._refreshes, frame.id, None)
            case messages.RequestMetrics():
                self._send(messages.ReportMetrics(frame.id, take_snapshot(self._metrics)))
            case messages.ReportMetrics():
                _resolve(self._snapshots, frame.id, frame.metrics)
            case _:
                log.error("unexpected message from the parent", kind=type(frame).__name__)

    def _on_view_update(self, frame: messages.ViewUpdate) -> None:
        view = decode(FleetView, frame.view)
        fleet = prepare_fleet(view)
        self._apply_view(view, frame.rows)
        self.fleet = fleet
        self._clock_offset_s = frame.clock_offset_s
        self._has_view.set()
        if self._table.cells[self._table.first(_PROCESSES_ROW) + self._table.column]:
            self._publish_state()

    def _on_slot_granted(self, frame: messages.SlotGranted) -> None:
        """Count the slot here before the parent stops counting it: in between it counts twice, never zero times."""
        waiting = self._slots.pop(frame.id, None)
        replica = None if waiting is None else self._find(frame.process_id)
        if replica is not None:
            replica.counter.begin()
        self._send(messages.SlotTaken(frame.id))
        if waiting is None:
            return
        model, key_id, wait_times, slot = waiting
        if replica is None:  # the view no longer has the replica
            self._slots[frame.id] = waiting
            self._send(messages.WaitForSlot(frame.id, model, key_id))
            return
        _add_wait_times(wait_times, frame)
        slot.set_result(replica)

    def _publish_state(self) -> None:
        at = self._table.first(_PROCESSES_ROW) + self._table.column
        self._table.cells[at] = ACCEPTS if self.fleet is None else ACCEPTS_WITH_VIEW

    async def _request(
        self,
        waiting: dict[int, asyncio.Future[T]],
        new_frame: Callable[[int], messages.Frame],
        timeout_s: float,
    ) -> T | None:
        number = next(self._ids)
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting[number] = reply
        self._send(new_frame(number))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            return None
        finally:
            waiting.pop(number, None)

    def _send(self, frame: messages.Frame) -> None:
        if self._channel is not None:
            self._channel.send(frame)


def _resolve(waiting: dict[int, asyncio.Future[T]], number: int, result: T) -> None:
    reply = waiting.pop(number, None)
    if reply is not None and not reply.done():
        reply.set_result(result)


def _add_wait_times(wait_times: WaitTimes, frame: messages.SlotGranted | messages.SlotRefused) -> None:
    wait_times.load_s += frame.load_s
    wait_times.queue_s += frame.queue_s


def _on_lost() -> None:
    """The parent was killed: otherwise it would have stopped this process first. Without it there are no queues, and
    the next gateway starts its own children."""
    log.error("the parent of this gateway process is gone")
    os._exit(1)
