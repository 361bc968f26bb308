"""Views of operations for users, in LocalAI's form, from stored rows (docs/reference/wire/operations.md). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from corral.contract.admin import OperationNodeView, OperationRecord, OperationView
from corral.controller.operations.state import OperationState, Summary, error_text, running_text, summarize
from corral.store.records import CONTROLLER, LoadJob, OperationNode, OperationNodeStatus
from corral.store.tables.operations import Operation

_UNITS = ("KiB", "MiB", "GiB", "TiB")
FETCH = "fetch"  # of a model's files, to the controller
STAGE = "stage"  # of a model's files, to nodes
UPLOAD = "upload"  # of files from a user's machine, to the controller
FILE_KINDS = frozenset({FETCH, STAGE, UPLOAD})  # they are about files, and have no rule
CORRAL_UPGRADE = "corral-upgrade"  # of Corral itself, on nodes
ROLLOUT = "rollout"  # of a new revision of a model
KINDS_WITHOUT_RULE = FILE_KINDS | {CORRAL_UPGRADE, ROLLOUT}
STAGING = "staging"  # LocalAI's word for files that are on their way to a node
STILL_AT_IT = "worker still installing in background"


def human_size(size_bytes: int) -> str:
    """As LocalAI writes sizes: `17 B`, `412.0 MiB`."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in _UNITS:
        size /= 1024
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.1f} {unit}"
    raise AssertionError("unreachable")


def parse_size(text: str) -> int:
    """Parse such a size; 0 if that fails. Old workers report sizes only as text."""
    number, _, unit = text.strip().partition(" ")
    try:
        power: int = ("B", *_UNITS).index(unit or "B")
        return max(0, int(float(number) * 1024**power))
    except (ValueError, OverflowError):
        return 0


def rfc3339(moment: datetime | None) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z") if moment else ""


def operation_view(
    operation: Operation,
    rows: Sequence[OperationNode],
    *,
    scope_name: str = "",
    counts: Mapping[str, int] | None = None,
    with_nodes: bool = True,
) -> OperationView:
    """`rows` in name order. `scope_name`: of the node, if the operation is about one. `counts`: the statuses of an
    ended operation that is shown without its rows. Without `with_nodes` the rows are summed up, but not shown."""
    summary = summarize(rows)
    latest = _latest(rows)
    deletion = operation.kind == "delete"
    queued = summary.counts.keys() == {OperationNodeStatus.QUEUED}
    finished = operation.finished_at is not None
    return OperationView(
        id=f"{STAGING}:{operation.backend}" if operation.kind == STAGE else operation.backend,
        name=operation.backend.rpartition("@")[2],
        full_name=operation.backend,
        job_id=operation.id,
        progress=int(summary.progress),
        task_type=_task_type(operation.kind, queued=queued),
        is_deletion=deletion,
        is_backend=operation.kind not in KINDS_WITHOUT_RULE,
        is_queued=queued,
        cancellable=not finished,
        message=message_of(operation, rows, summary),
        node_id=operation.scope_value if operation.scope_kind == "node" else "",
        phase=latest.phase if latest else "",
        current_bytes=sum(row.current_bytes for row in rows),
        total_bytes=sum(row.total_bytes for row in rows),
        error=(error_text(rows) if OperationNodeStatus.ERROR in summary.counts else "") or operation.error,
        nodes=tuple(node_view(row) for row in rows) if with_nodes else (),
        kind=operation.kind,
        backend=operation.backend,
        scope=operation.scope_kind,
        scope_value=scope_name or operation.scope_value,
        state=summary.outcome.value,
        settled=summary.settled,
        processed=summary.processed,
        outcome=operation.outcome,
        created_at=rfc3339(operation.created_at),
        created_by=operation.created_by,
        finished_at=rfc3339(operation.finished_at),
        dismissed=operation.dismissed,
        counts=dict(counts) if counts is not None else {each.value: count for each, count in summary.counts.items()},
        operation_id=operation.id,
    )


