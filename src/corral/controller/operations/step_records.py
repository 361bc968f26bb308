"""Records the reconciler's steps in the rows of operations that users watch, in the reconciler's own transaction.

Rows follow the steps; a row ends when its rule no longer decides about its node. An operation without open rows is
finished, and is reopened when a node that joined later gets its order. `steps.py` and `state.py` decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from msgspec.structs import replace

from corral.controller.backends.plan import Done, Drop, Step, Stop
from corral.controller.backends.rules import Unwanted, Wanted
from corral.controller.backends.world import World
from corral.controller.operations.state import Shown, after_step, settle
from corral.controller.orders.order import Send
from corral.store.engine.transactions import Transaction
from corral.store.records import BackendIntent, BackendTarget, IntentStage, OperationNode, OperationNodeStatus
from corral.store.tables import operation_nodes, operations
from corral.store.tables.operations import Operation

SUPERSEDED = "a later operation decides about this node"
NO_RULE = "no rule requires it on this node any more"
NODE_GONE = "the node was deleted"


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
    tx: Transaction, world: World, steps: Mapping[str, Sequence[Step]], intents: Mapping[tuple[str, str], BackendIntent]
) -> bool:
    """True if anything changed that users can see. `intents`: those that changed in this pass."""
    rows = await operation_nodes.list_open(tx, list(world.nodes))
    orphans = await operation_nodes.list_orphans(tx)
    sends = [(node_id, step) for node_id, own in steps.items() for step in own if isinstance(step, Send)]
    named = {row.operation_id for row in (*rows, *orphans)} | {step.operation for _, step in sends}
    if not named:
        return False
    known = {operation.id: operation for operation in await operations.list_for(tx, sorted(named))}
    changed = [replace(settle(row, OperationNodeStatus.WITHDRAWN, NODE_GONE), updated_at=world.now) for row in orphans]
    for before in rows:
        after = _after(before, known[before.operation_id], world, steps, intents)
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
        done = Done(operation.backend, operation.id, shown.want.generation, digest=shown.intent.digest)
        return after_step(row, _with_note(done, world.target_of(row.node_id, operation.backend)))
    return row


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
