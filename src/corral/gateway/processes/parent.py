"""The parent of a gateway with several processes: owns the sockets, reads the view, keeps the queues (ADR 0018).

It serves no request. It replaces a child that ends at once, and removes the child's requests in flight from the
counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from corral.contract.codec import encode
from corral.contract.view import FleetView
from corral.gateway import wiring
from corral.gateway.processes import messages, rate_limits
from corral.gateway.processes.child import INHERITED_ENV, Inherited
from corral.gateway.processes.in_flight import SharedInFlight, apply_ejection, row_name
from corral.gateway.processes.messages import Channel
from corral.gateway.processes.metrics import MetricsSnapshot, keep_counters, merge_snapshots, take_snapshot
from corral.gateway.processes.routers import ParentRouter, queue_row
from corral.gateway.processes.table import RowAllocator, SharedTable
from corral.gateway.receipts.buffer import ReceiptBuffer
from corral.gateway.receipts.metrics import Metrics, RouteCounts
from corral.gateway.receipts.sender import ReceiptSender
from corral.gateway.responses import Response, unknown_model
from corral.gateway.routing.in_flight import Ejection, SlotCounter
from corral.gateway.routing.load_watcher import LoadWatcher
from corral.gateway.routing.replicas import ReplicaTarget
from corral.gateway.routing.request import WaitTimes
from corral.gateway.settings import GatewaySettings
from corral.gateway.view.cache import ViewCache
from corral.gateway.view.controller_link import controller_trust, open_link, parse_controller
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import Failed
from corral.kit.log import get_log
from corral.kit.retry import Backoff
from corral.kit.sockets import READY_FD, open_listeners, report_ready

log = get_log(__name__)

_RESTART_EVERY_S = 0.5  # a child that served is replaced at once, at most this often
_FAILED_START_S = (0.5, 30.0)
_STOP_MARGIN_S = 10.0  # beyond the drain timeout
_SWEEP_S = 0.05  # finds free slots that were not reported: their process was killed, or saw no waiting request
_METRICS_TIMEOUT_S = 1.0


async def serve_processes(
    settings: GatewaySettings, listeners: Sequence[socket.socket], *, stopped: asyncio.Event
) -> None:
    """Serve until `stopped` is set. Raises `CorralError` with one line that says what must be fixed before it can
    start."""
    wiring.check_listeners(listeners)
    wiring.server_certificates(settings)  # an error in the settings is reported here once, not by each child
    are_inherited = bool(listeners)
    if not listeners:
        with wiring.explain_listen_errors(settings):
            listeners = open_listeners(settings.host, settings.port)
    clock = SystemClock()
    address = parse_controller(settings.controller)
    tls = controller_trust(settings.controller_ca) if address.target.tls else None
    async with open_link(
        address, wiring.read_gateway_key(settings), tls=tls, timeout_s=settings.controller_timeout_s
    ) as link:
        metrics = Metrics()
        views = wiring.new_view_cache(settings, link, metrics, clock)
        table = SharedTable.create(settings.processes + 1)
        in_flight = SharedInFlight(table)
        loads = LoadWatcher(link, views.hint, clock, poll_s=settings.routing.load_poll_s)
        router = ParentRouter(in_flight, loads, clock, settings.routing, views.refresh, controller=address.target)
        wiring.count_waiting(metrics, router)
        sender = ReceiptSender(
            ReceiptBuffer(1),  # children send receipts; the parent reports the waiting requests
            RouteCounts(),
            link,
            clock,
            views.server_now,
            router.waiting,
            interval_s=settings.receipts_interval_s,
        )
        parent = Parent(
            settings, listeners, table, router, in_flight, views, metrics, clock, waits_for_view=are_inherited
        )
        views.on_view = parent.on_view
        listener = wiring.new_hint_listener(settings, link, views, metrics, in_flight, clock, parent.on_running_wanted)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(views.run(), name="view"),
                tasks.create_task(sender.run(), name="receipts"),
                tasks.create_task(parent.sweep(), name="sweep"),
            ]
            if settings.hints:
                running.append(tasks.create_task(listener.run(), name="hints"))
            try:
                await parent.run(stopped)
            finally:
                for task in running:
                    task.cancel()
                await loads.close()


class _Child:
    """One of the child processes."""

    def __init__(self, column: int, process: asyncio.subprocess.Process) -> None:
        self.column = column
        self.process = process
        self.channel: Channel | None = None
        self.is_serving = False
        self.metrics = MetricsSnapshot()  # as last reported
        self.waits: dict[int, asyncio.Task[None]] = {}  # requests that wait for a slot
        self.granted: dict[int, SlotCounter] = {}  # slots that the parent counts until the child does

    def send(self, frame: messages.Frame) -> None:
        if self.channel is not None:
            self.channel.send(frame)


class Parent:
    def __init__(
        self,
        settings: GatewaySettings,
        listeners: Sequence[socket.socket],
        table: SharedTable,
        router: ParentRouter,
        in_flight: SharedInFlight,
        views: ViewCache,
        metrics: Metrics,
        clock: Clock,
        *,
        waits_for_view: bool,
    ) -> None:
        """`waits_for_view`: clients know the sockets already, so nobody is accepted before the first view."""
        self._settings = settings
        self._waits_for_view = waits_for_view
        self._listeners = listeners
        self._table = table
        self._rows = RowAllocator(table, clock.monotonic)
        self._router = router
        self._in_flight = in_flight
        self._ejection = wiring.new_ejection(Ejection, settings, in_flight)
        self._views = views
        self._metrics = metrics
        self._clock = clock
        self._children: dict[int, _Child] = {}
        self._view: messages.ViewUpdate | None = None
        self._limits: dict[str, int] = {}  # size of each bucket, by row name
        self._ended = MetricsSnapshot()  # counters of processes that have ended
        self._stopping = asyncio.Event()
        self._ever_served = False
        self._snapshots: dict[int, asyncio.Future[None]] = {}  # requested from children
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_id = 0

    # Processes.

    async def run(self, stopped: asyncio.Event) -> None:
        port = self._listeners[0].getsockname()[1]
        log.info("gateway serves", port=port, processes=self._settings.processes, controller=self._settings.controller)
        columns = range(1, self._settings.processes + 1)
        supervisors = [asyncio.create_task(self._supervise(column), name=f"process {column}") for column in columns]
        stop = asyncio.create_task(stopped.wait(), name="stop")
        try:
            await asyncio.wait((stop, *supervisors), return_when=asyncio.FIRST_COMPLETED)
            if not stop.done():  # a child could not start
                next(each for each in supervisors if each.done()).result()
            self._stop_children(signal.SIGTERM)
            await asyncio.wait(supervisors, timeout=self._settings.drain_timeout_s + _STOP_MARGIN_S)
        finally:
            stop.cancel()
            self._stop_children(signal.SIGKILL)
            await asyncio.gather(*supervisors, return_exceptions=True)
            for task in self._tasks:
                task.cancel()

    def _stop_children(self, number: signal.Signals) -> None:
        self._stopping.set()
        for listener in self._listeners:
            listener.close()
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    async def _supervise(self, column: int) -> None:
        """Start the process, and restart it whenever it ends."""
        backoff = Backoff(*_FAILED_START_S)
        while not self._stopping.is_set():
            began = self._clock.monotonic()
            child = await self._start(column)
            code = await child.process.wait()
            self._on_child_ended(child)
            if self._stopping.is_set():
                return
            if not child.is_serving and not self._ever_served:
                raise Failed(
                    f"a process of the gateway could not start (exit code {code}); its own error line has the reason"
                )
            if child.is_serving:
                backoff.reset()
                wait_s = max(0.0, _RESTART_EVERY_S - (self._clock.monotonic() - began))
            else:
                wait_s = backoff.next_s()
            log.warning("a gateway process ended and is replaced", process=column, code=code, wait_s=round(wait_s, 1))
            await self._clock.sleep(wait_s)

    async def _start(self, column: int) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (self._table.descriptor, theirs.fileno(), *(each.fileno() for each in self._listeners))
            inherited = Inherited(
                column,
                self._table.columns,
                descriptors[0],
                descriptors[1],
                descriptors[2:],
                waits_for_view=self._waits_for_view or self._view is not None,
            )
            env = {**os.environ, INHERITED_ENV: encode(inherited).decode()}
            env.pop(READY_FD, None)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *sys.orig_argv[1:]),
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent, which stops its children
            )
        child = self._children[column] = _Child(column, process)
        child.channel = await Channel.open(ours, lambda frame: self._on_frame(child, frame), lambda: None)
        if self._view is not None:
            child.send(msgspec.structs.replace(self._view, clock_offset_s=self._offset_s()))
        if self._stopping.is_set():
            process.terminate()
        return child

    def _on_child_ended(self, child: _Child) -> None:
        """Remove its requests in flight from the counters, and keep its usage of the keys' limits."""
        del self._children[child.column]
        if child.channel is not None:
            child.channel.close()
        for waiting in child.waits.values():
            waiting.cancel()
        table, cells = self._table, self._table.cells
        for name, row in {"": 0, **self._rows.rows}.items():
            first, second = table.first(row), table.second(row)
            if self._limits.get(name):
                cells[first] += cells[first + child.column]  # added before it is removed: never too small
                cells[second] = max(cells[second], cells[second + child.column])
            cells[first + child.column] = cells[second + child.column] = 0.0
        self._ended = merge_snapshots((self._ended, keep_counters(child.metrics)))
        for counter in child.granted.values():
            counter.end()
        self._router.serve_waiting()

    # The view.

    def on_view(self, view: FleetView) -> None:
        self._limits = dict(rate_limits.rows_of(view.keys))
        names = [
            *(row_name(each.process_id) for each in view.replicas),
            *(queue_row(each.id) for each in view.models),
            *self._limits,
        ]
        new = self._rows.assign(names)
        now = self._clock.monotonic()
        for name in new & self._limits.keys():
            if limit := self._limits[name]:
                rate_limits.fill(self._table, self._rows.rows[name], limit, now)
        rows = dict(self._rows.rows)
        if len(rows) < len(set(names)):
            log.error("the shared table of the gateway processes is full; each process keeps some counters by itself")
        offset_s = view.server_time - self._clock.now().timestamp() if view.server_time else self._offset_s()
        self._view = messages.ViewUpdate(encode(view), rows, offset_s)
        for child in self._children.values():  # before requests are served: a child must know the replica
            child.send(self._view)
        self._router.apply_shared_view(view, rows, self._in_flight)
        self._router.publish_queues(self._table, rows)
        self._router.serve_waiting()

    def on_running_wanted(self, for_s: float) -> None:
        for child in self._children.values():
            child.send(messages.RunningWanted(for_s))

    def _offset_s(self) -> float:
        return self._views.server_now() - self._clock.now().timestamp()

    # Frames.

    def _on_frame(self, child: _Child, frame: messages.Frame) -> None:
        match frame:
            case messages.WaitForSlot():
                self._begin(self._wait(child, frame), child.waits, frame.id)
            case messages.CancelWait():
                if (waiting := child.waits.get(frame.id)) is not None:
                    waiting.cancel()
            case messages.SlotTaken():
                if (counter := child.granted.pop(frame.id, None)) is not None:
                    counter.end()
            case messages.SlotFreed():
                self._router.serve_waiting(frame.model)
            case messages.EjectionChange():
                apply_ejection(self._ejection, frame.action, frame.id)
                for other in self._children.values():
                    if other is not child:
                        other.send(frame)
            case messages.RefreshView():
                self._begin(self._refresh_view(child, frame.id))
            case messages.ChildServes():
                self._on_serving(child)
            case messages.RequestMetrics():
                self._begin(self._report_metrics(child, frame.id))
            case messages.ReportMetrics():
                child.metrics = frame.metrics
                reply = self._snapshots.pop(frame.id, None)
                if reply is not None and not reply.done():
                    reply.set_result(None)
            case _:
                log.error("unexpected message from a child", kind=type(frame).__name__)

    def _begin(
        self,
        work: Coroutine[Any, Any, None],
        known: dict[int, asyncio.Task[None]] | None = None,
        number: int = 0,
    ) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        if known is not None:
            known[number] = task

        def on_done(_: object) -> None:
            self._tasks.discard(task)
            if known is not None and known.get(number) is task:
                del known[number]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a request of a child failed", exc_info=error)

        task.add_done_callback(on_done)

    def _on_serving(self, child: _Child) -> None:
        child.is_serving = True
        log.info("a gateway process serves", process=child.column, pid=child.process.pid)
        serving = sum(each.is_serving for each in self._children.values())
        if not self._ever_served and serving == self._settings.processes:
            self._ever_served = True
            report_ready(os.environ)

    async def _wait(self, child: _Child, frame: messages.WaitForSlot) -> None:
        model_route, wait_times = self._router.find(frame.model), WaitTimes()
        got: ReplicaTarget | Response
        if model_route is None:
            got = unknown_model(frame.model, installed=0)
        else:
            got = await self._router.wait(model_route, frame.key_id, wait_times)
        if isinstance(got, ReplicaTarget):
            child.granted[frame.id] = got.counter
            child.send(messages.SlotGranted(frame.id, got.seen.process_id, wait_times.load_s, wait_times.queue_s))
        else:
            child.send(
                messages.SlotRefused(
                    frame.id, got.status, got.body, tuple(got.headers), wait_times.load_s, wait_times.queue_s
                )
            )

    async def _refresh_view(self, child: _Child, number: int) -> None:
        if number:
            await self._views.refresh()
            child.send(messages.ViewRefreshed(number))
        else:
            self._views.hint()

    async def sweep(self) -> None:
        while True:
            await self._clock.sleep(_SWEEP_S)
            self._router.serve_waiting()

    # Metrics.

    async def _report_metrics(self, child: _Child, number: int) -> None:
        """Report the current metrics of all processes; the last report of a process that does not reply in time."""
        requested = [self._request_metrics(each) for each in self._children.values() if each.is_serving]
        if requested:
            await asyncio.wait(requested, timeout=_METRICS_TIMEOUT_S)
        own = take_snapshot(self._metrics)
        own.view = self._metrics.view
        own.gauges["processes"] = ("Processes that serve requests.", sum(c.is_serving for c in self._children.values()))
        merged = merge_snapshots((own, self._ended, *(each.metrics for each in self._children.values())))
        child.send(messages.ReportMetrics(number, merged))

    def _request_metrics(self, child: _Child) -> asyncio.Future[None]:
        self._last_id += 1
        reply = self._snapshots[self._last_id] = asyncio.get_running_loop().create_future()
        child.send(messages.RequestMetrics(self._last_id))
        return reply