def staging_view(job: LoadJob, now: datetime) -> OperationView:
    """LocalAI's entry for a load whose files are on their way to its node. It is no operation: it ends with the load,
    and cannot be cancelled."""
    moving_s = (now - job.moving_since).total_seconds() if job.moving_since is not None else 0.0
    rate = job.bytes_sent / moving_s if moving_s >= 1.0 else 0.0
    percentage = min(100.0, 100 * job.bytes_sent / job.total_bytes) if job.total_bytes else 0.0
    entry = f"{STAGING}:{job.model}"
    row = OperationNodeView(
        node_id=job.node_id,
        node_name=job.node_name,
        status=OperationNodeStatus.DOWNLOADING.value,
        percentage=round(percentage, 1),
        current=human_size(job.bytes_sent) if job.bytes_sent else "",
        total=human_size(job.total_bytes) if job.total_bytes else "",
        phase=STAGING,
        current_bytes=job.bytes_sent,
        total_bytes=job.total_bytes,
        rate=rate,
        note=job.message,
        eta_s=eta_s(job.bytes_sent, job.total_bytes, rate),
    )
    return OperationView(
        id=entry,
        name=job.model,
        full_name=job.model,
        job_id=entry,
        progress=int(percentage),
        task_type=STAGING,
        is_deletion=False,
        is_backend=False,
        is_queued=False,
        cancellable=False,
        message=job.message,
        node_id=job.node_id,
        node_name=job.node_name,
        phase=STAGING,
        current_bytes=job.bytes_sent,
        total_bytes=job.total_bytes,
        nodes=(row,),
        kind=STAGING,
        backend=job.model,
        scope="node",
        scope_value=job.node_name,
        state=OperationState.RUNNING.value,
        created_at=rfc3339(job.created_at),
        counts={row.status: 1},
        operation_id=entry,
    )


def _task_type(kind: str, *, queued: bool) -> str:
    if kind == STAGE:
        return STAGING
    return "deletion" if kind == "delete" else "Waiting" if queued else "Installation"


def node_view(row: OperationNode) -> OperationNodeView:
    succeeded = row.status is OperationNodeStatus.SUCCESS
    return OperationNodeView(  # by place, because a thousand of them are made four times a second
        row.node_id,
        row.node_name,
        row.status._value_,  # not `.value`, a descriptor in Python: it took a tenth of the time of a list
        round(row.percentage, 1),
        row.file_name,
        human_size(row.current_bytes) if row.current_bytes else "",
        human_size(row.total_bytes) if row.total_bytes else "",
        row.phase,
        "" if succeeded else row.reason,
        row.current_bytes,
        row.total_bytes,
        row.rate,
        row.failures,
        rfc3339(row.next_try_at) if row.next_try_at else "",
        row.waits,
        row.variant,
        row.version,
        row.digest,
        row.reason if succeeded else "",
        eta_s(row.current_bytes, row.total_bytes, row.rate),
        row.sources,
        row.bad_sources,
    )


def eta_s(current_bytes: int, total_bytes: int, rate: float) -> float:
    """Seconds until the transfer is complete at this rate; 0: unknown, or complete."""
    return round((total_bytes - current_bytes) / rate, 1) if rate >= 1 and total_bytes > current_bytes else 0.0


def sources_text(sources: Mapping[str, int], bad_sources: Sequence[str] = ()) -> str:
    """`3.1 GiB from attic, 200.0 MiB from controller; wrong data from barn`, the largest first."""
    ranked = sorted(sources.items(), key=lambda item: (-item[1], item[0]))
    received = ", ".join(f"{human_size(size)} from {name}" for name, size in ranked if size)
    wrong = f"wrong data from {', '.join(bad_sources)}" if bad_sources else ""
    return "; ".join(words for words in (received, wrong) if words)


