"""`router.py` for several processes: children decide what can be decided at once, the parent keeps the queues.

A child that finds no slot asks the parent for one. While anybody waits for a model every child asks, so the order of
one queue holds for all of them. Slots are counted in the shared table (`loads.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from corral.contract.view import FleetView
from corral.gateway.answers import Answer
from corral.gateway.pick import BUSY
from corral.gateway.processes.loads import SharedInFlight, SharedLoad
from corral.gateway.processes.table import PARENT, SharedTable
from corral.gateway.queue import Waiter
from corral.gateway.replicas import ModelQueue, Replica, Route, Way
from corral.gateway.router import ReplicaRouter
from corral.gateway.v1 import Ask, Waited

T = TypeVar("T")

_REFRESH_S = 0.001  # how old a child's picture of the others may be when it chooses among several replicas,
_REFRESH_EACH_S = 0.00001  # and for each of them: reading a thousand takes a while

AskForSlot = Callable[[str, str, Waited], "asyncio.Future[Replica | Answer]"]


def queue_row(model: str) -> str:
    return f"queue {model}"


class SharedRouter(ReplicaRouter):
    """What parent and children have in common: a slot that another process took in the same moment is given back."""

    def take_over(self, view: FleetView, rows: Mapping[str, int], in_flight: SharedInFlight) -> None:
        in_flight.use(rows)
        self.took(view)

    def refresh(self, way: Way) -> None:
        for replica in way.replicas:
            load = replica.load
            if isinstance(load, SharedLoad):
                load.refresh()

    def _choose(self, way: Way, body: bytes) -> Replica | None:
        for _ in range(len(way.replicas) + 1):
            replica = super()._choose(way, body)
            if replica is None or not replica.load.is_over:
                return replica
            replica.load.end()
        return None


class PublishedQueue(ModelQueue):
    """The parent's: how many wait is in the table, for the children."""

    def __init__(self, on_freed: Callable[[], None]) -> None:
        super().__init__(on_freed)
        self._publish: Callable[[int], None] = lambda _: None

    def publish_in(self, table: SharedTable, row: int) -> None:
        at = table.first(row) + PARENT
        self._publish = partial(table.cells.__setitem__, at)
        self._publish(self.waiting)

    def add(self, key_id: str, gave: Callable[[object], None]) -> Waiter[object]:
        waiter = super().add(key_id, gave)
        self._publish(self.waiting)
        return waiter

    def serve(self, what: object) -> bool:
        was_served = super().serve(what)
        self._publish(self.waiting)
        return was_served

    def leave(self, waiter: Waiter[object]) -> None:
        super().leave(waiter)
        self._publish(self.waiting)


class ParentRouter(SharedRouter):
    """Keeps the queues of all processes and serves no request itself."""

    def publish_queues(self, table: SharedTable, rows: Mapping[str, int]) -> None:
        for name, way in self._ways.items():
            row = rows.get(queue_row(name))
            if row is not None and isinstance(way.queue, PublishedQueue):
                way.queue.publish_in(table, row)

    def new_queue(self, name: str) -> ModelQueue:
        return PublishedQueue(partial(self._serve_waiting, name))

    def find(self, model: str) -> Way | None:
        return self._ways.get(model)

    def serve_waiting(self, model: str = "") -> None:
        """Those of one model, or all: slots may have become free in other processes."""
        for name in [model] if model else [*self.waiting()]:
            self._serve_waiting(name)

    def _choose(self, way: Way, body: bytes) -> Replica | None:
        self.refresh(way)
        return super()._choose(way, body)

    async def _first(
        self, name: str, queue: ModelQueue, served: asyncio.Future[Replica | Answer], started: float
    ) -> Replica | Answer:
        # A slot may have become free between the child's look and the moment when the children saw that somebody waits.
        self._serve_waiting(name)
        return await super()._first(name, queue, served, started)


class RemoteQueue(ModelQueue):
    """A child's picture of the parent's queue."""

    def __init__(self, on_freed: Callable[[], None]) -> None:
        self._cells: memoryview[float] | None = None
        self._at = 0
        self.refreshed_at = 0.0
        super().__init__(on_freed)

    def read_from(self, table: SharedTable, row: int) -> None:
        self._cells = table.cells
        self._at = table.first(row) + PARENT

    @property  # a plain attribute in a gateway of one process, where it costs less
    def waiting(self) -> int:
        return 0 if self._cells is None else int(self._cells[self._at])

    @waiting.setter
    def waiting(self, _count: int) -> None:
        """Nobody waits here."""


class ChildRouter(SharedRouter):
    ask_for_slot: AskForSlot  # set before the first request
    on_freed: Callable[[str], None]  # told the model

    def read_queues(self, table: SharedTable, rows: Mapping[str, int]) -> None:
        for name, way in self._ways.items():
            row = rows.get(queue_row(name))
            if row is not None and isinstance(way.queue, RemoteQueue):
                way.queue.read_from(table, row)

    def new_queue(self, name: str) -> ModelQueue:
        return RemoteQueue(lambda: self.on_freed(name))

    def wants(self, model: str) -> bool:
        return False  # loads are the parent's to ask for

    def _serve_waiting(self, name: str) -> None:
        """The parent does."""

    def find(self, process_id: str) -> Replica | None:
        for way in self._ways.values():
            place = way.places.get(process_id)
            if place is not None:
                return way.replicas[place]
        return None

    def route_now(self, ask: Ask) -> Route | None:
        model = ask.fields.model
        way = self._exact.get(model)
        if way is None or way.queue.waiting:  # the waiting requests come first
            return None
        if way.model.max_concurrent:
            self.refresh(way)
            if way.is_full():
                return None
        replicas = way.replicas
        if len(replicas) == 1 and way.ranks[0] < BUSY:  # as mostly
            replica = replicas[0]
            replica.load.begin()
            if replica.load.is_over:
                replica.load.end()
                return None
        else:
            chosen = self._choose(way, ask.body)
            if chosen is None:
                return None
            replica = chosen
        path = ask.request.path
        return replica.routes.get(path) or replica.route(path, model)

    async def route(self, ask: Ask) -> Route | Answer:
        way = self._names.get(ask.fields.model)
        if way is not None:
            self.refresh(way)
        return await super().route(ask)

    def _choose(self, way: Way, body: bytes) -> Replica | None:
        queue = way.queue
        if len(way.replicas) > 1 and isinstance(queue, RemoteQueue):
            now = self._clock.monotonic()
            if now - queue.refreshed_at > _REFRESH_S + _REFRESH_EACH_S * len(way.replicas):
                queue.refreshed_at = now
                self.refresh(way)
        replica = super()._choose(way, body)
        if replica is None:  # slots may be free since the last refresh
            self.refresh(way)
            replica = super()._choose(way, body)
        return replica

    async def wait(self, way: Way, key_id: str, waited: Waited) -> Replica | Answer:
        return await self.ask_for_slot(way.model.id, key_id, waited)
