"""One load, from the asking until a replica answers or all tries have failed. Pure
(docs/reference/wire/routing.md#load-job).

Its state is what its replica's is: `pending` while a place is looked for, then whatever that place still lacks. So
there is nothing to resume: whoever looks next sees the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from msgspec.structs import replace

from corral.contract.loads import LoadState, LoadStatus
from corral.store.records import DesiredReplica, LoadJob, ReplicaStage

MOST_NODES = 3  # on which one try fails before it has failed


@dataclass(frozen=True)
class Cooldown:
    first: timedelta = timedelta(seconds=10)
    longest: timedelta = timedelta(minutes=5)
    shown: timedelta = timedelta(seconds=15)  # a failure is told for so long, and then forgotten unless it recurs
    forgotten: timedelta = timedelta(minutes=10)  # after that the next failure is the first again

    def after(self, failures: int) -> timedelta:
        return min(self.longest, self.first * (1 << min(max(0, failures - 1), 30)))


@dataclass(frozen=True)
class Moved:
    """How far the files are, or the backend, whichever is being waited for."""

    bytes_sent: int = 0
    total_bytes: int = 0
    file_index: int = 0
    total_files: int = 0
    text: str = ""  # what is moving
    staging: bool = False  # its node is fetching its files, though it was ordered already


def begin(model: str, revision: str, now: datetime, before: LoadJob | None = None) -> LoadJob:
    """The first try, or the next after one that failed."""
    job = LoadJob(model, LoadState.PENDING, now, now, revision=revision, message="looking for a place")
    return _newer(job, before, now) if before is None else _newer(replace(job, failures=before.failures), before, now)


def follow(
    job: LoadJob,
    row: DesiredReplica | None,
    node_name: str,
    *,
    installed: bool,
    moved: Moved,
    now: datetime,
    unreachable: str = "",
) -> LoadJob:
    """As its replica's row is; without one, as it was while a place is looked for. `unreachable`: why nothing new is
    heard of the node."""
    if not job.active:
        return job
    if row is None:
        after = replace(job, state=LoadState.PENDING, node_id="", node_name="", **_counts(Moved()))
        return _newer(after, job, now) if after != job else job
    state, message = _state(row, node_name, installed, moved.staging)
    if moved.text:
        message = f"{message}: {moved.text}"
    if unreachable:
        message = f"{message}, but no report arrives from there: {unreachable}"
    # Fewer bytes than before are those of another step: unpacking what came, or the way from here to the node.
    goes_on = job.state is state and moved.bytes_sent >= job.bytes_sent
    since = job.moving_since if goes_on else None
    if since is None and moved.bytes_sent:
        since = now
    after = replace(
        job,
        state=state,
        revision=row.revision,
        node_id=row.node_id,
        node_name=node_name,
        message=message,
        moving_since=since,
        **_counts(moved),
    )
    return _newer(after, job, now) if after != job else job


def waits(job: LoadJob, message: str, now: datetime) -> LoadJob:
    """No place yet, and why."""
    after = replace(job, message=message)
    return _newer(after, job, now) if after != job else job


def fail(job: LoadJob, node_id: str, error: str, now: datetime, cooldown: Cooldown, *, elsewhere: bool) -> LoadJob:
    """`elsewhere`: another node may be tried at once."""
    failed_on = {**job.failed_on, node_id: error} if node_id else dict(job.failed_on)
    if elsewhere and len(failed_on) < MOST_NODES:
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


def is_over(job: LoadJob, now: datetime, cooldown: Cooldown) -> bool:
    """A failure that nobody needs to know of any more."""
    return job.failed_at is not None and not job.active and now - job.failed_at >= cooldown.forgotten


def is_shown(job: LoadJob, now: datetime, cooldown: Cooldown) -> bool:
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
    """Only of bytes that have been moving for a second: before that it would be a guess."""
    if job.state not in (LoadState.STAGING, LoadState.INSTALLING) or job.moving_since is None or not job.total_bytes:
        return None
    for_s = (now - job.moving_since).total_seconds()
    if for_s < 1.0 or not job.bytes_sent:
        return None
    return float(math.ceil((job.total_bytes - job.bytes_sent) * for_s / job.bytes_sent))


def _state(row: DesiredReplica, node_name: str, installed: bool, staging: bool) -> tuple[LoadState, str]:
    if row.stage is ReplicaStage.PLACED and not installed:
        return LoadState.INSTALLING, f"{row.backend} is being installed on {node_name}"
    if row.stage is ReplicaStage.PLACED or staging:
        return LoadState.STAGING, f"its files are being brought to {node_name}"
    return LoadState.LOADING, f"it is starting on {node_name}"


def _counts(moved: Moved) -> dict[str, int]:
    names = ("bytes_sent", "total_bytes", "file_index", "total_files")
    return {name: getattr(moved, name) for name in names}


def _newer(after: LoadJob, before: LoadJob | None, now: datetime) -> LoadJob:
    """Versions rise also from one load of a model to the next: whoever waits for a higher one must not wait in vain."""
    stamp = int(now.timestamp() * 1000)
    return replace(after, version=max(stamp, before.version + 1) if before is not None else stamp, updated_at=now)


def _plus(moment: datetime | None, span: timedelta) -> datetime | None:
    return moment + span if moment is not None else None
