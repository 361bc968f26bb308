"""Applies the steps of the plan to the rows of operations that users watch. Pure."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from corral.contract.messages.backends import Phase
from corral.controller.backends.outcomes import STILL_RUNNING
from corral.controller.backends.plan import Done, Fail, Hold, HoldCause, Skip, Wait
from corral.controller.operations.state import settle
from corral.controller.orders.order import Send
from corral.store.records import ENDED, OperationNode, OperationNodeStatus, OrderKind

DELETING = "deleting"  # the phase shown for a delete: nothing is downloaded then

Shown = Send | Done | Skip | Hold | Wait | Fail


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
