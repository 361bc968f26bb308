"""A process that no row speaks of: taken in when it may answer, ended when nobody wants it, never while it is busy."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.inventory.records import ProcessActivity
from corral.controller.replicas.facts import Decided, Facts
from corral.controller.replicas.lifecycle import Place, Times
from corral.controller.replicas.plan import decide
from corral.controller.scheduler.world import Model, World
from corral.store.records import ReplicaStage

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ORPHAN = Times().orphan
IDLE, BUSY, UNHEARD = ProcessActivity(0, True), ProcessActivity(2, True), ProcessActivity(0, False)


def leftover(revision: str = "r2", state: str = "ready", replica: int = 0) -> ReplicaProcess:
    return ReplicaProcess("p", "m", replica, "b", state, "openai", revision=revision)


def look(
    process: ReplicaProcess, quiet: ProcessActivity = IDLE, *, seen_for: timedelta = timedelta(), **known: Any
) -> Decided:
    """The model is of revision r2, and r1 may answer until one of r2 does."""
    place = Place("n", "n", boot_id="boot", processes=(process,), quiet={"p": quiet}, **known.pop("place", {}))
    models = {"m": Model("m", "b", "r2", disabled=known.pop("disabled", False))}
    strays = {"p": NOON - seen_for}
    return decide(
        Facts(NOON, 1, World(NOON, models=models), {"n": place}, previous_revisions={"m": ("r1",)}, strays=strays)
    )


@pytest.mark.parametrize("revision", ["r2", "r1"])
def test_one_that_may_answer_is_taken_in_as_what_it_is(revision: str) -> None:
    [row] = look(leftover(revision)).rows.values()
    assert (row.revision, row.stage, row.process_id) == (revision, ReplicaStage.RUNNING, "p")


@pytest.mark.parametrize("revision", ["r0", ""])
def test_one_of_any_other_revision_is_not(revision: str) -> None:
    decided = look(leftover(revision))
    assert (dict(decided.rows), list(decided.strays)) == ({}, ["p"])


@pytest.mark.parametrize("state", ["starting", "restarting", "stopping", "failed"])
def test_one_that_does_not_serve_is_not(state: str) -> None:
    assert not look(leftover(state=state)).rows


def test_one_of_a_disabled_model_is_not() -> None:
    assert not look(leftover(), disabled=True).rows


@pytest.mark.parametrize(
    ("quiet", "seen_for", "ends"),
    [
        (IDLE, ORPHAN, True),
        (IDLE, ORPHAN - timedelta(seconds=1), False),
        (BUSY, ORPHAN, False),
        (BUSY, timedelta(days=1), False),
        (UNHEARD, timedelta(days=1), False),
    ],
)
def test_one_that_nobody_wants_ends_when_it_has_long_been_idle(
    quiet: ProcessActivity, seen_for: timedelta, ends: bool
) -> None:
    assert look(leftover("r0"), quiet, seen_for=seen_for).clear == ([("n", "p")] if ends else [])


@pytest.mark.parametrize("place", [{"status": "offline"}, {"bus_down": True}, {"known": False}, {"accepts": False}])
def test_nothing_is_decided_about_a_node_that_cannot_be_told(place: dict[str, Any]) -> None:
    decided = look(leftover("r0"), seen_for=ORPHAN, place=place)
    assert (decided.clear, decided.strays) == ([], {})
