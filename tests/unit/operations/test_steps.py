"""What people see of each step."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import structs

from corral.controller.backends.plan import Done, Fail, Hold, HoldCause, Skip, Wait
from corral.controller.operations.state import ProgressEvent, after_step, merge_progress, summarize
from corral.controller.orders.order import Build, Send
from corral.store.records import ENDED, OperationNode, OperationNodeStatus, OrderKind

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ROW = OperationNode(
    operation_id="op7", node_id="n1", node_name="barn", status=OperationNodeStatus("queued"), updated_at=NOON
)
SEND = Send("vllm", OrderKind.INSTALL, Build("cpu-vllm", "sha256:new"), 7, "op7", 2)
DOWNLOADING = structs.replace(
    ROW, status=OperationNodeStatus("downloading"), phase="downloading", percentage=40.0, attempt=2, seq=9
)


def hold(why: str, until: datetime | None = None) -> Hold:
    return Hold("vllm", "op7", OrderKind.INSTALL, HoldCause(why), "because", until)


def tick(attempt: int, seq: int) -> ProgressEvent:
    return ProgressEvent(attempt, seq, "extracting", "layer", 50.0, 1, 2, 3.0)


def test_sent_means_under_way_from_the_start() -> None:
    row = after_step(
        structs.replace(ROW, status=OperationNodeStatus.ERROR, reason="x", attempt=1, seq=5, percentage=80.0), SEND
    )
    assert (row.status, row.reason, row.attempt, row.seq, row.percentage) == ("downloading", "", 2, 0, 0.0)
    assert (row.variant, row.digest) == ("cpu-vllm", "sha256:new")
    deleting = after_step(ROW, Send("vllm", OrderKind.DELETE, None, 7, "op7", 1))
    assert deleting.phase == "deleting"


def test_the_same_order_once_more_does_not_throw_the_bar_back() -> None:
    assert after_step(DOWNLOADING, replace(SEND, again=True)) == DOWNLOADING


@pytest.mark.parametrize(
    ("step", "status", "settled"),
    [
        (hold("node"), "queued", True),
        (hold("stopped"), "queued", True),
        (hold("turn"), "queued", False),
        (hold("retry", NOON), "error", True),
        (hold("parked"), "error", True),
        (Wait("vllm", "op7", OrderKind.INSTALL), "downloading", False),
        (Wait("vllm", "op7", OrderKind.INSTALL, running=True), "running_on_worker", False),
        (Fail("vllm", "op7", "because"), "error", True),
        (Skip("vllm", "op7", "because"), "skipped", True),
        (Done("vllm", "op7", 7, OrderKind.INSTALL, "sha256:x"), "success", True),
    ],
)
def test_every_step_has_its_word(step: Any, status: str, settled: bool) -> None:
    row = after_step(DOWNLOADING, step)
    assert row.status == status
    assert summarize([row]).settled is settled
    assert row.next_try_at == getattr(step, "until", None)
    assert bool(row.reason) == (status not in ("success", "downloading"))


def test_success_tells_what_is_there_now() -> None:
    row = after_step(DOWNLOADING, Done("vllm", "op7", 7, OrderKind.INSTALL, "sha256:x"))
    assert (row.percentage, row.digest) == (100.0, "sha256:x")


@pytest.mark.parametrize("status", sorted(ENDED))
def test_an_end_is_an_end(status: str) -> None:
    ended = structs.replace(ROW, status=OperationNodeStatus(status))
    for step in (SEND, hold("node"), Fail("vllm", "op7", "x"), Done("vllm", "op7")):
        assert after_step(ended, step) == ended


def test_a_late_event_of_a_failed_attempt_does_not_hide_the_failure() -> None:
    failed = after_step(DOWNLOADING, hold("retry", NOON))
    assert merge_progress(failed, tick(2, 10)) == failed
    assert merge_progress(failed, tick(3, 1)).status == "downloading"


def test_a_worker_that_does_not_number_its_events() -> None:
    begun = after_step(ROW, SEND)
    moved = merge_progress(begun, tick(0, 1_700_000_000_000))
    assert (moved.attempt, moved.percentage) == (2, 50.0)
    assert merge_progress(after_step(moved, hold("retry", NOON)), tick(0, 1_700_000_000_001)).status == "error"


def test_an_overdue_answer_stays_overdue_while_the_bar_moves() -> None:
    late = after_step(DOWNLOADING, Wait("vllm", "op7", OrderKind.INSTALL, running=True))
    moved = merge_progress(late, tick(2, 10))
    assert (moved.status, moved.percentage, moved.reason) == ("running_on_worker", 50.0, late.reason)
