"""Operations that upgrade Corral itself on nodes; users watch and cancel them like any other. They have no rule. The
transitions of their rows are pure; `controller/releases/upgrades.py` carries them out.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from corral.contract.messages.releases import UpgradeState, UpgradeWorkerReply
from corral.controller.inventory.nodes import takes_backends
from corral.controller.operations.progress import finish_or_reopen, new_row
from corral.controller.operations.state import settle
from corral.controller.operations.views import CORRAL_UPGRADE
from corral.controller.rollouts.hardware_class import hardware_of
from corral.kit.errors import Conflict, Invalid, NotFound
from corral.store.engine.transactions import Transaction
from corral.store.records import (
    ENDED,
    NO_SOAK,
    BackendRequest,
    OperationNode,
    OperationNodeStatus,
    Rollout,
    RolloutNodeBefore,
    RolloutPhase,
    RolloutSettings,
    Scope,
    ScopeKind,
)
from corral.store.tables import node_labels, nodes, operation_nodes, operations, releases, revisions, rollouts
from corral.store.tables.nodes import NodeOutline
from corral.store.tables.operations import Operation, StoredRequest
from corral.store.tables.releases import Release

NAME = "corral"
LOCALAI_NODE = "a LocalAI worker: Corral cannot upgrade it"
BAD_VERSION = "bad version"  # the phase of a row that stops all others
# How much of the work is done at the beginning of each step; a build takes longest.
_PERCENT = {"fetching": 0.0, "building": 30.0, "checking": 70.0, "starting": 80.0, "watching": 90.0}
_FETCH_PERCENT = 30.0


async def open_corral_upgrade(
    tx: Transaction,
    release: Release,
    scope: Scope,
    max_parallel: str,
    by: str = "",
    *,
    settings: RolloutSettings = NO_SOAK,
    before: Mapping[str, RolloutNodeBefore] | None = None,
) -> Operation:
    """A new operation with a row for each node of the scope. `before`: what nodes run now. The caller holds the counter
    of rules and notifies the change feed after the commit. Raises Conflict while another one runs, because two versions
    would replace each other, and Invalid for a release that workers refuse by now."""
    newest = await releases.highest_counter(tx)
    if release.counter < newest:
        raise Invalid(
            f"release {release.counter} is not the newest any more, so workers refuse it: sign it again with "
            f"`corral fleet upgrade --to {release.version}`"
        )
    opened = await operations.list_open(tx, kind=CORRAL_UPGRADE)
    if opened:
        raise Conflict(
            f"operation {opened[0].id[:8]} upgrades Corral already: `corral ops watch {opened[0].id[:8]}`, "
            f"or stop it with `corral ops cancel {opened[0].id[:8]}`"
        )
    chosen = await list_covered(tx, scope)
    operation = Operation(
        id=str(uuid.uuid4()),
        kind=CORRAL_UPGRADE,
        backend=NAME,
        scope_kind=scope.kind.value,
        scope_value=scope.value,
        generation=0,
        created_at=await tx.now(),
        request=StoredRequest(
            BackendRequest(NAME), max_parallel=max_parallel, release=release.counter, rollout=settings
        ),
        created_by=by,
    )
    known = before or {}
    outlines = {
        each.id: known.get(each.id, RolloutNodeBefore(hardware_of(each))) for each in chosen if each.protocol != 0
    }
    await _store(tx, operation, release, [_new_row(operation, release, outline) for outline in chosen], outlines)
    return operation


async def open_corral_return(tx: Transaction, release: Release, chosen: Sequence[tuple[str, str]]) -> Operation:
    """An operation that brings nodes (id and name) back to the version of this release, all at once."""
    single = chosen[0][0] if len(chosen) == 1 else ""
    operation = Operation(
        id=str(uuid.uuid4()),
        kind=CORRAL_UPGRADE,
        backend=NAME,
        scope_kind=(ScopeKind.NODE if single else ScopeKind.ALL).value,
        scope_value=single,
        generation=0,
        created_at=await tx.now(),
        request=StoredRequest(BackendRequest(NAME), max_parallel="100%", release=release.counter),
    )
    rows = [_row(operation, release, node_id, name) for node_id, name in chosen]
    await _store(tx, operation, release, rows, {})
    return operation


async def _store(
    tx: Transaction,
    operation: Operation,
    release: Release,
    rows: Sequence[OperationNode],
    before: Mapping[str, RolloutNodeBefore],
) -> None:
    await operations.insert(tx, operation)
    await operation_nodes.put(tx, rows)
    rollout = new_rollout(operation, release.version)
    await rollouts.put(tx, replace(rollout, nodes=dict(before)))
    await finish_or_reopen(tx, [operation], operation.created_at)
    await revisions.bump(tx, "operations")


def new_rollout(operation: Operation, version: str) -> Rollout:
    return Rollout(
        operation_id=operation.id,
        generation=0,
        subject=f"{NAME} {version}",
        phase=RolloutPhase.CANARY,
        settings=operation.request.rollout,
        started_at=operation.created_at,
    )


async def list_covered(tx: Transaction, scope: Scope) -> list[NodeOutline]:
    """Raises NotFound when there is none."""
    labels = await node_labels.list_for(tx)
    chosen = [
        outline
        for outline in await nodes.list_outlines(tx)
        if takes_backends(outline) and scope.matches(outline.id, labels.get(outline.id, {}))
    ]
    if not chosen:
        raise NotFound("no approved node matches: `corral nodes list` shows the nodes and their labels")
    return chosen


def _new_row(operation: Operation, release: Release, outline: NodeOutline) -> OperationNode:
    row = _row(operation, release, outline.id, outline.name)
    return settle(row, OperationNodeStatus.SKIPPED, LOCALAI_NODE) if outline.protocol == 0 else row


def _row(operation: Operation, release: Release, node_id: str, name: str) -> OperationNode:
    row = new_row(operation.id, node_id, name, operation.created_at)
    return replace(row, version=release.version, digest=f"sha256:{release.sha256}")


def begun(row: OperationNode) -> OperationNode:
    """The row at the start of the next attempt."""
    return replace(
        row,
        status=OperationNodeStatus.DOWNLOADING,
        reason="",
        phase="ordered",
        percentage=0.0,
        current_bytes=0,
        total_bytes=0,
        attempt=row.attempt + 1,
        next_try_at=None,
        waits=False,
    )


def advanced(row: OperationNode, reply: UpgradeWorkerReply) -> OperationNode:
    """The row of an attempt that goes on. Progress never goes backwards."""
    percentage, current = _PERCENT.get(reply.phase, row.percentage), reply.current_bytes
    if reply.total_bytes > 0:
        percentage = _FETCH_PERCENT * min(1.0, reply.current_bytes / reply.total_bytes)
    elif percentage >= _FETCH_PERCENT:  # all of it was fetched, perhaps between two replies
        current = row.total_bytes
    return replace(
        row,
        status=OperationNodeStatus.DOWNLOADING,
        reason="",
        phase=reply.phase[:64] or row.phase,
        percentage=max(row.percentage, percentage),
        current_bytes=max(row.current_bytes, current),
        total_bytes=reply.total_bytes or row.total_bytes,
        waits=False,
    )


def ended(row: OperationNode, reply: UpgradeWorkerReply, retry_at: datetime) -> OperationNode:
    """The row after a reply that is not RUNNING."""
    match reply.state:
        case UpgradeState.DONE:
            return replace(settle(row, OperationNodeStatus.SUCCESS), phase="")
        case UpgradeState.REFUSED:
            return replace(settle(row, OperationNodeStatus.SKIPPED, reply.reason), phase="")
    reason = reply.reason or "the node gave no reason"
    after = failed(row, reason, None if reply.is_final else retry_at)
    return replace(after, phase=BAD_VERSION if reply.is_version_bad else "")


def failed(row: OperationNode, reason: str, next_try_at: datetime | None) -> OperationNode:
    """`next_try_at` None: a person has to act."""
    after = settle(row, OperationNodeStatus.ERROR, reason)
    return replace(after, failures=row.failures + 1, next_try_at=next_try_at)


def retry_at(row: OperationNode, now: datetime, *, first_s: float, cap_s: float) -> datetime:
    return now + timedelta(seconds=min(cap_s, first_s * 2.0 ** min(row.failures, 32)))


def waiting(row: OperationNode, reason: str, *, stuck: bool) -> OperationNode:
    """`stuck`: nothing happens before the node returns, another one succeeds, or a person acts."""
    return replace(row, status=OperationNodeStatus.QUEUED, reason=reason, next_try_at=None, waits=stuck)


def is_due(row: OperationNode, now: datetime) -> bool:
    if row.status in ENDED:
        return False
    if row.status is not OperationNodeStatus.ERROR:
        return True
    return row.next_try_at is not None and row.next_try_at <= now
