"""`routing/router.py` for several processes: children choose replicas that have a free slot, the parent keeps the
queues.

A child that finds no free slot requests one from the parent. While requests wait for a model, every child requests its
slots there, so that one queue decides the order for all of them. The shared table counts slots (`in_flight.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from corral.contract.view import FleetView
from corral.gateway.processes.in_flight import SharedInFlight, SharedSlotCounter
from corral.gateway.processes.table import PARENT, SharedTable
from corral.gateway.responses import Response
from corral.gateway.routing.pick import BUSY
from corral.gateway.routing.queue import Waiter
from corral.gateway.routing.replicas import ModelQueue, ModelRoute, ReplicaTarget, Route
from corral.gateway.routing.request import RouteRequest, WaitTimes
from corral.gateway.routing.router import ReplicaRouter

T = TypeVar("T")

_REFRESH_S = 0.001  # maximum age of the other processes' counts for a choice among several replicas,
_REFRESH_EACH_S = 0.00001  # plus this for each replica: reading a thousand takes long

RequestSlot = Callable[[str, str, WaitTimes], "asyncio.Future[ReplicaTarget | Response]"]


def queue_row(model: str) -> str:
    return f"queue {model}"


class SharedRouter(ReplicaRouter):
    """The common part of parent and children: returns a slot that another process took at the same time."""

    def apply_shared_view(self, view: FleetView, rows: Mapping[str, int], in_flight: SharedInFlight) -> None:
        in_flight.use(rows)
        self.apply_view(view)

    def refresh(self, model_route: ModelRoute) -> None:
        for replica in model_route.replicas:
            counter = replica.counter
            if isinstance(counter, SharedSlotCounter):
                counter.refresh()

    def _choose(self, model_route: ModelRoute, body: bytes) -> ReplicaTarget | None:
        for _ in range(len(model_route.replicas) + 1):
            replica = super()._choose(model_route, body)
            if replica is None or not replica.counter.is_over:
                return replica
            replica.counter.end()
        return None


class PublishedQueue(ModelQueue):
    """The parent's queue: it writes the number of waiting requests to the table, for the children."""

    def __init__(self, on_slot_free: Callable[[], None]) -> None:
        super().__init__(on_slot_free)
        self._publish: Callable[[int], None] = lambda _: None

    def publish_in(self, table: SharedTable, row: int) -> None:
        at = table.first(row) + PARENT
        self._publish = partial(table.cells.__setitem__, at)
        self._publish(self.waiting)

    def add(self, key_id: str, on_served: Callable[[object], None]) -> Waiter[object]:
        waiter = super().add(key_id, on_served)
        self._publish(self.waiting)
        return waiter

    def serve(self, item: object) -> bool:
        was_served = super().serve(item)
        self._publish(self.waiting)
        return was_served

    def remove(self, waiter: Waiter[object]) -> None:
        super().remove(waiter)
        self._publish(self.waiting)


class ParentRouter(SharedRouter):
    """Keeps the queues of all processes and serves no request itself."""

    def publish_queues(self, table: SharedTable, rows: Mapping[str, int]) -> None:
        for name, model_route in self._model_routes.items():
            row = rows.get(queue_row(name))
            if row is not None and isinstance(model_route.queue, PublishedQueue):
                model_route.queue.publish_in(table, row)

    def new_queue(self, name: str) -> ModelQueue:
        return PublishedQueue(partial(self._serve_waiting, name))

    def find(self, model: str) -> ModelRoute | None:
        return self._model_routes.get(model)

    def serve_waiting(self, model: str = "") -> None:
        """Serve the waiting requests of one model, or of all: slots may have become free in other processes."""
        for name in [model] if model else [*self.waiting()]:
            self._serve_waiting(name)

    def _choose(self, model_route: ModelRoute, body: bytes) -> ReplicaTarget | None:
        self.refresh(model_route)
        return super()._choose(model_route, body)

    async def _wait_for(
        self, name: str, queue: ModelQueue, served: asyncio.Future[ReplicaTarget | Response], started: float
    ) -> ReplicaTarget | Response:
        # A slot may have become free after the child looked for one and before the children saw a waiting request.
        self._serve_waiting(name)
        return await super()._wait_for(name, queue, served, started)


class RemoteQueue(ModelQueue):
    """A child's copy of the length of the parent's queue."""

    def __init__(self, on_slot_free: Callable[[], None]) -> None:
        self._cells: memoryview[float] | None = None
        self._at = 0
        self.refreshed_at = 0.0
        super().__init__(on_slot_free)

    def read_from(self, table: SharedTable, row: int) -> None:
        self._cells = table.cells
        self._at = table.first(row) + PARENT

    @property  # a plain attribute in a gateway of one process, where it costs less
    def waiting(self) -> int:
        return 0 if self._cells is None else int(self._cells[self._at])

    @waiting.setter
    def waiting(self, _count: int) -> None:
        """Requests wait in the parent only."""


class ChildRouter(SharedRouter):
    request_slot: RequestSlot  # set before the first request
    on_slot_free: Callable[[str], None]  # called with the model

    def read_queues(self, table: SharedTable, rows: Mapping[str, int]) -> None:
        for name, model_route in self._model_routes.items():
            row = rows.get(queue_row(name))
            if row is not None and isinstance(model_route.queue, RemoteQueue):
                model_route.queue.read_from(table, row)

    def new_queue(self, name: str) -> ModelQueue:
        return RemoteQueue(lambda: self.on_slot_free(name))

    def is_wanted(self, model: str) -> bool:
        return False  # the parent requests loads

    def _serve_waiting(self, name: str) -> None:
        """The parent serves waiting requests."""

    def find(self, process_id: str) -> ReplicaTarget | None:
        for model_route in self._model_routes.values():
            index = model_route.index_by_process.get(process_id)
            if index is not None:
                return model_route.replicas[index]
        return None

    def route_now(self, request: RouteRequest) -> Route | None:
        model = request.model
        model_route = self._ready.get(model)
        if model_route is None or model_route.queue.waiting:  # waiting requests come first
            return None
        if model_route.model.max_concurrent:
            self.refresh(model_route)
            if model_route.is_full():
                return None
        replicas = model_route.replicas
        if len(replicas) == 1 and model_route.ranks[0] < BUSY:  # the usual case
            replica = replicas[0]
            replica.counter.begin()
            if replica.counter.is_over:
                replica.counter.end()
                return None
        else:
            chosen = self._choose(model_route, request.body)
            if chosen is None:
                return None
            replica = chosen
        path = request.request.path
        return replica.routes.get(path) or replica.route(path, model)

    async def route(self, request: RouteRequest) -> Route | Response:
        model_route = self._by_name.get(request.model)
        if model_route is not None:
            self.refresh(model_route)
        return await super().route(request)

    def _choose(self, model_route: ModelRoute, body: bytes) -> ReplicaTarget | None:
        queue = model_route.queue
        if len(model_route.replicas) > 1 and isinstance(queue, RemoteQueue):
            now = self._clock.monotonic()
            if now - queue.refreshed_at > _REFRESH_S + _REFRESH_EACH_S * len(model_route.replicas):
                queue.refreshed_at = now
                self.refresh(model_route)
        replica = super()._choose(model_route, body)
        if replica is None:  # slots may be free since the last refresh
            self.refresh(model_route)
            replica = super()._choose(model_route, body)
        return replica

    async def wait(self, model_route: ModelRoute, key_id: str, wait_times: WaitTimes) -> ReplicaTarget | Response:
        return await self.request_slot(model_route.model.id, key_id, wait_times)
