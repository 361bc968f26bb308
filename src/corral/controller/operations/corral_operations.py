"""Operations that upgrade Corral itself on nodes; users watch and cancel them like any other. They have no rule. The
transitions of their rows are pure; `controller/releases/upgrades.py` carries them out.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta

from msgspec.structs import replace

from corral.contract.messages.releases import UpgradeState, UpgradeWorkerReply
from corral.controller.inventory.nodes import takes_backends
from corral.controller.operations.progress import finish_or_reopen, new_row
from corral.controller.operations.state import settle
from corral.controller.operations.views import CORRAL_UPGRADE
from corral.kit.errors import Conflict, NotFound
from corral.store.engine.transactions import Transaction
from corral.store.records import ENDED, BackendRequest, OperationNode, OperationNodeStatus, Scope
from corral.store.tables import node_labels, nodes, operation_nodes, operations, revisions
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
    tx: Transaction, release: Release, scope: Scope, max_parallel: str, by: str = ""
) -> Operation:
    """A new operation with a row for each node of the scope. The caller holds the counter of rules and notifies the
    change feed after the commit. Raises Conflict while another one runs: two versions would replace each other."""
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
        request=StoredRequest(BackendRequest(NAME), max_parallel=max_parallel, release=release.counter),
        created_by=by,
    )
    await operations.insert(tx, operation)
    await operation_nodes.put(tx, [_new_row(operation, release, outline) for outline in chosen])
    await finish_or_reopen(tx, [operation], operation.created_at)
    await revisions.bump(tx, "operations")
    return operation


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
    row = replace(
        new_row(operation.id, outline.id, outline.name, operation.created_at),
        version=release.version,
        digest=f"sha256:{release.sha256}",
    )
    return settle(row, OperationNodeStatus.SKIPPED, LOCALAI_NODE) if outline.protocol == 0 else row


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
