"""The progress of operations that users watch: the rows of their nodes, which follow the reconciler's steps and the
progress events of workers. `state.py` decides how a row changes.

`record_steps` works in the reconciler's own transaction. A row ends when its rule no longer decides about its node. An
operation without open rows is finished, and is reopened when a node that joined later gets its order.

`ProgressCollector` receives every progress event, on every controller, and keeps the last one of each node in memory.
The controller that leads the reconciler also stores them, at most once a second, so that all controllers show the same.
An event carries an attempt and a number; merging never goes backwards (`state.merge_progress`). LocalAI workers do not
number their events: the time of arrival is their number.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import msgspec
from msgspec.structs import replace

from corral.bus.api import Bus, Tokens
from corral.contract.admin import OperationView
from corral.contract.messages.backends import INSTALL_PROGRESS, InstallProgress
from corral.contract.messages.staging import STAGE_PROGRESS
from corral.controller.backends.plan import Done, Drop, Step, Stop
from corral.controller.backends.reconcile import LEASE
from corral.controller.backends.rules import Unwanted, Wanted
from corral.controller.backends.world import World
from corral.controller.operations.state import (
    LAST_OF_ATTEMPT,
    MAX_SOURCES,
    SOAKING,
    ProgressEvent,
    Shown,
    after_soak,
    after_step,
    merge_progress,
    settle,
)
from corral.controller.operations.views import operation_view, parse_size, sources_text
from corral.controller.orders.order import Send
from corral.controller.rollouts.plan import Held
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import BackendIntent, BackendTarget, IntentStage, OperationNode, OperationNodeStatus
from corral.store.tables import operation_nodes, operations, revisions
from corral.store.tables.operations import Operation

SUPERSEDED = "a later operation decides about this node"
NO_RULE = "no rule requires it on this node any more"
NODE_GONE = "the node was deleted"


Merge = Callable[[str, Sequence[OperationNode]], list[OperationNode]]  # `ProgressCollector.merge`


@dataclass(frozen=True)
class _Planned:
    """The plan for one backend on one node."""

    want: Wanted | Unwanted | None
    step: Step | None
    intent: BackendIntent | None


def new_row(operation_id: str, node_id: str, node_name: str, now: datetime) -> OperationNode:
    return OperationNode(
        operation_id=operation_id,
        node_id=node_id,
        node_name=node_name,
        status=OperationNodeStatus.QUEUED,
        updated_at=now,
    )


async def record_steps(
    tx: Transaction,
    world: World,
    steps: Mapping[str, Sequence[Step]],
    intents: Mapping[tuple[str, str], BackendIntent],
    soaking: Mapping[tuple[str, str], Held],
    *,
    merge: Merge,
) -> bool:
    """True if anything changed that users can see. `intents`: those that changed in this pass. `soaking`: by operation
    and node, canaries whose rows stay open. `merge`: adds the progress that is not stored yet, for a row that ends
    keeps what it has then."""
    rows = await operation_nodes.list_open(tx, list(world.nodes))
    orphans = await operation_nodes.list_orphans(tx)
    sends = [(node_id, step) for node_id, own in steps.items() for step in own if isinstance(step, Send)]
    named = {row.operation_id for row in (*rows, *orphans)} | {step.operation for _, step in sends}
    if not named:
        return False
    known = {operation.id: operation for operation in await operations.list_for(tx, sorted(named))}
    changed = [replace(settle(row, OperationNodeStatus.WITHDRAWN, NODE_GONE), updated_at=world.now) for row in orphans]
    for stored in rows:
        (before,) = merge(stored.operation_id, [stored])
        canary = soaking.get((before.operation_id, before.node_id))
        after = (
            after_soak(before, canary.reason, waits=canary.stopped)
            if canary is not None
            else _after(before, known[before.operation_id], world, steps, intents)
        )
        if after != before:
            changed.append(replace(after, updated_at=world.now))
    changed.extend(_late_rows(world, sends, {(row.operation_id, row.node_id) for row in rows}, known))
    await operation_nodes.put(tx, changed)
    await finish_or_reopen(tx, (known[id] for id in {row.operation_id for row in changed}), world.now)
    return bool(changed)


async def finish_or_reopen(tx: Transaction, touched: Iterable[Operation], now: datetime) -> None:
    ended = {operation.id: operation for operation in touched}
    unfinished = await operation_nodes.list_unfinished(tx, sorted(ended))
    for operation in ended.values():
        if operation.id in unfinished and operation.finished_at is not None:
            await operations.replace(
                tx, msgspec.structs.replace(operation, finished_at=None, outcome="", dismissed=False)
            )
        elif operation.id not in unfinished and operation.finished_at is None:
            stopped = operation.cancelled_at is not None or operation.withdrawn_at is not None
            outcome = "cancelled" if stopped or await _was_cancelled_everywhere(tx, operation.id) else "completed"
            await operations.replace(tx, msgspec.structs.replace(operation, finished_at=now, outcome=outcome, error=""))


async def write_rows(tx: Transaction, operation: Operation, rows: Sequence[OperationNode]) -> None:
    """Store the rows, and end or reopen the operation accordingly. The caller notifies the change feed."""
    now = await tx.now()
    await operation_nodes.put(tx, [replace(row, updated_at=now) for row in rows])
    await finish_or_reopen(tx, [operation], now)
    await revisions.bump(tx, "operations")


async def _was_cancelled_everywhere(tx: Transaction, operation_id: str) -> bool:
    """Whether users cancelled it node by node, on all nodes."""
    counts = (await operation_nodes.count_for(tx, [operation_id])).get(operation_id, {})
    return set(counts) == {OperationNodeStatus.CANCELLED}


def _after(
    row: OperationNode,
    operation: Operation,
    world: World,
    steps: Mapping[str, Sequence[Step]],
    intents: Mapping[tuple[str, str], BackendIntent],
) -> OperationNode:
    shown = _planned(row.node_id, operation.backend, world, steps, intents)
    if shown.want is None:
        return settle(row, OperationNodeStatus.WITHDRAWN, NO_RULE)
    if shown.want.operation != operation.id:
        return settle(row, OperationNodeStatus.SUPERSEDED, SUPERSEDED)
    failures = shown.intent.failures if shown.intent is not None else 0
    row = _with_build(row, world, operation.backend, failures)
    if shown.step is not None:
        assert not isinstance(shown.step, Stop | Drop)
        return after_step(row, _with_note(shown.step, world.target_of(row.node_id, operation.backend)))
    mine = shown.intent is not None and shown.intent.generation == shown.want.generation
    if mine and shown.intent is not None and shown.intent.stage is IntentStage.DONE:
        if row.phase == SOAKING and not _is_shown(world, row, operation.backend, shown.intent):
            return row  # it changed while it soaked: an order will follow, or another inventory
        done = Done(operation.backend, operation.id, shown.want.generation, digest=shown.intent.digest)
        return after_step(row, _with_note(done, world.target_of(row.node_id, operation.backend)))
    return row


def _is_shown(world: World, row: OperationNode, backend: str, intent: BackendIntent) -> bool:
    there = world.nodes[row.node_id].find(backend, row.variant)
    return there is not None and there.digest == intent.digest


def _with_note(step: Shown, target: BackendTarget | None) -> Shown:
    """A success also notes why the build is not the preferred one for the machine."""
    note = target.build.note if target is not None and target.build is not None else ""
    if not note or not isinstance(step, Done):
        return step
    return dataclasses.replace(step, note="; ".join(part for part in (step.note, note) if part))


def _planned(
    node_id: str,
    backend: str,
    world: World,
    steps: Mapping[str, Sequence[Step]],
    intents: Mapping[tuple[str, str], BackendIntent],
) -> _Planned:
    own = [step for step in steps.get(node_id, ()) if step.backend == backend and not isinstance(step, Stop | Drop)]
    intent = intents.get((node_id, backend)) or world.nodes[node_id].intents.get(backend)
    return _Planned(world.wanted[node_id].get(backend), own[0] if own else None, intent)


def _with_build(row: OperationNode, world: World, backend: str, failures: int) -> OperationNode:
    target = world.target_of(row.node_id, backend)
    if target is None or target.build is None:
        return replace(row, failures=failures)
    return replace(row, failures=failures, variant=target.build.variant, version=target.build.version)


def _late_rows(
    world: World,
    sends: Sequence[tuple[str, Send]],
    shown: set[tuple[str, str]],
    known: Mapping[str, Operation],
) -> list[OperationNode]:
    """The rows of nodes that the rule covered only later. A row that has ended stays as it is."""
    rows = []
    for node_id, send in sends:
        if send.operation in known and (send.operation, node_id) not in shown:
            row = new_row(send.operation, node_id, world.nodes[node_id].name, world.now)
            rows.append(after_step(_with_build(row, world, send.backend, 0), send))
    return rows


MAX_OPERATIONS_PER_NODE = 16  # a limit on the memory that one node can claim
MAX_SOURCE_NAME = 100
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
        await self._bus.subscribe(STAGE_PROGRESS, self.on_progress)
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
            own[event.op_id] = read if before is None else _keep_sources(before, read)
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
            event = self._event(operation_id, row.node_id)
            result.append(row if event is None else merge_progress(row, event))
        return result

    def _event(self, operation_id: str, node_id: str) -> ProgressEvent | None:
        own = self._events.get(node_id)
        return own.get(operation_id) if own is not None else None

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

    def view(self, operation: Operation, rows: Sequence[OperationNode], *, with_nodes: bool = True) -> OperationView:
        about_one = operation.scope_kind == "node" and len(rows) == 1
        name = rows[0].node_name if about_one else ""
        merged = self.merge(operation.id, rows)
        return operation_view(operation, merged, scope_name=name, with_nodes=with_nodes)

    def sources_text(self, operation_id: str, node_id: str) -> str:
        """How much came from which source, and which one sent wrong data, as far as the node reported it."""
        return sources_text(self._sources(operation_id, node_id), self._bad(operation_id, node_id))

    def bad_sources_text(self, operation_id: str, node_id: str) -> str:
        return sources_text({}, self._bad(operation_id, node_id))

    def _sources(self, operation_id: str, node_id: str) -> Mapping[str, int]:
        event = self._event(operation_id, node_id)
        return event.sources if event is not None else {}

    def _bad(self, operation_id: str, node_id: str) -> tuple[str, ...]:
        event = self._event(operation_id, node_id)
        return event.bad_sources if event is not None else ()

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
        sources=read_sources(event.sources),
        bad_sources=tuple(name[:MAX_SOURCE_NAME] for name in event.bad_sources[:MAX_SOURCES] if name),
    )


def _keep_sources(before: ProgressEvent, now: ProgressEvent) -> ProgressEvent:
    """Bad sources stay, for another attempt or a restarted worker does not name them again; steps after the download
    have no sources."""
    bad = tuple(dict.fromkeys((*before.bad_sources, *now.bad_sources)))[:MAX_SOURCES]
    same = now.attempt == before.attempt
    return replace(now, bad_sources=bad, sources=now.sources or (before.sources if same else {}))


def read_sources(sources: Mapping[str, int]) -> dict[str, int]:
    """The largest few, with names that can be shown: a node reports them."""
    ranked = sorted(sources.items(), key=lambda item: -item[1])[:MAX_SOURCES]
    return {name[:MAX_SOURCE_NAME]: size for name, size in ranked if name and 0 < size < LAST_OF_ATTEMPT}


def _sane(number: int) -> int:
    return number if 0 <= number < LAST_OF_ATTEMPT else 0
