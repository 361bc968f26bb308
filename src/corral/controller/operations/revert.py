"""Ends a rollout that is reverted: withdraws its rule, and requests the previous version for the nodes that switched.

The revert is an operation like a rollback by a person: durable, retried, and watched in the same way. It is stored in
the transaction in which the rollout is found to be bad, so either both or none of them happen.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from corral.controller.backends.catalogue import MachineKind
from corral.controller.backends.targets import add_target
from corral.controller.backends.world import TargetKey, World, kind_of
from corral.controller.operations.progress import new_row
from corral.controller.operations.state import settle
from corral.controller.runtime.change_feed import RULES
from corral.kit.log import get_log
from corral.store.engine.transactions import Transaction
from corral.store.records import (
    ENDED,
    BackendIntent,
    BackendRequest,
    BackendRule,
    IntentStage,
    OperationNodeStatus,
    OrderKind,
    Rollout,
    RolloutNodeBefore,
    ScopeKind,
    TargetBuild,
    Want,
)
from corral.store.tables import backend_rules, backend_targets, nodes, operation_nodes, operations, revisions
from corral.store.tables.operations import Operation, StoredRequest

log = get_log(__name__)

REVERTED = "reverted"  # the outcome of the operation


@dataclass(frozen=True)
class Revert:
    """One operation that returns nodes to a version: by the target of an earlier rule, or by builds that they keep."""

    nodes: tuple[str, ...]
    request: BackendRequest
    target: str = ""
    builds: Mapping[MachineKind, TargetBuild] = field(default_factory=dict)


async def revert_rollout(
    tx: Transaction, world: World, intents: Mapping[tuple[str, str], BackendIntent], rollout: Rollout
) -> Rollout:
    """`intents`: those that changed in this pass. Returns the rollout with the operations that carry out the revert."""
    operation = await operations.get(tx, rollout.operation_id)
    rules = [rule for rule in await backend_rules.list_live(tx, rollout.subject) if rule.want is not Want.ABSENT]
    await backend_rules.withdraw(tx, rollout.generation)
    reason = f"the rollout was reverted: {rollout.verdict}"
    rows = await operation_nodes.list_(tx, operation.id)
    open_rows = [row for row in rows if row.status not in ENDED]
    await operation_nodes.put(
        tx, [replace(settle(row, OperationNodeStatus.WITHDRAWN, reason), updated_at=world.now) for row in open_rows]
    )
    switched = _switched(world, intents, rollout)
    ids = []
    for revert in await _plan(tx, world, rollout, switched, rules):
        ids.append(await _request(tx, world, rollout, revert))
    kept = sorted(world.nodes[node_id].name for node_id in switched if not _can_return(world, rollout, node_id))
    error = rollout.verdict
    if kept:
        error += f"; {', '.join(kept)} cannot be told to go back: a LocalAI worker, or its version before is unknown"
    # Cancelled, too: orders that still run are stopped, and `corral ops retry` requests the upgrade again.
    ended = replace(operation, cancelled_at=world.now, finished_at=world.now, outcome=REVERTED, error=error)
    await operations.replace(tx, ended)
    await revisions.bump(tx, RULES)
    return replace(rollout, reverted_by=tuple(ids))


def _switched(world: World, intents: Mapping[tuple[str, str], BackendIntent], rollout: Rollout) -> list[str]:
    """The nodes that have switched, and those that may just do so."""
    found = []
    for peer in world.peers.get(rollout.generation, ()):
        intent = intents.get((peer.node_id, rollout.subject)) or world.nodes[peer.node_id].intents.get(rollout.subject)
        if intent is None or intent.generation != rollout.generation or intent.kind is OrderKind.FETCH:
            continue
        before = rollout.nodes.get(peer.node_id)
        begun = intent.stage in (IntentStage.SENT, IntentStage.DONE)
        # A node that had no build before is left to earlier rules.
        if before is not None and before.variant and begun and before.digest != intent.digest:
            found.append(peer.node_id)
    return found


def _can_return(world: World, rollout: Rollout, node_id: str) -> bool:
    """A LocalAI worker would install the newest version instead of the earlier one."""
    return bool(rollout.nodes[node_id].digest) and world.nodes[node_id].accepts


async def _plan(
    tx: Transaction, world: World, rollout: Rollout, switched: Sequence[str], rules: Sequence[BackendRule]
) -> list[Revert]:
    left = [node_id for node_id in switched if _can_return(world, rollout, node_id)]
    earlier = [rule for rule in rules if rule.generation < rollout.generation and rule.target]
    found: list[Revert] = []
    for rule in reversed(earlier):
        rows = await backend_targets.list_for(tx, [rule.target])
        builds = {MachineKind(row.capability, row.platform, row.python): row.build for row in rows}
        same = [
            node_id
            for node_id in left
            if (build := builds.get(kind_of(world.outlines[node_id]))) is not None
            and build.digest == rollout.nodes[node_id].digest
        ]
        if same:
            found.append(Revert(tuple(same), rule.request, rule.target))
            left = [node_id for node_id in left if node_id not in same]
    request = world.requests[rollout.generation]
    pinned = msgspec.structs.replace(request, pinned=True)
    if left and not earlier:
        builds_kept = _majority(world, rollout.nodes, left)
        same = [
            node_id
            for node_id in left
            if builds_kept[kind_of(world.outlines[node_id])].digest == rollout.nodes[node_id].digest
        ]
        found.append(Revert(tuple(same), pinned, builds=builds_kept))
        left = [node_id for node_id in left if node_id not in same]
    for node_id in left:
        kept = {kind_of(world.outlines[node_id]): _kept(rollout.nodes[node_id])}
        found.append(Revert((node_id,), pinned, builds=kept))
    return found


def _majority(
    world: World, before: Mapping[str, RolloutNodeBefore], node_ids: Sequence[str]
) -> dict[MachineKind, TargetBuild]:
    votes: dict[MachineKind, Counter[TargetBuild]] = {}
    for node_id in node_ids:
        votes.setdefault(kind_of(world.outlines[node_id]), Counter())[_kept(before[node_id])] += 1
    return {kind: counted.most_common(1)[0][0] for kind, counted in votes.items()}


def _kept(before: RolloutNodeBefore) -> TargetBuild:
    """A version that the node keeps beside the current one: nothing has to be fetched."""
    return TargetBuild(before.variant, before.digest, before.version)


async def _request(tx: Transaction, world: World, rollout: Rollout, revert: Revert) -> str:
    single = revert.nodes[0] if len(revert.nodes) == 1 else ""
    scope_kind, value = (ScopeKind.NODE, single) if single else (ScopeKind.ALL, "")
    target = revert.target or str(uuid.uuid4())
    for kind, build in sorted(revert.builds.items(), key=lambda item: item[0]):
        await add_target(tx, TargetKey(target, kind), build)
    generation = await revisions.bump(tx, RULES)
    operation = Operation(
        id=str(uuid.uuid4()),
        kind="rollback",
        backend=rollout.subject,
        scope_kind=scope_kind.value,
        scope_value=value,
        generation=generation,
        created_at=world.now,
        request=StoredRequest(backend=revert.request),
    )
    others = {outline.id for outline in await nodes.list_outlines(tx)} - set(revert.nodes)
    await operations.insert(tx, operation)
    await backend_rules.insert(
        tx,
        BackendRule(
            generation=generation,
            operation_id=operation.id,
            scope_kind=scope_kind,
            scope_value=value,
            backend=rollout.subject,
            want=Want.UPGRADED,
            target=target,
            created_at=world.now,
            request=revert.request,
            excluded=() if single else tuple(sorted(others)),
        ),
    )
    rows = [new_row(operation.id, node_id, world.nodes[node_id].name, world.now) for node_id in revert.nodes]
    await operation_nodes.put(tx, rows)
    log.info("nodes return to their previous version", operation=operation.id, nodes=len(revert.nodes))
    return operation.id
