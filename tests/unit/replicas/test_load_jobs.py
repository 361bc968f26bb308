"""How a load stands, and how it ends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from corral.controller.replicas.load_jobs import (
    Cooldown,
    TransferProgress,
    begin,
    fail,
    follow,
    is_expired,
    is_listed,
    set_waiting,
    status_of,
)
from corral.store.records import DesiredReplica, ReplicaStage

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
COOL = Cooldown()


def later(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def a_row(stage: str, **known: Any) -> DesiredReplica:
    return DesiredReplica("n", "m", 0, "r", "b", ReplicaStage(stage), "op", "", NOON, NOON, **known)


@pytest.mark.parametrize(
    ("stage", "installed", "staging", "state"),
    [
        ("placed", False, False, "installing"),
        ("placed", True, False, "staging"),
        ("ordered", True, True, "staging"),
        ("ordered", True, False, "loading"),
    ],
)
def test_its_state_is_that_of_its_replica(stage: str, installed: bool, staging: bool, state: str) -> None:
    job = follow(
        begin("m", "r", NOON),
        a_row(stage),
        "barn",
        installed=installed,
        progress=TransferProgress(50, 200, 1, 2, "downloading w", staging),
        now=later(1),
    )
    status = status_of(job, later(1))
    assert (status.state, status.node, status.progress) == (state, "barn", 25.0)
    assert (status.bytes_sent, status.total_bytes, status.file_index, status.total_files) == (50, 200, 1, 2)
    assert "barn" in status.message
    assert status.message.endswith("downloading w")


def test_the_end_is_foretold_once_bytes_have_moved_for_a_second() -> None:
    job = begin("m", "r", NOON)
    for seconds, sent in ((1, 0), (2, 10), (4, 30)):
        moved = TransferProgress(sent, 100, 1, 1)
        job = follow(job, a_row("placed"), "barn", installed=True, progress=moved, now=later(seconds))
        eta = status_of(job, later(seconds)).eta_seconds
        assert eta == (None if seconds < 4 else 5.0)


def test_each_step_is_foretold_by_its_own_bytes() -> None:
    """Ten minutes of fetching say nothing about unpacking."""
    job = begin("m", "r", NOON)
    for seconds, sent in ((1, 10), (600, 100), (601, 10), (603, 40)):
        moved = TransferProgress(sent, 100, 1, 1)
        job = follow(job, a_row("placed"), "barn", installed=True, progress=moved, now=later(seconds))
    assert status_of(job, later(603)).eta_seconds == 3.0


def test_versions_rise_with_every_change_and_from_one_load_to_the_next() -> None:
    first = begin("m", "r", NOON)
    second = set_waiting(first, "no room", NOON)
    assert second.version == first.version + 1
    assert set_waiting(second, "no room", NOON) is second, "nothing is new"
    failed = fail(second, "n", "broken", NOON, COOL, elsewhere=False)
    assert begin("m", "r", NOON, failed).version == failed.version + 1
    assert begin("m", "r", later(1)).version > failed.version


def test_the_cooldown_doubles_up_to_five_minutes_and_is_forgotten() -> None:
    waited, job, now = [], begin("m", "r", NOON), NOON
    for _ in range(7):
        job = fail(job, "n", "broken", now, COOL, elsewhere=False)
        assert job.retry_at is not None
        waited.append((job.retry_at - now).total_seconds())
        assert not job.may_try(now)
        now = job.retry_at
        assert job.may_try(now)
        assert not is_expired(job, now, COOL)
        again = begin("m", "r", now, job)
        assert (again.active, again.failed_on, again.error) == (True, {}, "")
        job = again
    assert waited == [10, 20, 40, 80, 160, 300, 300]


def test_a_failure_is_shown_for_a_while_with_its_cause() -> None:
    job = fail(begin("m", "r", NOON), "n", "exit 1\nout of memory", NOON, COOL, elsewhere=False)
    status = status_of(job, later(4))
    assert (status.state, status.error, status.retry_after_s) == ("failed", "exit 1\nout of memory", 6.0)
    assert [is_listed(job, later(seconds), COOL) for seconds in (1, 14, 16)] == [True, True, False]
    assert [is_expired(job, later(seconds), COOL) for seconds in (1, 599, 601)] == [False, False, True]


def test_three_nodes_are_tried_before_it_has_failed() -> None:
    job = begin("m", "r", NOON)
    states = []
    for node in ("a", "b", "c"):
        job = fail(job, node, f"broken on {node}", NOON, COOL, elsewhere=True)
        states.append(job.state.value)
    assert states == ["pending", "pending", "failed"]
    assert job.failed_on == {"a": "broken on a", "b": "broken on b", "c": "broken on c"}
    assert job.failures == 1
