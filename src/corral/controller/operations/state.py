"""The state of an operation is a function of its node rows. Pure (docs/explanation/design.md#operations)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from corral.store.records import ENDED, OperationNode, OperationNodeStatus

_AT_REST = ENDED | {OperationNodeStatus.ERROR}
_UNCOUNTED = frozenset({OperationNodeStatus.SKIPPED, OperationNodeStatus.WITHDRAWN, OperationNodeStatus.SUPERSEDED})


# The number after which no event of an attempt counts: events that still arrive are late.
LAST_OF_ATTEMPT = 2**62


class ProgressEvent(Struct, frozen=True):
    """One progress event, as a worker sent it."""

    attempt: int  # 0: the worker does not number its attempts; it means the current one
    seq: int
    phase: str
    file_name: str
    percentage: float
    current_bytes: int
    total_bytes: int
    rate: float


class OperationState(StrEnum):
    DONE = "done"
    FAILING = "failing"
    WAITING = "waiting"
    UNDER_WAY = "under_way"


def merge_progress(row: OperationNode, event: ProgressEvent) -> OperationNode:
    """Progress never goes backwards, and a row that has ended does not change: late and repeated events are dropped."""
    attempt = event.attempt or row.attempt
    if row.status in ENDED or (attempt, event.seq) <= (row.attempt, row.seq):
        return row
    fresh = attempt > row.attempt
    late = (
        row.status is OperationNodeStatus.RUNNING_ON_WORKER and not fresh
    )  # the worker reports progress, but its reply is still overdue
    return replace(
        row,
        status=row.status if late else OperationNodeStatus.DOWNLOADING,
        reason=row.reason if late else "",
        phase=event.phase,
        file_name=event.file_name,
        percentage=event.percentage if fresh else max(row.percentage, event.percentage),
        current_bytes=event.current_bytes,
        total_bytes=event.total_bytes,
        rate=event.rate,
        attempt=attempt,
        seq=event.seq,
        next_try_at=None,
        waits=False,
    )


def settle(row: OperationNode, status: OperationNodeStatus, reason: str = "") -> OperationNode:
    """The row with another status; a row that has ended does not change."""
    if row.status in ENDED:
        return row
    percentage = 100.0 if status is OperationNodeStatus.SUCCESS else row.percentage
    seq = LAST_OF_ATTEMPT if status in ENDED or status is OperationNodeStatus.ERROR else row.seq
    return replace(
        row, status=status, reason=reason, percentage=percentage, rate=0.0, seq=seq, next_try_at=None, waits=False
    )


class Summary(Struct, frozen=True):
    """The summary of the rows of an operation."""

    outcome: OperationState
    settled: bool  # nothing makes progress now: rows wait for a node or a retry, so a client may stop watching
    processed: bool  # LocalAI's term: every node was called and has replied, failed, or is known to take longer
    progress: float  # in percent: the mean of the rows that count, 100 only when every row has ended
    counts: dict[OperationNodeStatus, int]


def summarize(rows: Sequence[OperationNode]) -> Summary:
    """In one pass over the rows: lists show thousands of them."""
    counts: dict[OperationNodeStatus, int] = {}
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
            processed = processed and status is OperationNodeStatus.RUNNING_ON_WORKER
    ended = counts.keys() <= ENDED
    mean = total / counted if counted else 100.0
    outcome = _outcome(counts, ended=ended, settled=settled, processed=processed)
    return Summary(outcome, settled, processed, mean if ended or not counted else min(mean, 99.0), counts)


def _outcome(
    counts: Mapping[OperationNodeStatus, int], *, ended: bool, settled: bool, processed: bool
) -> OperationState:
    """Once every node was called, an error takes precedence over a running node, and both over a waiting one."""
    if ended:
        return OperationState.DONE
    if processed and OperationNodeStatus.ERROR in counts:
        return OperationState.FAILING
    return OperationState.WAITING if settled else OperationState.UNDER_WAY


def error_text(rows: Sequence[OperationNode]) -> str:
    """`name: reason; …` of the nodes that fail, in name order."""
    failing = sorted((row for row in rows if row.status is OperationNodeStatus.ERROR), key=lambda row: row.node_name)
    return "; ".join(f"{row.node_name}: {row.reason}" for row in failing)


def running_text(rows: Sequence[OperationNode]) -> str:
    """The names of the nodes that still work although their reply is overdue."""
    return ", ".join(sorted(row.node_name for row in rows if row.status is OperationNodeStatus.RUNNING_ON_WORKER))
