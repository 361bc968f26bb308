"""A process that no row speaks of: taken in when it may answer, ended when nobody wants it, never while it is busy."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.inventory.activity import ProcessActivity
from corral.controller.replicas.lifecycle import LifecycleTimes, ReplicaHost
from corral.controller.replicas.plan import plan_replicas
from corral.controller.replicas.plan_input import PlanInput, PlanResult
from corral.controller.scheduler.world import Model, World
from corral.store.records import ReplicaStage

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ORPHAN = LifecycleTimes().orphan_after
IDLE, BUSY, UNKNOWN = ProcessActivity(0, True), ProcessActivity(2, True), ProcessActivity(0, False)


def leftover(revision: str = "r2", state: str = "ready", replica: int = 0) -> ReplicaProcess:
    return ReplicaProcess("p", "m", replica, "b", state, "openai", revision=revision)


def plan_with(
    process: ReplicaProcess, activity: ProcessActivity = IDLE, *, seen_for: timedelta = timedelta(), **known: Any
) -> PlanResult:
    """The model is of revision r2, and r1 may answer until one of r2 does."""
    host = ReplicaHost(
        "n", "n", boot_id="boot", processes=(process,), activity={"p": activity}, **known.pop("host", {})
    )
    models = {"m": Model("m", "b", "r2", disabled=known.pop("disabled", False))}
    orphans = {"p": NOON - seen_for}
    return plan_replicas(
        PlanInput(NOON, 1, World(NOON, models=models), {"n": host}, previous_revisions={"m": ("r1",)}, orphans=orphans)
    )


@pytest.mark.parametrize("revision", ["r2", "r1"])
def test_one_that_may_answer_is_taken_in_as_what_it_is(revision: str) -> None:
    [row] = plan_with(leftover(revision)).rows.values()
    assert (row.revision, row.stage, row.process_id) == (revision, ReplicaStage.RUNNING, "p")


@pytest.mark.parametrize("revision", ["r0", ""])
def test_one_of_any_other_revision_is_not(revision: str) -> None:
    result = plan_with(leftover(revision))
    assert (dict(result.rows), list(result.orphans)) == ({}, ["p"])


@pytest.mark.parametrize("state", ["starting", "restarting", "stopping", "failed"])
def test_one_that_does_not_serve_is_not(state: str) -> None:
    assert not plan_with(leftover(state=state)).rows


def test_one_of_a_disabled_model_is_not() -> None:
    assert not plan_with(leftover(), disabled=True).rows


@pytest.mark.parametrize(
    ("activity", "seen_for", "ends"),
    [
        (IDLE, ORPHAN, True),
        (IDLE, ORPHAN - timedelta(seconds=1), False),
        (BUSY, ORPHAN, False),
        (BUSY, timedelta(days=1), False),
        (UNKNOWN, timedelta(days=1), False),
    ],
)
def test_one_that_nobody_wants_ends_when_it_has_long_been_idle(
    activity: ProcessActivity, seen_for: timedelta, ends: bool
) -> None:
    assert plan_with(leftover("r0"), activity, seen_for=seen_for).unwanted == ([("n", "p")] if ends else [])


@pytest.mark.parametrize("host", [{"status": "offline"}, {"bus_down": True}, {"known": False}, {"accepts": False}])
def test_nothing_is_decided_about_a_node_that_cannot_be_told(host: dict[str, Any]) -> None:
    result = plan_with(leftover("r0"), seen_for=ORPHAN, host=host)
    assert (result.unwanted, result.orphans) == ([], {})
