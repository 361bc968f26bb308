"""Accepts requests: stores operation, rule and node rows in one transaction. After its commit a crash loses nothing.

An equal request, while the operation runs, joins that operation.
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
from corral.controller.operations.preview import (
    NOTHING,
    SAME_BUILD,
    changes_nothing,
    preview,
    rollout_classes,
    rollout_notes,
    unchanged_words,
)
from corral.controller.operations.progress import finish_or_reopen, new_row
from corral.controller.operations.requests import (
    Builds,
    Candidate,
    OperationKind,
    OperationRequest,
    RequestResolver,
    ResolvedRequest,
    read_candidates,
)
from corral.controller.operations.state import settle
from corral.controller.rollouts.options import describe_soak
from corral.controller.runtime.change_feed import RULES, ChangeFeed
from corral.kit.errors import Conflict
from corral.kit.log import get_log
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import (
    BackendRule,
    IntentStage,
    OperationNode,
    OperationNodeStatus,
    Rollout,
    RolloutPhase,
    Want,
)
from corral.store.tables import (
    backend_intents,
    backend_rules,
    backend_targets,
    operation_nodes,
    operations,
    revisions,
    rollouts,
)
from corral.store.tables.operations import Operation, StoredRequest

log = get_log(__name__)


@dataclass(frozen=True)
class AcceptedOperation:
    operation_id: str
    joined: bool = False  # an equal operation was already running
    unchanged: str = ""  # a sentence, if an upgrade or rollback found its build on every node and so has ended


class OperationAcceptor:
    def __init__(self, store: Store, resolver: RequestResolver, feed: ChangeFeed) -> None:
        self._store = store
        self._resolver = resolver
        self._feed = feed

    async def plan(self, request: OperationRequest) -> PlanView:
        """Preview the request without storing or sending anything."""
        resolved = await self._resolver.resolve(request)
        notes, nodes = list(resolved.notes), preview(resolved)
        if changes_nothing(resolved, nodes):
            notes.append(unchanged_words(resolved, nodes))
        elif resolved.request.max_parallel:
            notes += rollout_notes(resolved.request)
        classes = rollout_classes(resolved, nodes) if request.kind is OperationKind.UPGRADE else ()
        return PlanView(
            request.kind.value,
            resolved.backend,
            nodes,
            resolved.request.max_parallel,
            tuple(notes),
            describe_soak(request.rollout),
            classes,
        )

    async def accept(self, request: OperationRequest) -> AcceptedOperation:
        resolved = await self._resolver.resolve(request)
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            same = await _same_operation(tx, resolved)
            if same is not None:
                return AcceptedOperation(same, joined=True)
            await _refuse_second_rollout(tx, resolved)
            operation, rows = await self._store_all(tx, resolved)
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
        return AcceptedOperation(operation.id, unchanged=_unchanged(resolved, rows))

    async def _store_all(self, tx: Transaction, resolved: ResolvedRequest) -> tuple[Operation, list[OperationNode]]:
        request, now = resolved.request, await tx.now()
        operation_id, target = str(uuid.uuid4()), resolved.target
        if resolved.want is not Want.ABSENT and not target:
            target = str(uuid.uuid4())
            for kind, build in sorted(resolved.builds.items(), key=lambda item: item[0]):
                await add_target(tx, TargetKey(target, kind), build)
        generation = await revisions.bump(tx, RULES)
        operation = Operation(
            id=operation_id,
            kind=request.kind.value,
            backend=resolved.backend,
            scope_kind=request.scope.kind.value,
            scope_value=request.scope.value,
            generation=generation,
            created_at=now,
            request=StoredRequest(
                backend=request.backend_request,
                force=request.force,
                max_parallel=request.max_parallel,
                rollout=request.rollout,
            ),
            created_by=request.by,
        )
        await operations.insert(tx, operation)
        await backend_rules.insert(tx, _rule(resolved, operation, target))
        rows = await _rows(tx, resolved, operation)  # after the rule, which the preview of the rows needs
        await operation_nodes.put(tx, rows)
        if request.kind is OperationKind.UPGRADE:
            await rollouts.put(tx, _rollout(operation))
        await finish_or_reopen(tx, [operation], now)
        return operation, rows


def _rollout(operation: Operation) -> Rollout:
    return Rollout(
        operation_id=operation.id,
        generation=operation.generation,
        subject=operation.backend,
        phase=RolloutPhase.FETCHING,
        settings=operation.request.rollout,
        started_at=operation.created_at,
    )


def _rule(resolved: ResolvedRequest, operation: Operation, target: str) -> BackendRule:
    request = resolved.request
    # A LocalAI worker would install the newest version instead of the earlier one.
    rollback = request.kind is OperationKind.ROLLBACK
    excluded = [row.outline.id for row in resolved.candidates if rollback and row.outline.protocol == 0]
    return BackendRule(
        generation=operation.generation,
        operation_id=operation.id,
        scope_kind=request.scope.kind,
        scope_value=request.scope.value,
        backend=operation.backend,
        want=resolved.want,
        target=target,
        created_at=operation.created_at,
        request=request.backend_request,
        origin=request.origin,
        force=request.force,
        max_parallel=request.max_parallel,
        excluded=tuple(sorted(excluded)),
    )


async def _rows(tx: Transaction, resolved: ResolvedRequest, operation: Operation) -> list[OperationNode]:
    """One per node, as of this transaction: nodes may have joined or left since the request was resolved."""
    chosen = {candidate.outline.id for candidate in resolved.candidates}
    everybody = resolved.want in (Want.PRESENT, Want.ABSENT)
    present = [row for row in await read_candidates(tx, resolved.request) if everybody or row.outline.id in chosen]
    shown = preview(replace(resolved, candidates=tuple(present)))
    upgrade = resolved.want is Want.UPGRADED
    ordered = await _nodes_with_orders(tx, resolved.backend, [row.outline.id for row in present]) if upgrade else set()
    return [
        _row(operation, node, candidate, resolved.want, ordered=node.node_id in ordered)
        for node, candidate in zip(shown, present, strict=True)
    ]


async def _nodes_with_orders(tx: Transaction, backend: str, node_ids: list[str]) -> set[str]:
    """The nodes with an open order for the backend: their inventory may change."""
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
    """Whether the row of a node with nothing to do ends as skipped. An install that finds its build is a success, as
    the inventory shows; an upgrade that changes nothing is not."""
    match want:
        case Want.ABSENT:
            return True
        case Want.PRESENT:
            return False
        case Want.UPGRADED:
            return candidate.known and not ordered


def _unchanged(resolved: ResolvedRequest, rows: Sequence[OperationNode]) -> str:
    same = (OperationNodeStatus.SKIPPED, SAME_BUILD)
    unchanged = bool(rows) and all((row.status, row.reason) == same for row in rows)
    return unchanged_words(resolved, rows) if unchanged else ""


async def _refuse_second_rollout(tx: Transaction, resolved: ResolvedRequest) -> None:
    """Two builds that are both on trial could not be told apart by what they serve, and the second one would have the
    first as its previous version."""
    if resolved.request.kind is not OperationKind.UPGRADE:
        return
    for rollout in await rollouts.list_active(tx):
        on_trial = rollout.settings.has_soak and rollout.phase is not RolloutPhase.WAVES
        if rollout.subject == resolved.backend and on_trial:
            short = rollout.operation_id[:8]
            raise Conflict(
                f"{resolved.backend} is being upgraded, and the new build is on trial (operation {short}): "
                f"`corral rollouts promote {short}` ends the trial, `corral rollouts abort {short}` reverts it"
            )


async def _same_operation(tx: Transaction, resolved: ResolvedRequest) -> str | None:
    """The id of a running operation with an equal request. A forced request never equals another."""
    request = resolved.request
    rules = await backend_rules.list_live(tx, resolved.backend)
    if not rules or request.force:
        return None
    last = rules[-1]
    backend_request = (
        resolved.want,
        request.scope.kind,
        request.scope.value,
        request.max_parallel,
        request.backend_request,
        request.origin,
    )
    said = (last.want, last.scope_kind, last.scope_value, last.max_parallel, last.request, last.origin)
    if said != backend_request or last.force:
        return None
    if not await _has_builds(tx, last.target, resolved.builds):
        return None
    operation = await operations.find(tx, last.operation_id)
    if operation is None or operation.finished_at is not None or operation.request.rollout != request.rollout:
        return None
    return operation.id


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