def message_of(operation: Operation, rows: Sequence[OperationNode], summary: Summary) -> str:
    """One sentence; `completed` is the contract's own word."""
    if operation.cancelled_at is not None or operation.withdrawn_at is not None:
        return "cancelled" if operation.cancelled_at is not None else "withdrawn"
    match summary.outcome:
        case OperationState.DONE:
            return "completed"
        case OperationState.FAILING:
            if operation.kind in KINDS_WITHOUT_RULE and not any(row.next_try_at for row in rows):
                return "failing; not tried again by itself"
            return f"failing on {_count(rows, OperationNodeStatus.ERROR)}; will be tried again"
        case OperationState.WAITING if operation.kind == UPLOAD:
            return "; ".join(row.reason for row in rows)
        case OperationState.WAITING:
            waiting = ", ".join(sorted(row.node_name for row in rows if row.waits))
            return f"waits for {waiting}"
        case OperationState.RUNNING:
            if operation.kind == FETCH:
                return "files are fetched to the controller"
            if operation.kind == UPLOAD:
                return "files are uploaded to the controller"
            if summary.processed:
                return f"{STILL_AT_IT}: {running_text(rows)}"
            done = summary.counts.get(OperationNodeStatus.SUCCESS, 0)
            return f"{done} of {len(rows)} nodes done"


def record_view(operation: Operation) -> OperationRecord:
    return OperationRecord(
        id=operation.backend,
        name=operation.backend.rpartition("@")[2],
        job_id=operation.id,
        is_backend=operation.kind not in KINDS_WITHOUT_RULE,
        task_type=STAGING if operation.kind == STAGE else "deletion" if operation.kind == "delete" else "installation",
        outcome=operation.outcome,
        started_at=rfc3339(operation.created_at),
        finished_at=rfc3339(operation.finished_at),
        node_id=operation.scope_value if operation.scope_kind == "node" else "",
        error=operation.error,
        kind=operation.kind,
        created_by=operation.created_by,
        operation_id=operation.id,
    )


def op_status(view: OperationView) -> dict[str, object]:
    """LocalAI's OpStatus (docs/reference/wire/http-backends.md#opstatus)."""
    status: dict[str, object] = {
        "deletion": view.is_deletion,
        "file_name": next((node.file_name for node in view.nodes if node.file_name), ""),
        "processed": view.processed,
        "message": view.message,
        "progress": view.progress,
        "file_size": human_size(view.total_bytes) if view.total_bytes else "",
        "downloaded_size": human_size(view.current_bytes) if view.current_bytes else "",
        "gallery_element_name": view.id,
        "cancelled": view.outcome == "cancelled",
        "cancellable": view.cancellable,
    }
    optional: dict[str, object] = {
        "error": view.error,
        "phase": view.phase,
        "current_bytes": view.current_bytes,
        "total_bytes": view.total_bytes,
        "nodes": view.nodes,
    }
    return status | {name: value for name, value in optional.items() if value}


def job_status(view: OperationView) -> dict[str, object]:
    """What `/api/backends/job/:uid` answers."""
    status: dict[str, object] = {
        "progress": view.progress,
        "message": view.message,
        "galleryElementName": view.id,
        "processed": view.processed,
        "deletion": view.is_deletion,
        "queued": view.is_queued,
    }
    if view.error:
        status["error"] = view.error
    if view.state == OperationState.DONE:
        status["completed"] = True
    return status


def _latest(rows: Sequence[OperationNode]) -> OperationNode | None:
    moving = [row for row in rows if row.phase]
    return max(moving, key=lambda row: row.percentage, default=None)


def _count(rows: Sequence[OperationNode], status: OperationNodeStatus) -> str:
    chosen = [row for row in rows if row.status is status]
    if [row.node_id for row in chosen] == [CONTROLLER]:
        return "the controller"
    count = len(chosen)
    return "1 node" if count == 1 else f"{count} nodes"
