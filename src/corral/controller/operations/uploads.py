"""Operations about files that a user sends from another machine; pure transitions, and how they are opened (ADR 52).

Such an operation has no rule and one row, for the controllers. It is about content: the same content, sent again while
the operation is open, continues it. Only its sender has the bytes, so no controller can repeat it alone.
"""

from __future__ import annotations

import hashlib
import uuid
from datetime import datetime, timedelta

from msgspec.structs import replace

from corral.contract.installs import OpenUpload
from corral.controller.operations.file_operations import COUNTER, SCOPE, read_row
from corral.controller.operations.progress import new_row, write_rows
from corral.controller.operations.state import settle
from corral.controller.operations.views import UPLOAD, human_size
from corral.kit.durations import format_duration
from corral.store.engine.transactions import Transaction
from corral.store.records import CONTROLLER, ENDED, BackendRequest, OperationNode, OperationNodeStatus, UploadRequest
from corral.store.tables import operations, revisions
from corral.store.tables.operations import Operation, StoredRequest

UPLOADING = "uploading"
LOADING = "loading"
_KEY_LENGTH = 16


def key_of(request: OpenUpload) -> str:
    """The same for the same content, in whatever order and under whatever names."""
    digests = [request.bundle] if request.bundle else sorted(file.sha256 for file in request.files)
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:_KEY_LENGTH]


def how_to_continue(upload: UploadRequest, current_bytes: int) -> str:
    """The sentence with which every unfinished upload ends: a controller cannot go on alone."""
    where = f" on {upload.host}" if upload.host else ""
    what = f": `{upload.command}`" if upload.command else ""
    return f"run the same command again{where}, it continues at {human_size(current_bytes)}{what}"


def begun(row: OperationNode, current_bytes: int, total_bytes: int) -> OperationNode:
    """The row when a sender begins or continues."""
    return replace(
        row,
        status=OperationNodeStatus.DOWNLOADING,
        reason="",
        phase=UPLOADING,
        file_name="",
        percentage=100.0 * current_bytes / total_bytes,
        current_bytes=current_bytes,
        total_bytes=total_bytes,
        rate=0.0,
        attempt=row.attempt + 1,
        seq=0,
        next_try_at=None,
        waits=False,
    )


def done(row: OperationNode) -> OperationNode:
    ended = settle(row, OperationNodeStatus.SUCCESS)
    return replace(ended, phase="", file_name="", current_bytes=row.total_bytes)


def failed(row: OperationNode, upload: UploadRequest, message: str) -> OperationNode:
    """The row after an error that ended the command of the sender."""
    ended = settle(row, OperationNodeStatus.ERROR, f"{message}; then {how_to_continue(upload, row.current_bytes)}")
    return replace(ended, failures=row.failures + 1)


def after_silence(
    row: OperationNode, upload: UploadRequest, now: datetime, *, silent_s: float, kept_s: float
) -> OperationNode | None:
    """The row of an upload of which nothing was heard; None while there is nothing to change."""
    silence = now - row.updated_at
    if row.status in ENDED:
        return None
    if row.status is OperationNodeStatus.DOWNLOADING and silence > timedelta(seconds=silent_s):
        reason = (
            f"the sender stopped at {human_size(row.current_bytes)} of {human_size(row.total_bytes)}: "
            f"{how_to_continue(upload, row.current_bytes)}"
        )
        return replace(row, status=OperationNodeStatus.QUEUED, reason=reason, phase="", rate=0.0, waits=True)
    if row.status is not OperationNodeStatus.DOWNLOADING and silence > timedelta(seconds=kept_s):
        return settle(row, OperationNodeStatus.WITHDRAWN, f"nobody continued it for {format_duration(kept_s)}")
    return None


async def open_upload(
    tx: Transaction, request: OpenUpload, current_bytes: int, by: str
) -> tuple[Operation, OperationNode]:
    """The open operation for this content, or a new one; its row begins. The caller holds the counter of rules, and
    notifies the change feed after the commit."""
    upload = UploadRequest(key_of(request), request.command, request.host)
    operation = next((each for each in await operations.list_open(tx, kind=UPLOAD) if _is(each, upload)), None)
    if operation is None:
        operation = Operation(
            id=str(uuid.uuid4()),
            kind=UPLOAD,
            backend=request.name,
            scope_kind=SCOPE,
            scope_value="",
            generation=0,
            created_at=await tx.now(),
            request=StoredRequest(BackendRequest(request.name), upload=upload),
            created_by=by,
        )
        await operations.insert(tx, operation)
        row = new_row(operation.id, CONTROLLER, CONTROLLER, operation.created_at)
    else:
        operation = replace(operation, request=replace(operation.request, upload=upload))
        await operations.replace(tx, operation)
        found = await read_row(tx, operation.id)
        row = found or new_row(operation.id, CONTROLLER, CONTROLLER, operation.created_at)
    row = begun(row, current_bytes, sum(sizes_of(request).values()))
    await write_rows(tx, operation, [row])
    return operation, row


async def expire(tx: Transaction, *, silent_s: float, kept_s: float) -> list[str]:
    """Write what follows from silence. Returns the operations that changed."""
    now = await tx.now()
    changed = []
    for operation in await operations.list_open(tx, kind=UPLOAD):
        row = await read_row(tx, operation.id)
        upload = operation.request.upload or UploadRequest()
        after = after_silence(row, upload, now, silent_s=silent_s, kept_s=kept_s) if row is not None else None
        if after is None:
            continue
        if after.status in ENDED:
            operation = replace(operation, withdrawn_at=now)
            await operations.replace(tx, operation)
        await write_rows(tx, operation, [after])
        changed.append(operation.id)
    if changed:
        await revisions.bump(tx, COUNTER)
    return changed


def sizes_of(request: OpenUpload) -> dict[str, int]:
    """By digest: a file that is listed twice is sent once."""
    return {f"sha256:{file.sha256}": file.size_bytes for file in request.files}


def _is(operation: Operation, upload: UploadRequest) -> bool:
    return operation.request.upload is not None and operation.request.upload.key == upload.key
