"""The load job of one model: from the request until a replica is ready or all attempts have failed. Pure
(docs/reference/wire/routing.md#load-job).

Its state follows from its replica: `pending` while no node is chosen, then the step that the replica waits for. So
there is nothing to resume: the next leader derives the same state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from msgspec.structs import replace

from corral.contract.loads import LoadState, LoadStatus
from corral.store.records import DesiredReplica, LoadJob, ReplicaStage

MAX_NODES = 3  # on which one load fails before it has failed
NOT_INSTALLED = " could not be installed: "  # after the name of the backend, in the error of a node


@dataclass(frozen=True)
class Cooldown:
    first: timedelta = timedelta(seconds=10)
    longest: timedelta = timedelta(minutes=5)
    shown: timedelta = timedelta(seconds=15)  # a failure is listed for so long
    forgotten: timedelta = timedelta(minutes=10)  # after that the next failure is the first again

    def after(self, failures: int) -> timedelta:
        return min(self.longest, self.first * (1 << min(max(0, failures - 1), 30)))


@dataclass(frozen=True)
class TransferProgress:
    """How far the transfer is that the load waits for: files or a backend."""

    bytes_sent: int = 0
    total_bytes: int = 0
    file_index: int = 0
    total_files: int = 0
    text: str = ""  # what is transferred
    staging: bool = False  # the node fetches files although the start was ordered already


def begin(model: str, revision: str, now: datetime, before: LoadJob | None = None) -> LoadJob:
    """The first attempt, or the next after one that failed."""
    job = LoadJob(
        model=model,
        state=LoadState.PENDING,
        created_at=now,
        updated_at=now,
        revision=revision,
        message="choosing a node",
    )
    return _newer(job, before, now) if before is None else _newer(replace(job, failures=before.failures), before, now)


def follow(
    job: LoadJob,
    row: DesiredReplica | None,
    node_name: str,
    *,
    installed: bool,
    progress: TransferProgress,
    now: datetime,
    unreachable: str = "",
) -> LoadJob:
    """Derive the job's state from its replica's row; None: no node is chosen. `unreachable`: why no report arrives from
    the node."""
    if not job.active:
        return job
    if row is None:
        after = replace(job, state=LoadState.PENDING, node_id="", node_name="", **_counts(TransferProgress()))
        return _newer(after, job, now) if after != job else job
    state, message = _state(row, node_name, installed, progress.staging)
    if progress.text:
        message = f"{message}: {progress.text}"
    if unreachable:
        message = f"{message}, but no report arrives from there: {unreachable}"
    # Fewer bytes than before belong to another step: unpacking, or the transfer from the controller to the node.
    continues = job.state is state and progress.bytes_sent >= job.bytes_sent
    since = job.moving_since if continues else None
    if since is None and progress.bytes_sent:
        since = now
    after = replace(
        job,
        state=state,
        revision=row.revision,
        node_id=row.node_id,
        node_name=node_name,
        message=message,
        moving_since=since,
        **_counts(progress),
    )
    return _newer(after, job, now) if after != job else job


def set_waiting(job: LoadJob, message: str, now: datetime) -> LoadJob:
    """No node is chosen yet; `message` says why."""
    after = replace(job, message=message)
    return _newer(after, job, now) if after != job else job


def fail(job: LoadJob, node_id: str, error: str, now: datetime, cooldown: Cooldown, *, elsewhere: bool) -> LoadJob:
    """`elsewhere`: another node can be tried at once."""
    failed_on = {**job.failed_on, node_id: error} if node_id else dict(job.failed_on)
    if elsewhere and len(failed_on) < MAX_NODES:
        return _newer(replace(job, state=LoadState.PENDING, failed_on=failed_on, error=error), job, now)
    failures = job.failures + 1
    after = replace(
        job,
        state=LoadState.FAILED,
        error=error,
        message="",
        failures=failures,
        failed_on=failed_on,
        failed_at=now,
        retry_at=now + cooldown.after(failures),
    )
    return _newer(after, job, now)


def is_expired(job: LoadJob, now: datetime, cooldown: Cooldown) -> bool:
    """Whether a failure is so old that its row is deleted."""
    return job.failed_at is not None and not job.active and now - job.failed_at >= cooldown.forgotten


def is_listed(job: LoadJob, now: datetime, cooldown: Cooldown) -> bool:
    if job.active:
        return True
    until = max(moment for moment in (_plus(job.failed_at, cooldown.shown), job.retry_at, job.created_at) if moment)
    return now < until


def status_of(job: LoadJob, now: datetime) -> LoadStatus:
    if not job.active:
        retry_s = max(0.0, (job.retry_at - now).total_seconds()) if job.retry_at is not None else 0.0
        return LoadStatus(
            job.model, job.state, job.node_name, error=job.error, retry_after_s=retry_s, version=job.version
        )
    share = job.bytes_sent / job.total_bytes if job.total_bytes else 0.0
    return LoadStatus(
        job.model,
        job.state,
        job.node_name,
        progress=round(min(100.0, 100 * share), 2),
        bytes_sent=job.bytes_sent,
        total_bytes=job.total_bytes,
        file_index=job.file_index,
        total_files=job.total_files,
        eta_seconds=_eta_s(job, now),
        message=job.message,
        version=job.version,
    )


def _eta_s(job: LoadJob, now: datetime) -> float | None:
    """None before bytes have arrived for a second: an estimate would be a guess."""
    if job.state not in (LoadState.STAGING, LoadState.INSTALLING) or job.moving_since is None or not job.total_bytes:
        return None
    for_s = (now - job.moving_since).total_seconds()
    if for_s < 1.0 or not job.bytes_sent:
        return None
    return float(math.ceil((job.total_bytes - job.bytes_sent) * for_s / job.bytes_sent))


def _state(row: DesiredReplica, node_name: str, installed: bool, staging: bool) -> tuple[LoadState, str]:
    if row.stage is ReplicaStage.PLACED and not installed:
        return LoadState.INSTALLING, f"installing {row.backend} on {node_name}"
    if row.stage is ReplicaStage.PLACED or staging:
        return LoadState.STAGING, f"staging files on {node_name}"
    return LoadState.LOADING, f"starting on {node_name}"


def _counts(progress: TransferProgress) -> dict[str, int]:
    names = ("bytes_sent", "total_bytes", "file_index", "total_files")
    return {name: getattr(progress, name) for name in names}


def _newer(after: LoadJob, before: LoadJob | None, now: datetime) -> LoadJob:
    """Versions also rise from one load of a model to the next, so that a client that waits for a higher one gets it."""
    stamp = int(now.timestamp() * 1000)
    return replace(after, version=max(stamp, before.version + 1) if before is not None else stamp, updated_at=now)


def _plus(moment: datetime | None, span: timedelta) -> datetime | None:
    return moment + span if moment is not None else None
