"""An operation's state from its rows: order of events does not matter, an end is an end."""

from __future__ import annotations

import gc
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from corral.controller.operations.state import (
    ProgressEvent,
    error_text,
    merge_progress,
    running_text,
    settle,
    summarize,
)
from corral.controller.operations.views import node_view
from corral.store.records import ENDED, OperationNode, OperationNodeStatus

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def row(status: str = "queued", name: str = "barn", **more: object) -> OperationNode:
    return OperationNode(
        operation_id="op",
        node_id=name,
        node_name=name,
        status=OperationNodeStatus(status),
        updated_at=NOON,
        **more,  # type: ignore[arg-type]
    )


def tick(attempt: int, seq: int, percentage: float = 0.0) -> ProgressEvent:
    return ProgressEvent(attempt, seq, "downloading", "layer", percentage, 1, 2, 3.0)


def test_a_bad_source_stays_named_in_later_attempts_and_data_counts_for_its_attempt() -> None:
    now = row(attempt=1)
    for attempt, seq, sources, bad, expected in (
        (1, 1, {"attic": 3}, ("barn",), ({"attic": 3}, ("barn",))),
        (1, 2, {}, (), ({"attic": 3}, ("barn",))),
        (2, 1, {}, ("byre",), ({}, ("barn", "byre"))),
    ):
        event = ProgressEvent(attempt, seq, "downloading", "layer", 1.0, 1, 2, 3.0, sources, bad)
        now = merge_progress(now, event)
        assert (now.sources, now.bad_sources) == expected


def test_words_of_the_contract() -> None:
    words = [status.value for status in OperationNodeStatus]
    assert words[:3] == ["queued", "downloading", "running_on_worker"]
    assert {"success", "error", "skipped", "superseded", "withdrawn", "cancelled"} <= set(words)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.floats(0, 100)), max_size=12))
def test_progress_never_goes_backwards_within_an_attempt(events: list[tuple[int, int, float]]) -> None:
    now = row()
    for attempt, seq, percentage in events:
        before, now = now, merge_progress(now, tick(attempt, seq, percentage))
        assert (now.attempt, now.seq) >= (before.attempt, before.seq)
        if now.attempt == before.attempt:
            assert now.percentage >= before.percentage


@pytest.mark.parametrize("status", sorted(ENDED))
def test_a_late_event_does_not_overwrite_an_end(status: str) -> None:
    ended = row(status)
    assert merge_progress(ended, tick(9, 9)) == ended
    assert settle(ended, OperationNodeStatus.ERROR, "late") == ended


def test_a_tick_of_a_new_attempt_starts_over() -> None:
    assert merge_progress(row("error", attempt=1, seq=5, percentage=80.0), tick(2, 1, 3.0)).percentage == 3.0


def test_success_is_a_full_bar() -> None:
    assert settle(row("downloading", percentage=41.0), OperationNodeStatus.SUCCESS).percentage == 100.0


@pytest.mark.parametrize(
    ("rows", "outcome", "settled"),
    [
        ([row("success"), row("skipped")], "done", True),
        ([row("success"), row("downloading")], "under_way", False),
        ([row("success"), row("running_on_worker")], "under_way", False),
        ([row("success"), row("queued", waits=True)], "waiting", True),
        ([row("error"), row("queued", waits=True)], "failing", True),
        ([row("error"), row("downloading")], "under_way", False),
        ([row("error"), row("running_on_worker")], "failing", False),  # a failure outranks what is still running
        ([row("running_on_worker"), row("error"), row("queued", waits=True), row("success")], "failing", False),
        ([row("error"), row("running_on_worker"), row("downloading")], "under_way", False),
        ([row("running_on_worker"), row("queued", waits=True)], "under_way", False),
        ([row("cancelled"), row("withdrawn"), row("superseded")], "done", True),
        ([], "done", True),
    ],
)
def test_the_whole_is_judged_by_its_rows(rows: list[OperationNode], outcome: str, settled: bool) -> None:
    summary = summarize(rows)
    assert (summary.outcome, summary.settled) == (outcome, settled)


def test_processed_as_the_contract_has_it() -> None:
    """Every node was called; one that takes longer than its call is told, not waited for."""
    late = [row("success"), row("running_on_worker", "b"), row("running_on_worker", "a"), row("queued", waits=True)]
    assert summarize(late).processed
    assert not summarize(late).settled
    assert running_text(late) == "a, b"
    assert not summarize([row("downloading")]).processed
    assert not summarize([row("queued")]).processed


def test_one_bar_over_all() -> None:
    assert summarize([row("success", percentage=100.0), row("downloading", percentage=50.0)]).progress == 75.0
    assert summarize([row("downloading", percentage=100.0)]).progress == 99.0, "not done before it is done"
    assert summarize([row("skipped")]).progress == 100.0
    assert summarize([]).progress == 100.0


def test_the_error_names_every_failing_node_in_order() -> None:
    rows = [row("error", "b", reason="disk full"), row("success", "c"), row("error", "a", reason="gone")]
    assert error_text(rows) == "a: gone; b: disk full"
    assert error_text([replace(rows[1])]) == ""


@given(
    st.lists(
        st.builds(row, st.sampled_from(sorted(OperationNodeStatus)), waits=st.booleans(), percentage=st.floats(0, 100))
    )
)
def test_a_summary_agrees_with_what_each_row_says(rows: list[OperationNode]) -> None:
    summary = summarize(rows)
    assert summary.settled is all(summarize([each]).settled for each in rows)
    assert summary.processed is all(summarize([each]).processed for each in rows)
    assert (summary.outcome == "done") is all(each.status in ENDED for each in rows)
    assert sum(summary.counts.values()) == len(rows)
    assert 0 <= summary.progress <= 100


def test_rows_of_lists_cost_the_garbage_collector_nothing() -> None:
    """A page of 10,000 rows made it stop everything for some 80 ms."""
    assert not gc.is_tracked(row())
    assert not gc.is_tracked(node_view(row()))
