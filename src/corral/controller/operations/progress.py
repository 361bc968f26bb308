"""Collects the progress that workers report, and shows, stores and publishes it.

Every controller receives every progress event and keeps the last one of each node in memory. The controller that leads
the reconciler also stores them, at most once a second, so that all controllers show the same.

An event carries an attempt and a number; merging never goes backwards (`state.merge_progress`). LocalAI workers do not
number their events: the time of arrival is their number.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial

from msgspec.structs import replace

from corral.bus.api import Bus, Tokens
from corral.contract.admin import OperationView
from corral.contract.messages.backends import INSTALL_PROGRESS, InstallProgress
from corral.controller.backends.reconcile import LEASE
from corral.controller.operations.state import LAST_OF_ATTEMPT, ProgressEvent, merge_progress
from corral.controller.operations.views import operation_view, parse_size
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import OperationNode
from corral.store.tables import operation_nodes, operations, revisions
from corral.store.tables.operations import Operation

MAX_OPERATIONS_PER_NODE = 16  # a limit on the memory that one node can claim
_IDLE_S = 60.0
_SHOWN_FOR = timedelta(minutes=5)  # subscribers still receive an operation for this time after its end


class ProgressCollector:
    """Collects progress; as a `ViewSource` it also supplies the change feed with views of operations."""

    name = "progress"
    event = "operation"
    counter = "operations"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        *,
        publish_s: float = 0.25,
        write_s: float = 1.0,
    ) -> None:
        self._store = store
        self._bus = bus
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._publish_s = publish_s
        self._write_s = write_s
        self._events: dict[str, OrderedDict[str, ProgressEvent]] = {}  # by node, then operation
        self._unpublished: set[str] = set()
        self._unwritten: set[str] = set()
        self._to_publish, self._to_write = Wake(), Wake()
        self._base: dict[str, tuple[Operation, list[OperationNode]]] = {}  # as last read from the store
        feed.add_source(self)

    async def run(self) -> None:
        await self._bus.subscribe(INSTALL_PROGRESS, self.on_progress)
        async with asyncio.TaskGroup() as tasks:
            for name, step, rest_s, wake in (
                ("progress", self.publish, self._publish_s, self._to_publish),
                ("writing progress", self.write, self._write_s, self._to_write),
            ):
                paced = partial(self._paced, step, rest_s)
                tasks.create_task(run_every(name, _IDLE_S, paced, clock=self._clock, wake=wake, max_wait_s=rest_s))

    async def _paced(self, step: Callable[[], Awaitable[None]], rest_s: float) -> None:
        """Rest after the step, so that the events of that time are handled together."""
        await step()
        await self._clock.sleep(rest_s)

    async def on_progress(self, event: InstallProgress, tokens: Tokens) -> None:
        # Only this node may publish on the subject; a node id inside the message would prove nothing.
        own = self._events.setdefault(tokens["node"], OrderedDict())
        read = _read_event(event, self._clock)
        before = own.get(event.op_id)
        if before is None or (read.attempt, read.seq) > (before.attempt, before.seq):
            own[event.op_id] = read
            own.move_to_end(event.op_id)
            while len(own) > MAX_OPERATIONS_PER_NODE:
                own.popitem(last=False)
            self._unpublished.add(event.op_id)
            self._unwritten.add(event.op_id)
            self._to_publish.set()
            self._to_write.set()

    def merge(self, operation_id: str, rows: Sequence[OperationNode]) -> list[OperationNode]:
        """The rows with the progress received since they were stored."""
        result = []
        for row in rows:
            own = self._events.get(row.node_id)
            event = own.get(operation_id) if own is not None else None
            result.append(row if event is None else merge_progress(row, event))
        return result

    async def read(self, tx: Transaction) -> dict[str, OperationView]:
        """Views of the operations that run or have just ended, for subscribers of the change feed."""
        since = await tx.now() - _SHOWN_FOR
        shown = await operations.list_shown(tx, finished_since=since)
        self._base = {operation.id: (operation, rows) for operation, rows in await self.read_rows(tx, shown)}
        return {id: self.view(operation, rows) for id, (operation, rows) in self._base.items()}

    async def read_rows(
        self, tx: Transaction, chosen: Sequence[Operation]
    ) -> list[tuple[Operation, list[OperationNode]]]:
        rows = await operation_nodes.list_for(tx, [operation.id for operation in chosen])
        return [(operation, rows.get(operation.id, [])) for operation in chosen]

    def view(self, operation: Operation, rows: Sequence[OperationNode]) -> OperationView:
        about_one = operation.scope_kind == "node" and len(rows) == 1
        name = rows[0].node_name if about_one else ""
        return operation_view(operation, self.merge(operation.id, rows), scope_name=name)

    async def publish(self) -> None:
        """Publish the changed operations to the subscribers of the change feed, if there are any."""
        unpublished, self._unpublished = self._unpublished, set()
        if not self._feed.subscribers:
            return
        for operation_id in unpublished & self._base.keys():
            operation, rows = self._base[operation_id]
            self._feed.publish(self.event, operation_id, self.view(operation, rows))

    async def write(self) -> None:
        """Store the progress if this controller leads the reconciler; the others only keep it in memory."""
        unwritten, self._unwritten = self._unwritten, set()
        if not unwritten or not self._leadership.epoch(LEASE):
            return
        async with self._store.write() as tx:
            await self._leadership.require(tx, LEASE)
            now = await tx.now()
            changed = []
            for operation, rows in await self.read_rows(tx, await operations.list_for(tx, sorted(unwritten))):
                for before, after in zip(rows, self.merge(operation.id, rows), strict=True):
                    if after != before:
                        changed.append(replace(after, updated_at=now))
            await operation_nodes.put(tx, changed)
            if changed:
                await revisions.bump(tx, self.counter)
        if changed:
            self._feed.notify(self.counter)


def _read_event(event: InstallProgress, clock: Clock) -> ProgressEvent:
    return ProgressEvent(
        attempt=_sane(event.attempt),
        seq=_sane(event.seq) or int(clock.now().timestamp() * 1000),
        phase=event.phase,
        file_name=event.file_name,
        percentage=min(100.0, max(0.0, event.percentage)),
        current_bytes=_sane(event.current_bytes) or parse_size(event.current),
        total_bytes=_sane(event.total_bytes) or parse_size(event.total),
        rate=max(0.0, event.rate),
    )


def _sane(number: int) -> int:
    return number if 0 <= number < LAST_OF_ATTEMPT else 0
