"""A child of a gateway in several processes: accepts connections and serves requests (ADR 0018).

Composed as `main.open_gateway` is, but the view comes from the parent, requests that must wait are sent there, and what
counts for the whole gateway is counted in the shared table.
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
from corral.gateway.answers import Answer
from corral.gateway.ingress_monitor import IngressMonitor
from corral.gateway.link import controller_trust, open_link, parse_controller
from corral.gateway.loads import Loads
from corral.gateway.main import (
    LAST_RECEIPTS_S,
    State,
    build_door,
    count_disturbed,
    drain,
    new_ejection,
    open_server,
    read_gateway_key,
    router_options,
    trust_of,
)
from corral.gateway.metrics import Metrics, RouteClass, render
from corral.gateway.processes import messages
from corral.gateway.processes.limits import SharedLimiters
from corral.gateway.processes.loads import SharedEjection, SharedInFlight
from corral.gateway.processes.messages import Channel
from corral.gateway.processes.numbers import Numbers, as_metrics, numbers_of
from corral.gateway.processes.routers import ChildRouter
from corral.gateway.processes.table import SharedTable
from corral.gateway.receipts import ReceiptSender
from corral.gateway.replicas import Replica
from corral.gateway.settings import GatewaySettings
from corral.gateway.v1 import Waited
from corral.gateway.view import Fleet, prepare_fleet
from corral.kit.clock import Clock, SystemClock
from corral.kit.log import get_log
from corral.relay import RelayServer

log = get_log(__name__)
T = TypeVar("T")

PLACE = "CORRAL_INTERNAL_GATEWAY_PLACE"
ACCEPTS, ACCEPTS_WITH_VIEW = 1.0, 2.0  # the first number of a process in row 0; the second: its open connections
_PROCESSES_ROW = 0
_LOOK_AGAIN_S = 2.0
_NUMBERS_WITHIN_S = 2.0
_TELL_NUMBERS_S = 1.0  # what a process that is killed has counted since is lost
_PUBLISH_S = 0.05


class Place(msgspec.Struct, frozen=True):
    """Where a child finds what it shares with the others: numbers of descriptors it inherits."""

    column: int
    columns: int
    table: int
    channel: int
    listeners: tuple[int, ...]


def take_place(environ: MutableMapping[str, str]) -> Place | None:
    """None: this process is no child."""
    found = environ.pop(PLACE, "")
    return msgspec.json.decode(found, type=Place) if found else None


async def serve_child(settings: GatewaySettings, place: Place, *, stopped: asyncio.Event) -> None:
    clock = SystemClock()
    for descriptor in (place.table, place.channel, *place.listeners):
        os.set_inheritable(descriptor, False)
    listeners = [socket.socket(fileno=each) for each in place.listeners]
    table = SharedTable(place.table, columns=place.columns, column=place.column)
    async with _open(_share_of(settings, place.columns - 1), place, table, clock) as (server, parent):
        server.listen_shared(listeners, partial(_is_turn, server, table))
        parent.serving()
        await stopped.wait()
        table.cells[table.first(_PROCESSES_ROW) + table.column] = 0.0
        await drain(server, settings.drain_timeout_s)


def _share_of(settings: GatewaySettings, processes: int) -> GatewaySettings:
    """Limits of the whole gateway, divided. Connections with some room: they spread evenly, but not exactly."""
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
    cells[second + table.column] = own + 1  # as good as accepted: the next to look counts it
    return all(own <= cells[second + each] or not cells[first + each] for each in table.others if each)


@contextlib.asynccontextmanager
async def _open(
    settings: GatewaySettings, place: Place, table: SharedTable, clock: Clock
) -> AsyncIterator[tuple[RelayServer, ParentLink]]:
    address = parse_controller(settings.controller)
    gateway_key = read_gateway_key(settings)
    tls = controller_trust(settings.controller_ca) if address.target.tls else None
    metrics = Metrics()
    in_flight, limiters = SharedInFlight(table), SharedLimiters(table, clock.monotonic)
    state = State(settings, in_flight, limiters)
    state.ejection = ejection = new_ejection(SharedEjection, settings, in_flight)
    async with open_link(address, gateway_key, tls=tls, timeout_s=settings.controller_timeout_s) as link:
        parent = ParentLink(table, metrics, clock, settings.retry_after_s)
        loads = Loads(link, parent.hint, clock, poll_s=settings.load_poll_s)
        router = ChildRouter(
            in_flight, loads, clock, router_options(settings), parent.look_again, controller=address.target
        )
        router.ask_for_slot, router.on_freed = parent.ask_for_slot, parent.freed
        ejection.tell = parent.eject
        count_disturbed(metrics, router)

        def take(view: FleetView, rows: dict[str, int]) -> None:
            limiters.use(rows)
            limiters.keep({key.id for key in view.keys})
            router.take_over(view, rows, in_flight)
            router.read_queues(table, rows)

        sender = ReceiptSender(
            state.ring,
            metrics.routes[RouteClass.INFERENCE],
            link,
            clock,
            parent.server_now,
            dict,  # those that wait are the parent's
            interval_s=settings.receipts_interval_s,
            take_pressure=router.take_pressure,
        )
        door = build_door(
            settings, parent, router, metrics, clock, gateway_key=gateway_key, state=state, siblings=parent
        )
        async with (
            open_server(settings, door, trust_of(settings, address.target, tls), metrics) as server,
            asyncio.TaskGroup() as tasks,
        ):
            parent.use(server, take, router.find, ejection.hear)
            await parent.open(place.channel)
            monitor = IngressMonitor(
                server.pool, state.ejection, router.nodes_at, clock, silent_s=settings.ingress_silent_s
            )
            running = [
                tasks.create_task(sender.run(), name="receipts"),
                tasks.create_task(monitor.run(), name="ingress monitor"),
                tasks.create_task(parent.tell_numbers(), name="numbers"),
                tasks.create_task(parent.publish(), name="connections"),
            ]
            try:
                yield server, parent
            finally:
                for task in running:
                    task.cancel()
                await loads.close()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_RECEIPTS_S):
                        await sender.send()


class ParentLink:
    """The parent, as the parts of a child see it: a `FleetSource`, the `Siblings` of `own.py`, a source of slots."""

    def __init__(self, table: SharedTable, metrics: Metrics, clock: Clock, retry_after_s: float) -> None:
        self.fleet: Fleet | None = None
        self._table = table
        self._metrics = metrics
        self._clock = clock
        self._clock_offset_s = 0.0
        self._ids = itertools.count(1)
        self._slots: dict[int, tuple[str, str, Waited, asyncio.Future[Replica | Answer]]] = {}
        self._looks: dict[int, asyncio.Future[None]] = {}
        self._numbers: dict[int, asyncio.Future[Numbers]] = {}
        self._channel: Channel | None = None

    def use(
        self,
        server: RelayServer,
        take: Callable[[FleetView, dict[str, int]], None],
        find: Callable[[str], Replica | None],
        on_eject: Callable[[str, str], None],
    ) -> None:
        self._server = server
        self._take = take
        self._find = find
        self._on_eject = on_eject

    async def open(self, descriptor: int) -> None:
        self._channel = await Channel.open(socket.socket(fileno=descriptor), self._on_frame, _on_lost)

    # A `FleetSource`.

    def server_now(self) -> float:
        return self._clock.now().timestamp() + self._clock_offset_s

    def hint(self) -> None:
        self._send(messages.Look(0))

    async def look_again(self) -> None:
        await self._answer(self._looks, messages.Look, _LOOK_AGAIN_S)

    # `Siblings`.

    def serving(self) -> None:
        self._note_state()
        self._send(messages.Serving())

    def are_ready(self) -> bool:
        first = self._table.first(_PROCESSES_ROW)
        return ACCEPTS not in self._table.cells[first : first + self._table.columns].tolist()

    async def render(self, now: float) -> bytes:
        numbers = await self._answer(self._numbers, messages.AskNumbers, _NUMBERS_WITHIN_S)
        numbers = numbers or numbers_of(self._metrics)  # better one process than none
        return render(as_metrics(numbers), now=now, processes=numbers.process)

    # Slots.

    def ask_for_slot(self, model: str, key_id: str, waited: Waited) -> asyncio.Future[Replica | Answer]:
        number, slot = next(self._ids), asyncio.get_running_loop().create_future()
        self._slots[number] = (model, key_id, waited, slot)
        slot.add_done_callback(lambda _: self._left(number) if slot.cancelled() else None)
        self._send(messages.Wait(number, model, key_id))
        return slot

    def _left(self, number: int) -> None:
        if self._slots.pop(number, None) is not None:
            self._send(messages.Leave(number))

    def freed(self, model: str) -> None:
        self._send(messages.Freed(model))

    def eject(self, what: str, which: str) -> None:
        self._send(messages.Eject(what, which))

    # Tasks.

    async def tell_numbers(self) -> None:
        while True:
            await self._clock.sleep(_TELL_NUMBERS_S)
            self._send(messages.TellNumbers(0, numbers_of(self._metrics)))

    async def publish(self) -> None:
        """How many connections are open, as they end."""
        at = self._table.second(_PROCESSES_ROW) + self._table.column
        while True:
            await self._clock.sleep(_PUBLISH_S)
            self._table.cells[at] = self._server.open_connections

    # Frames.

    def _on_frame(self, frame: messages.Frame) -> None:
        match frame:
            case messages.View():
                self._take_view(frame)
            case messages.Served():
                self._on_served(frame)
            case messages.Refused():
                if (waiting := self._slots.pop(frame.id, None)) is not None:
                    _, _, waited, slot = waiting
                    _note(waited, frame)
                    slot.set_result(Answer(frame.status, frame.body, frame.headers))
            case messages.Eject():
                self._on_eject(frame.what, frame.id)
            case messages.Looked():
                _give(self._looks, frame.id, None)
            case messages.AskNumbers():
                self._send(messages.TellNumbers(frame.id, numbers_of(self._metrics)))
            case messages.TellNumbers():
                _give(self._numbers, frame.id, frame.numbers)
            case _:
                log.error("a message that is not for a child", kind=type(frame).__name__)

    def _take_view(self, frame: messages.View) -> None:
        view = decode(FleetView, frame.view)
        fleet = prepare_fleet(view)
        self._take(view, frame.rows)
        self.fleet = fleet
        self._clock_offset_s = frame.clock_offset_s
        if self._table.cells[self._table.first(_PROCESSES_ROW) + self._table.column]:
            self._note_state()

    def _on_served(self, frame: messages.Served) -> None:
        """The slot is counted here before the parent gives up its count: in between it counts twice, never not."""
        waiting = self._slots.pop(frame.id, None)
        replica = None if waiting is None else self._find(frame.process_id)
        if replica is not None:
            replica.load.begin()
        self._send(messages.Taken(frame.id))
        if waiting is None:
            return
        model, key_id, waited, slot = waiting
        if replica is None:  # the view has just lost it
            self._slots[frame.id] = waiting
            self._send(messages.Wait(frame.id, model, key_id))
            return
        _note(waited, frame)
        slot.set_result(replica)

    def _note_state(self) -> None:
        at = self._table.first(_PROCESSES_ROW) + self._table.column
        self._table.cells[at] = ACCEPTS if self.fleet is None else ACCEPTS_WITH_VIEW

    async def _answer(
        self,
        waiting: dict[int, asyncio.Future[T]],
        ask: Callable[[int], messages.Frame],
        within_s: float,
    ) -> T | None:
        number = next(self._ids)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting[number] = answer
        self._send(ask(number))
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            waiting.pop(number, None)

    def _send(self, frame: messages.Frame) -> None:
        if self._channel is not None:
            self._channel.send(frame)


def _give(waiting: dict[int, asyncio.Future[T]], number: int, what: T) -> None:
    answer = waiting.pop(number, None)
    if answer is not None and not answer.done():
        answer.set_result(what)


def _note(waited: Waited, frame: messages.Served | messages.Refused) -> None:
    waited.load_s += frame.load_s
    waited.queue_s += frame.queue_s


def _on_lost() -> None:
    """The parent is gone, killed: it would have stopped us first. Nobody keeps the queues or starts successors now, and
    the next gateway starts its own children."""
    log.error("the parent of this gateway process is gone")
    os._exit(1)
