"""Accepts what people ask for: operation, rule and node rows in one transaction. From then on a crash loses nothing.

The same wish again, while it is being fulfilled, is the same operation.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from corral.contract.admin import PlanNode, PlanView
from corral.controller.backends.catalogue import MachineKind
from corral.controller.backends.plan import NoBuild
from corral.controller.backends.targets import add_target
from corral.controller.backends.world import TargetKey
from corral.controller.operations.bookkeeping import finish_or_reopen, new_row
from corral.controller.operations.prepare import Builds, Candidate, Prepared, Preparing, read_candidates
from corral.controller.operations.preview import NOTHING, SAME_BUILD, changes_nothing, preview, unchanged_words
from corral.controller.operations.requests import OperationKind, Wish
from corral.controller.operations.state import settle
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.counters import RULES
from corral.kit.log import get_log
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import BackendRule, IntentStage, OperationNode, OperationNodeStatus, Want
from corral.store.tables import (
    backend_intents,
    backend_rules,
    backend_targets,
    operation_nodes,
    operations,
    revisions,
)
from corral.store.tables.operations import Operation, StoredRequest

log = get_log(__name__)


@dataclass(frozen=True)
class Accepted:
    operation_id: str
    joined: bool = False  # the same was already being done
    unchanged: str = ""  # of an upgrade or a rollback that finds its build on every node, and so has ended: a sentence


class Accepting:
    def __init__(self, store: Store, preparing: Preparing, feed: ChangeFeed) -> None:
        self._store = store
        self._preparing = preparing
        self._feed = feed

    async def plan(self, wish: Wish) -> PlanView:
        """What it would do. Nothing is stored, nothing is sent."""
        prepared = await self._preparing.prepare(wish)
        notes, nodes = list(prepared.notes), preview(prepared)
        if changes_nothing(prepared, nodes):
            notes.append(unchanged_words(prepared, nodes))
        elif prepared.wish.max_parallel:
            notes.append(
                f"one node per variant switches first, then {prepared.wish.max_parallel} of the nodes at once; "
                "the first that fails to switch stops the rest"
            )
        return PlanView(wish.kind.value, prepared.backend, nodes, prepared.wish.max_parallel, tuple(notes))

    async def accept(self, wish: Wish) -> Accepted:
        prepared = await self._preparing.prepare(wish)
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            same = await _same_operation(tx, prepared)
            if same is not None:
                return Accepted(same, joined=True)
            operation, rows = await self._store_all(tx, prepared)
            await revisions.bump(tx, "operations")
        log.info(
            "operation accepted",
            operation=operation.id,
            kind=operation.kind,
            backend=operation.backend,
            scope=operation.scope_kind,
            by=operation.created_by,
        )
        self._feed.notify("rules", operation.id)
        self._feed.notify("operations", operation.id)
        return Accepted(operation.id, unchanged=_unchanged(prepared, rows))

    async def _store_all(self, tx: Transaction, prepared: Prepared) -> tuple[Operation, list[OperationNode]]:
        wish, now = prepared.wish, await tx.now()
        operation_id, target = str(uuid.uuid4()), prepared.target
        if prepared.want is not Want.ABSENT and not target:
            target = str(uuid.uuid4())
            for kind, build in sorted(prepared.builds.items(), key=lambda item: item[0]):
                await add_target(tx, TargetKey(target, kind), build)
        generation = await revisions.bump(tx, RULES)
        operation = Operation(
            id=operation_id,
            kind=wish.kind.value,
            backend=prepared.backend,
            scope_kind=wish.scope.kind.value,
            scope_value=wish.scope.value,
            generation=generation,
            created_at=now,
            request=StoredRequest(backend=wish.asked, force=wish.force, max_parallel=wish.max_parallel),
            created_by=wish.by,
        )
        await operations.insert(tx, operation)
        await backend_rules.insert(tx, _rule(prepared, operation, target))
        rows = await _rows(tx, prepared, operation)  # after the rule: what nodes should have counts with it
        await operation_nodes.put(tx, rows)
        await finish_or_reopen(tx, [operation], now)
        return operation, rows


def _rule(prepared: Prepared, operation: Operation, target: str) -> BackendRule:
    wish = prepared.wish
    # Those who cannot be told which version to run would run to the newest instead.
    rollback = wish.kind is OperationKind.ROLLBACK
    excluded = [row.outline.id for row in prepared.candidates if rollback and row.outline.protocol == 0]
    return BackendRule(
        generation=operation.generation,
        operation_id=operation.id,
        scope_kind=wish.scope.kind,
        scope_value=wish.scope.value,
        backend=operation.backend,
        want=prepared.want,
        target=target,
        created_at=operation.created_at,
        request=wish.asked,
        origin=wish.origin,
        force=wish.force,
        max_parallel=wish.max_parallel,
        excluded=tuple(sorted(excluded)),
    )


async def _rows(tx: Transaction, prepared: Prepared, operation: Operation) -> list[OperationNode]:
    """One per node, as of this transaction: who joined or left while we prepared is seen."""
    chosen = {candidate.outline.id for candidate in prepared.candidates}
    everybody = prepared.want in (Want.PRESENT, Want.ABSENT)
    present = [row for row in await read_candidates(tx, prepared.wish) if everybody or row.outline.id in chosen]
    shown = preview(replace(prepared, candidates=tuple(present)))
    upgrade = prepared.want is Want.UPGRADED
    ordered = await _nodes_with_orders(tx, prepared.backend, [row.outline.id for row in present]) if upgrade else set()
    return [
        _row(operation, node, candidate, prepared.want, ordered=node.node_id in ordered)
        for node, candidate in zip(shown, present, strict=True)
    ]


async def _nodes_with_orders(tx: Transaction, backend: str, node_ids: list[str]) -> set[str]:
    """Nodes that still have something to do for the backend: what they report now may not be what they end with."""
    intents = await backend_intents.list_(tx, node_ids)
    return {
        row.node_id
        for row in intents
        if row.backend == backend and row.stage not in (IntentStage.DONE, IntentStage.IDLE)
    }


def _row(operation: Operation, node: PlanNode, candidate: Candidate, want: Want, *, ordered: bool) -> OperationNode:
    row = msgspec.structs.replace(
        new_row(operation.id, node.node_id, node.node_name, operation.created_at),
        variant=node.variant,
        version=node.version,
        digest=node.digest,
    )
    if node.action == "skip" or (node.action == NOTHING and _is_over(candidate, want, ordered=ordered)):
        return settle(row, OperationNodeStatus.SKIPPED, node.reason)
    if node.waits:
        return msgspec.structs.replace(
            row, reason=f"node {candidate.outline.status}, will retry when healthy", waits=True
        )
    return row


def _is_over(candidate: Candidate, want: Want, *, ordered: bool) -> bool:
    """Whether a node with nothing to do is done with the operation at once. An install that finds its build there is a
    success, as the inventory shows; an upgrade that changes nothing is not called one."""
    match want:
        case Want.ABSENT:
            return True
        case Want.PRESENT:
            return False
        case Want.UPGRADED:
            return candidate.known and not ordered


def _unchanged(prepared: Prepared, rows: Sequence[OperationNode]) -> str:
    same = (OperationNodeStatus.SKIPPED, SAME_BUILD)
    unchanged = bool(rows) and all((row.status, row.reason) == same for row in rows)
    return unchanged_words(prepared, rows) if unchanged else ""


async def _same_operation(tx: Transaction, prepared: Prepared) -> str | None:
    """The operation that is doing just this, if there is one. Forcing means once more, so that is never the same."""
    wish = prepared.wish
    rules = await backend_rules.list_live(tx, prepared.backend)
    if not rules or wish.force:
        return None
    last = rules[-1]
    asked = (prepared.want, wish.scope.kind, wish.scope.value, wish.max_parallel, wish.asked, wish.origin)
    said = (last.want, last.scope_kind, last.scope_value, last.max_parallel, last.request, last.origin)
    if said != asked or last.force:
        return None
    if not await _has_builds(tx, last.target, prepared.builds):
        return None
    operation = await operations.find(tx, last.operation_id)
    return operation.id if operation is not None and operation.finished_at is None else None


async def _has_builds(tx: Transaction, target: str, builds: Builds) -> bool:
    rows = await backend_targets.list_for(tx, [target]) if target else []
    stored = {MachineKind(row.capability, row.platform, row.python): row.build for row in rows}
    for kind, build in builds.items():
        found = stored.get(kind)
        if isinstance(build, NoBuild):
            if found is not None:
                return False
        elif found is None or found.digest != build.digest:
            return False
    return True
