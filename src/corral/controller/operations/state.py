"""How the rows of an operation change, and the state of the operation that follows from its rows. Pure
(docs/explanation/design.md#operations).

A row changes with the steps of the plan and with progress events; `progress.py` stores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from corral.contract.messages.backends import Phase
from corral.controller.backends.outcomes import STILL_RUNNING
from corral.controller.backends.plan import Done, Fail, Hold, HoldCause, Skip, Wait
from corral.controller.orders.order import Send
from corral.store.records import ENDED, OperationNode, OperationNodeStatus, OrderKind

DELETING = "deleting"  # the phase shown for a delete: nothing is downloaded then

SOAKING = "soaking"  # the phase shown for a canary that has switched and is watched

Shown = Send | Done | Skip | Hold | Wait | Fail

_AT_REST = ENDED | {OperationNodeStatus.ERROR}
_UNCOUNTED = frozenset({OperationNodeStatus.SKIPPED, OperationNodeStatus.WITHDRAWN, OperationNodeStatus.SUPERSEDED})


# The number after which no event of an attempt counts: events that still arrive are late.
LAST_OF_ATTEMPT = 2**62
MAX_SOURCES = 32  # of one node


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
    sources: Mapping[str, int] = {}  # received bytes by source
    bad_sources: tuple[str, ...] = ()


class OperationState(StrEnum):
    DONE = "done"
    FAILING = "failing"
    WAITING = "waiting"
    RUNNING = "under_way"


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
        # Steps after the download have no sources. A bad one is named once: a later attempt does not use it.
        sources=dict(event.sources) or ({} if fresh else row.sources),
        bad_sources=tuple(dict.fromkeys((*row.bad_sources, *event.bad_sources)))[:MAX_SOURCES],
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


def after_step(row: OperationNode, step: Shown) -> OperationNode:
    """The row after the step. A row that has ended does not change."""
    if row.status in ENDED:
        return row
    match step:
        case Send():
            return _sent(row, step)
        case Done():
            ended = settle(row, OperationNodeStatus.SUCCESS, step.note)
            return replace(ended, phase="", digest=step.digest or row.digest, version=step.version or row.version)
        case Skip():
            return settle(row, OperationNodeStatus.SKIPPED, step.reason)
        case Hold():
            return _held(row, step)
        case Wait():
            return _at_work(row, step)
        case Fail():
            return settle(row, OperationNodeStatus.ERROR, step.reason)
        case _:
            assert_never(step)


def after_soak(row: OperationNode, reason: str, *, waits: bool) -> OperationNode:
    """The row of a canary, which ends with its soak. Progress events that still arrive are late."""
    return replace(
        row,
        status=OperationNodeStatus.DOWNLOADING,
        reason=reason,
        phase=SOAKING,
        file_name="",
        percentage=max(row.percentage, 99.0),
        rate=0.0,
        seq=LAST_OF_ATTEMPT,
        next_try_at=None,
        waits=waits,
    )


def _sent(row: OperationNode, step: Send) -> OperationNode:
    if step.again and step.attempt == row.attempt:
        return _at_work(row, Wait(step.backend, step.operation, step.kind))
    if step.fetched:  # the download has filled the progress bar; it stays full during the switch
        return replace(
            row,
            status=OperationNodeStatus.DOWNLOADING,
            reason="",
            phase=Phase.STARTING,
            percentage=99.0,
            rate=0.0,
            attempt=step.attempt,
            seq=0,
            next_try_at=None,
            waits=False,
        )
    return replace(
        row,
        status=OperationNodeStatus.DOWNLOADING,
        reason="",
        phase=DELETING if step.kind is OrderKind.DELETE else "",
        file_name="",
        percentage=0.0,
        current_bytes=0,
        total_bytes=0,
        rate=0.0,
        attempt=step.attempt,
        seq=0,
        next_try_at=None,
        waits=False,
        sources={},
        variant=step.build.variant if step.build else row.variant,
        digest=step.build.digest if step.build else row.digest,
    )


def _held(row: OperationNode, step: Hold) -> OperationNode:
    match step.why:
        case HoldCause.RETRY | HoldCause.PARKED:
            return replace(settle(row, OperationNodeStatus.ERROR, step.reason), next_try_at=step.until)
        case HoldCause.NODE | HoldCause.STOPPED:
            return replace(
                row, status=OperationNodeStatus.QUEUED, reason=step.reason, rate=0.0, next_try_at=None, waits=True
            )
        case HoldCause.TURN:
            return replace(
                row, status=OperationNodeStatus.QUEUED, reason=step.reason, rate=0.0, next_try_at=None, waits=False
            )


def _at_work(row: OperationNode, step: Wait) -> OperationNode:
    if step.running:
        return replace(
            row,
            status=OperationNodeStatus.RUNNING_ON_WORKER,
            reason=STILL_RUNNING,
            rate=0.0,
            next_try_at=None,
            waits=False,
        )
    if row.status is OperationNodeStatus.DOWNLOADING:
        return row
    return replace(row, status=OperationNodeStatus.DOWNLOADING, reason="", next_try_at=None, waits=False)


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
    return OperationState.WAITING if settled else OperationState.RUNNING


def error_text(rows: Sequence[OperationNode]) -> str:
    """`name: reason; …` of the nodes that fail, in name order."""
    failing = sorted((row for row in rows if row.status is OperationNodeStatus.ERROR), key=lambda row: row.node_name)
    return "; ".join(f"{row.node_name}: {row.reason}" for row in failing)


def running_text(rows: Sequence[OperationNode]) -> str:
    """The names of the nodes that still work although their reply is overdue."""
    return ", ".join(sorted(row.node_name for row in rows if row.status is OperationNodeStatus.RUNNING_ON_WORKER))
