"""Runs what open operations of one kind want on nodes: at most one task for each operation and node. What a task does,
`controller/releases` and `controller/staging` decide.

The controller with the lease runs the tasks. A task ends when its row ends, when its operation is cancelled, and when
another controller takes the lease.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, TypeVar

from corral.controller.operations.progress import Merge, write_rows
from corral.controller.runtime.change_feed import RULES, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.tasks import BackgroundTasks, KeyedTasks
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import ENDED, OperationNode
from corral.store.tables import nodes, operation_nodes, operations, revisions
from corral.store.tables.nodes import NodeOutline
from corral.store.tables.operations import Operation

COUNTER = "operations"
NEVER = datetime.min.replace(tzinfo=UTC)
T = TypeVar("T")
Task = Callable[[], Coroutine[Any, Any, None]]
Change = Callable[[OperationNode], OperationNode]
Cancel = Callable[[str, str], Coroutine[Any, Any, None] | None]


@dataclass(frozen=True)
class OpenOperations:
    """The operations of a kind that have not ended, at one moment."""

    operations: Sequence[Operation] = ()
    rows: Mapping[str, Sequence[OperationNode]] = field(default_factory=dict)  # by operation; also those that ended
    outlines: Mapping[str, NodeOutline] = field(default_factory=dict)
    now: datetime = NEVER

    @property
    def ids(self) -> set[str]:
        return {operation.id for operation in self.operations}

    def keep_open(self, known: Mapping[str, T]) -> dict[str, T]:
        """What is known by operation, without those that have ended."""
        ids = self.ids
        return {operation_id: each for operation_id, each in known.items() if operation_id in ids}


class NodeTasks:
    """`async with` it: tasks run inside the block, and are cancelled when it is left."""

    def __init__(
        self,
        store: Store,
        leadership: Leadership,
        feed: ChangeFeed,
        *,
        kind: str,
        lease: str,
        cancel: Cancel,
        merge: Merge | None = None,
    ) -> None:
        """`cancel`: the call that tells a node to stop, after the task for an operation and this node was cancelled.
        `merge` adds the progress that is not stored yet."""
        self._store = store
        self._leadership = leadership
        self._feed = feed
        self._kind = kind
        self._lease = lease
        self._cancel = cancel
        self._merge = merge
        self._tasks: KeyedTasks[tuple[str, str]] = KeyedTasks()  # an operation and a node
        self._cancels = BackgroundTasks()

    async def __aenter__(self) -> Self:
        await self._cancels.__aenter__()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            await self._cancels.__aexit__(kind, error, trace)

    async def read_open(self) -> OpenOperations:
        """The open operations, after the tasks for all other rows were cancelled; none while another controller
        leads."""
        if self._leadership.epoch(self._lease) == 0:
            for key in self._tasks.running():
                self._tasks.cancel(key)
            return OpenOperations()
        async with self._store.read() as tx:
            now = await tx.now()
            opened = await operations.list_open(tx, kind=self._kind)
            rows = await operation_nodes.list_for(tx, [operation.id for operation in opened])
            outlines = {outline.id: outline for outline in await nodes.list_outlines(tx)} if opened else {}
        found = OpenOperations(opened, rows, outlines, now)
        self._cancel_all_but(found)
        return found

    def _cancel_all_but(self, opened: OpenOperations) -> None:
        ids = opened.ids
        live = {(each.operation_id, each.node_id) for own in opened.rows.values() for each in own if _is_open(each)}
        for key in self._tasks.running():
            operation_id, node_id = key
            if key in live or (not node_id and operation_id in ids):
                continue
            self._tasks.cancel(key)
            if node_id and (call := self._cancel(operation_id, node_id)) is not None:
                self._cancels.start(call, name=f"cancel {operation_id}")

    def start(self, operation_id: str, node_id: str, task: Task, *, name: str) -> None:
        """Start the task unless it runs. An empty node: for the whole operation."""
        self._tasks.start((operation_id, node_id), task, name=name)

    def is_running(self, operation_id: str, node_id: str) -> bool:
        return (operation_id, node_id) in self._tasks.running()

    def cancel_operation(self, operation_id: str) -> None:
        """Cancel its tasks here; nodes keep their orders."""
        for key in self._tasks.running():
            if key[0] == operation_id:
                self._tasks.cancel(key)

    async def change_rows(
        self,
        operation_id: str,
        change: Change,
        node_ids: set[str] | None = None,
        *,
        only_if: Callable[[Transaction], Coroutine[Any, Any, bool]] | None = None,
    ) -> list[OperationNode]:
        """Change the rows that have not ended, of these nodes or all; return the changed ones. `only_if`: asked in the
        same transaction."""
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            await self._leadership.require(tx, self._lease)
            current = await operations.find(tx, operation_id)
            if current is None or current.finished_at is not None:
                return []
            if only_if is not None and not await only_if(tx):
                return []
            rows: Sequence[OperationNode] = await operation_nodes.list_(tx, operation_id)
            if self._merge is not None:
                rows = self._merge(operation_id, rows)
            chosen = [row for row in rows if _is_open(row) and (node_ids is None or row.node_id in node_ids)]
            changed = [after for row in chosen if (after := change(row)) != row]
            if changed:
                await write_rows(tx, current, changed)
        if changed:
            self._feed.notify(COUNTER, operation_id)
        return changed


def _is_open(row: OperationNode) -> bool:
    return row.status not in ENDED
