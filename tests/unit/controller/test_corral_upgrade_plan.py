"""Whose turn it is in an upgrade of Corral, from the rows of its operation alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from corral.contract.messages.releases import UpgradeState, UpgradeWorkerReply
from corral.controller.operations.corral_operations import BAD_VERSION, advanced, begun, ended, is_due, retry_at
from corral.controller.operations.state import SOAKING
from corral.controller.releases.plan import CanaryHealth, Turns, choose_turns, first_of_each_class
from corral.store.records import NO_SOAK, OperationNode, OperationNodeStatus, Rollout, RolloutPhase, RolloutSettings

NOON = datetime(2026, 11, 19, 12, tzinfo=UTC)
SOON = NOON + timedelta(seconds=30)


def row(name: str, status: str = "queued", **more: Any) -> OperationNode:
    return OperationNode("op", name, name, OperationNodeStatus(status), NOON, **more)


def turns(
    *rows: OperationNode, classes: dict[str, str] | None = None, absent: set[str] | None = None, parallel: str = "100%"
) -> tuple[list[str], dict[str, str]]:
    known = classes or {each.node_id: "cpu" for each in rows}
    rollout = Rollout("op", 0, "corral 2.0", RolloutPhase.CANARY, NO_SOAK, NOON)
    found = choose_turns(rollout, rows, known, frozenset(absent or ()), NOON, parallel)
    return [each.node_id for each in found.begin], dict(found.held)


def test_one_of_each_class_begins() -> None:
    classes = {"a": "cpu", "b": "cpu", "c": "gpu", "d": "gpu"}
    begin, held = turns(row("a"), row("b"), row("c"), row("d"), classes=classes)
    assert begin == ["a", "c"]
    assert held == {
        "b": "waits for the first node with cpu to switch",
        "d": "waits for the first node with gpu to switch",
    }
    assert first_of_each_class([("b", "cpu"), ("a", "cpu"), ("d", "gpu")]) == {"a", "d"}


def test_the_others_follow_as_many_at_once_as_allowed() -> None:
    begin, held = turns(row("a", "success"), row("b", "downloading"), row("c"), row("d"), row("e"), parallel="2")
    assert (begin, sorted(held)) == (["c"], ["d", "e"])
    assert turns(row("a", "success"), row("b"), row("c"))[0] == ["b", "c"]


def test_a_node_that_is_away_or_has_failed_before_it_tried_does_not_keep_its_class_waiting() -> None:
    assert turns(row("a"), row("b"), absent={"a"})[0] == ["b"]
    no_disk = row("a", "error", reason="the disk is full", next_try_at=SOON)
    assert turns(no_disk, row("b"))[0] == ["b"]
    assert turns(row("a", "skipped"), row("b"))[0] == ["b"]


def test_a_node_that_is_away_while_it_takes_over_keeps_its_class_waiting() -> None:
    """Between two workers nobody answers for a moment. Seeds of the simulation saw a second node begin."""
    assert turns(row("a", "downloading"), row("b"), absent={"a"})[0] == []
    assert turns(row("b"), row("c", "downloading"), absent={"c"})[0] == []


def test_a_bad_version_stops_all_until_a_person_acts() -> None:
    bad = row("a", "error", phase=BAD_VERSION, reason="it was not ready")
    begin, held = turns(bad, row("b"), row("c"), classes={"a": "cpu", "b": "cpu", "c": "gpu"})
    assert begin == []
    assert set(held.values()) == {"stopped: a failed to switch: it was not ready"}
    assert turns(row("a", phase=BAD_VERSION), row("b"))[0] == ["a"], "a retry makes it a queued row again"


def test_progress_never_goes_backwards_and_each_attempt_begins_anew() -> None:
    first = begun(row("a", "error", percentage=40.0, current_bytes=7, next_try_at=SOON))
    assert (first.status, first.attempt, first.percentage, first.next_try_at) == ("downloading", 1, 0.0, None)
    half = advanced(first, UpgradeWorkerReply(state="running", phase="fetching", current_bytes=5, total_bytes=10))
    assert (half.percentage, half.phase) == (15.0, "fetching")
    built = advanced(half, UpgradeWorkerReply(state="running", phase="checking"))
    assert (built.percentage, built.current_bytes) == (70.0, 10), "what is built was fetched, between two replies"
    late = advanced(built, UpgradeWorkerReply(state="running", phase="building"))
    assert late.percentage == 70.0


def test_how_an_attempt_ends() -> None:
    attempt = begun(row("a"))
    assert ended(attempt, UpgradeWorkerReply(state=UpgradeState.DONE), SOON).status == "success"
    refused = ended(attempt, UpgradeWorkerReply(state="refused", reason="a container"), SOON)
    assert (refused.status, refused.reason) == ("skipped", "a container")
    passing = ended(attempt, UpgradeWorkerReply(state="failed", reason="the disk is full"), SOON)
    assert (passing.status, passing.next_try_at, passing.failures, passing.phase) == ("error", SOON, 1, "")
    assert not is_due(passing, NOON)
    assert is_due(passing, SOON)
    final = ended(attempt, UpgradeWorkerReply(state="failed", is_final=True), SOON)
    assert (final.next_try_at, final.reason, final.phase) == (None, "the node gave no reason", "")
    assert not is_due(final, SOON + timedelta(days=1))
    bad = ended(attempt, UpgradeWorkerReply(state="failed", is_final=True, is_version_bad=True), SOON)
    assert bad.phase == BAD_VERSION
    assert retry_at(row("a", failures=3), NOON, first_s=1.0, cap_s=5.0) == NOON + timedelta(seconds=5)


def soaking(*rows: OperationNode, health: CanaryHealth, rollout: Rollout, now: datetime) -> Turns:
    classes = {each.node_id: "cpu" for each in rows}
    return choose_turns(rollout, rows, classes, frozenset(), now, "100%", health={"a": health}, unhealthy_s=60.0)


def test_a_stepped_clock_neither_ends_a_soak_nor_makes_a_canary_unhealthy() -> None:
    rows = (row("a", "downloading", phase=SOAKING), row("b"))
    rollout = Rollout("op", 0, "corral 2.0", RolloutPhase.CANARY, RolloutSettings(soak_s=300.0), NOON)
    for now in (NOON, NOON + timedelta(hours=3), NOON - timedelta(hours=5), NOON + timedelta(days=2)):
        rollout = soaking(*rows, health=CanaryHealth("not ready", "boot"), rollout=rollout, now=now).rollout
    (state,) = rollout.classes
    assert (state.soaking, state.soaked_s, state.unsteady_s) == (True, 0.0, 20.0), "a step counts ten seconds"
    turns = soaking(*rows, health=CanaryHealth("", "boot"), rollout=rollout, now=NOON + timedelta(days=9))
    (state,) = turns.rollout.classes
    assert (state.soaked_s, state.unsteady_s, turns.begin) == (10.0, 0.0, ())


def test_a_canary_is_unhealthy_for_a_minute_before_it_returns() -> None:
    rows = (row("a", "downloading", phase=SOAKING), row("b"))
    rollout = Rollout("op", 0, "corral 2.0", RolloutPhase.CANARY, RolloutSettings(soak_s=300.0), NOON)
    phases = []
    for number in range(8):
        now = NOON + timedelta(seconds=10 * number)
        turns = soaking(*rows, health=CanaryHealth("not ready", "boot"), rollout=rollout, now=now)
        rollout = turns.rollout
        phases.append(rollout.phase.value)
    assert phases == ["soak"] * 7 + ["reverted"]
    assert rollout.verdict == "a was not healthy for 1m: not ready"
    assert (turns.is_reverted, sorted(turns.stopped)) == (True, ["b"])
