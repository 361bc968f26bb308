"""An operation's state is a function of its node rows. Pure (docs/explanation/design.md#operations)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace


class RowStatus(StrEnum):
    """The contract's five, and ours."""

    QUEUED = "queued"  # recorded; the node is not healthy, or it has not been its turn
    DOWNLOADING = "downloading"  # under way, in whatever phase
    RUNNING_ON_WORKER = "running_on_worker"  # no answer in time: it may well be at it
    ERROR = "error"  # failing; will be tried again, so not the end
    SUCCESS = "success"
    SKIPPED = "skipped"
    SUPERSEDED = "superseded"
    WITHDRAWN = "withdrawn"
    CANCELLED = "cancelled"


TERMINAL = frozenset(
    {RowStatus.SUCCESS, RowStatus.SKIPPED, RowStatus.SUPERSEDED, RowStatus.WITHDRAWN, RowStatus.CANCELLED}
)


_AT_REST = TERMINAL | {RowStatus.ERROR}
_UNCOUNTED = frozenset({RowStatus.SKIPPED, RowStatus.WITHDRAWN, RowStatus.SUPERSEDED})


class Row(Struct, frozen=True, gc=False):
    """One node in one operation."""

    node_id: str
    node_name: str
    status: RowStatus = RowStatus.QUEUED
    reason: str = ""  # why it waits, was skipped, or fails
    phase: str = ""
    file_name: str = ""
    percentage: float = 0.0
    current_bytes: int = 0
    total_bytes: int = 0
    rate: float = 0.0
    attempt: int = 0
    seq: int = 0
    failures: int = 0
    next_try_at: datetime | None = None
    waits: bool = False  # nothing can happen now: its node is away, or another one has to succeed first
    variant: str = ""
    version: str = ""
    digest: str = ""


# No event of an attempt comes after this one: whatever still arrives of it is late.
LAST_OF_ATTEMPT = 2**62


class Tick(Struct, frozen=True):
    """One progress event, as a worker sent it."""

    attempt: int  # 0: the worker does not number; it means the order that is under way
    seq: int
    phase: str
    file_name: str
    percentage: float
    current_bytes: int
    total_bytes: int
    rate: float


class Outcome(StrEnum):
    DONE = "done"
    FAILING = "failing"
    WAITING = "waiting"
    UNDER_WAY = "under_way"


def merge_tick(row: Row, tick: Tick) -> Row:
    """Progress never goes backwards, and an end is an end: late and doubled events are dropped here."""
    attempt = tick.attempt or row.attempt
    if row.status in TERMINAL or (attempt, tick.seq) <= (row.attempt, row.seq):
        return row
    fresh = attempt > row.attempt
    late = row.status is RowStatus.RUNNING_ON_WORKER and not fresh  # it moves, but its answer is still overdue
    return replace(
        row,
        status=row.status if late else RowStatus.DOWNLOADING,
        reason=row.reason if late else "",
        phase=tick.phase,
        file_name=tick.file_name,
        percentage=tick.percentage if fresh else max(row.percentage, tick.percentage),
        current_bytes=tick.current_bytes,
        total_bytes=tick.total_bytes,
        rate=tick.rate,
        attempt=attempt,
        seq=tick.seq,
        next_try_at=None,
        waits=False,
    )


def settle(row: Row, status: RowStatus, reason: str = "") -> Row:
    """A row's end, or the next thing said of it; a row that has ended stays as it ended."""
    if row.status in TERMINAL:
        return row
    percentage = 100.0 if status is RowStatus.SUCCESS else row.percentage
    seq = LAST_OF_ATTEMPT if status in TERMINAL or status is RowStatus.ERROR else row.seq
    return replace(
        row, status=status, reason=reason, percentage=percentage, rate=0.0, seq=seq, next_try_at=None, waits=False
    )


class Summary(Struct, frozen=True):
    """What the rows of an operation come to together."""

    outcome: Outcome
    settled: bool  # nothing is moving: a watcher may go home; what waits for a node or a retry lives on without them
    processed: bool  # the contract's word: every node was called and has answered, failed, or is known to take longer
    progress: float  # one bar over all: the mean of the rows that count, 100 only when every one has ended
    counts: dict[RowStatus, int]


def summarize(rows: Sequence[Row]) -> Summary:
    """In one pass: lists show thousands of rows."""
    counts: dict[RowStatus, int] = {}
    settled = processed = True
    total = counted = 0.0
    for row in rows:
        status = row.status
        counts[status] = counts.get(status, 0) + 1
        if status not in _UNCOUNTED:
            total += row.percentage
            counted += 1
        if status not in _AT_REST and not row.waits:
            settled = False
            processed = processed and status is RowStatus.RUNNING_ON_WORKER
    ended = counts.keys() <= TERMINAL
    mean = total / counted if counted else 100.0
    outcome = _outcome(counts, ended=ended, settled=settled, processed=processed)
    return Summary(outcome, settled, processed, mean if ended or not counted else min(mean, 99.0), counts)


def _outcome(counts: Mapping[RowStatus, int], *, ended: bool, settled: bool, processed: bool) -> Outcome:
    """Once every node was called, a hard error outranks one that is still running, and both outrank waiting."""
    if ended:
        return Outcome.DONE
    if processed and RowStatus.ERROR in counts:
        return Outcome.FAILING
    return Outcome.WAITING if settled else Outcome.UNDER_WAY


def error_text(rows: Sequence[Row]) -> str:
    """`name: reason; …` of the nodes that fail, in name order."""
    failing = sorted((row for row in rows if row.status is RowStatus.ERROR), key=lambda row: row.node_name)
    return "; ".join(f"{row.node_name}: {row.reason}" for row in failing)


def running_text(rows: Sequence[Row]) -> str:
    """The nodes that are still at it though their answer is overdue."""
    return ", ".join(sorted(row.node_name for row in rows if row.status is RowStatus.RUNNING_ON_WORKER))
