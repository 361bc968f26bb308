"""Operations about the files of a model; users watch and cancel them like any other. They have no rule. The transitions
of their rows are pure.

A fetch brings the files to the controller. Its one row stands for the controllers: the one that leads the replicas does
the work (`controller/files/fetches.py`). A stage brings the files to nodes, a row for each (`controller/staging`).
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta

from msgspec.structs import replace

from corral.blobs.errors import is_final
from corral.contract.messages.backends import Phase
from corral.controller.inventory.nodes import takes_backends
from corral.controller.operations.progress import finish_or_reopen, new_row
from corral.controller.operations.state import settle
from corral.controller.operations.views import FETCH, STAGE
from corral.kit.errors import CorralError, Denied, NotFound
from corral.store.engine.transactions import Transaction
from corral.store.records import (
    CONTROLLER,
    ENDED,
    BackendRequest,
    OperationNode,
    OperationNodeStatus,
    Scope,
    ScopeKind,
)
from corral.store.tables import node_labels, nodes, operation_nodes, operations, revisions
from corral.store.tables.models import StoredModel
from corral.store.tables.nodes import NodeOutline
from corral.store.tables.operations import Operation, StoredRequest

KIND = FETCH
SCOPE = "controller"
COUNTER = "operations"
MODEL_GONE = "the model was deleted"
LOCALAI_NODE = "a LocalAI worker receives files when the model is loaded there"
_SHOWN_REVISION = 12


def version_of(revision: str) -> str:
    """The revision of the model, as the row shows it."""
    return revision[:_SHOWN_REVISION]


def begun(row: OperationNode, revision: str) -> OperationNode:
    """The row at the start of the next attempt; downloaded parts are found on the disk and counted again."""
    return replace(
        row,
        status=OperationNodeStatus.DOWNLOADING,
        reason="",
        phase=Phase.RESOLVING,
        file_name="",
        percentage=0.0,
        current_bytes=0,
        total_bytes=0,
        rate=0.0,
        attempt=row.attempt + 1,
        seq=0,
        next_try_at=None,
        waits=False,
        version=version_of(revision),
    )


def fetched(row: OperationNode, size_bytes: int) -> OperationNode:
    return replace(
        settle(row, OperationNodeStatus.SUCCESS),
        phase="",
        file_name="",
        current_bytes=size_bytes,
        total_bytes=size_bytes,
    )


def failed(row: OperationNode, error: CorralError, now: datetime, *, first_s: float, cap_s: float) -> OperationNode:
    """The row after a failure. Retries never end, with growing pauses, unless only a user can fix the cause."""
    failures = row.failures + 1
    wait_s = min(cap_s, first_s * 2.0 ** min(failures - 1, 32))
    parked = is_final(error) or isinstance(error, Denied)
    next_try_at = None if parked else now + timedelta(seconds=wait_s)
    return replace(settle(row, OperationNodeStatus.ERROR, error.message), failures=failures, next_try_at=next_try_at)


def is_due(row: OperationNode, revision: str, now: datetime) -> bool:
    """Whether the fetch should run now. An edit of the model may have fixed the cause of a failure."""
    if row.status in ENDED:
        return False
    if row.status is not OperationNodeStatus.ERROR or row.version != version_of(revision):
        return True
    return row.next_try_at is not None and row.next_try_at <= now


async def open_fetch(tx: Transaction, model: StoredModel, by: str = "") -> Operation:
    """The running fetch, or a new one. The caller holds the counter of rules, as every writer of operations does, and
    notifies the change feed after the commit."""
    last = await operations.find_last(tx, kind=KIND, backend=model.id)
    if last is not None and last.finished_at is None:
        return last
    opened = await _open(tx, KIND, model, SCOPE, "", by)
    row = new_row(opened.id, CONTROLLER, CONTROLLER, opened.created_at)
    await operation_nodes.put(tx, [replace(row, version=version_of(model.revision))])
    return opened


async def open_stage(tx: Transaction, model: StoredModel, scope: Scope, by: str = "") -> Operation:
    """The running operation with the same scope, or a new one with a row for each node of the scope. The caller holds
    the counter of rules and notifies the change feed after the commit, as for `open_fetch`."""
    last = await operations.find_last(tx, kind=STAGE, backend=model.id)
    if (
        last is not None
        and last.finished_at is None
        and (last.scope_kind, last.scope_value) == (scope.kind, scope.value)
    ):
        return last
    labels = await node_labels.list_for(tx)
    chosen = [
        outline
        for outline in await nodes.list_outlines(tx)
        if takes_backends(outline) and scope.matches(outline.id, labels.get(outline.id, {}))
    ]
    if not chosen:
        raise NotFound("no approved node matches: `corral nodes list` shows the nodes and their labels")
    opened = await _open(tx, STAGE, model, scope.kind.value, scope.value, by)
    await operation_nodes.put(tx, [_stage_row(opened, model, outline) for outline in chosen])
    await finish_or_reopen(tx, [opened], opened.created_at)
    return opened


def scope_of(operation: Operation) -> Scope:
    return Scope(ScopeKind(operation.scope_kind), operation.scope_value)


def _stage_row(operation: Operation, model: StoredModel, outline: NodeOutline) -> OperationNode:
    row = new_row(operation.id, outline.id, outline.name, operation.created_at)
    if outline.protocol == 0:
        return settle(row, OperationNodeStatus.SKIPPED, LOCALAI_NODE)
    return replace(row, version=version_of(model.revision))


async def _open(
    tx: Transaction, kind: str, model: StoredModel, scope_kind: str, scope_value: str, by: str
) -> Operation:
    opened = Operation(
        id=str(uuid.uuid4()),
        kind=kind,
        backend=model.id,
        scope_kind=scope_kind,
        scope_value=scope_value,
        generation=0,
        created_at=await tx.now(),
        request=StoredRequest(BackendRequest(model.id)),
        created_by=by,
    )
    await operations.insert(tx, opened)
    await revisions.bump(tx, COUNTER)
    return opened


async def find_taken_back(tx: Transaction, model: StoredModel) -> Operation | None:
    """The last fetch for this revision, if a user cancelled it: automatic loads do not start another then."""
    last = await operations.find_last(tx, kind=KIND, backend=model.id)
    if last is None or last.outcome != "cancelled":
        return None
    row = await read_row(tx, last.id)
    return last if row is not None and row.version == version_of(model.revision) else None


async def read_row(tx: Transaction, operation_id: str) -> OperationNode | None:
    rows = await operation_nodes.list_(tx, operation_id)
    return rows[0] if rows else None
