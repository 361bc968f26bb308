"""The trial of a new revision: its share of the requests, and what ends it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from corral.controller.rollouts.comparison import Judgement
from corral.controller.rollouts.plan import NodeState
from corral.controller.rollouts.trial import (
    TrialReplica,
    is_worth_storing,
    plan_trial,
    replicas_for,
    share_of,
    trial_words,
)
from corral.store.records import ModelTrial, Rollout, RolloutFigure, RolloutPhase, RolloutSettings

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TRIAL = ModelTrial("new" * 8, "old" * 8, {}, {}, "person", "person")
GOOD = RolloutFigure("errors", "m", 0.0, 0.0, 50, 50, 0.02)
BAD = RolloutFigure("errors", "m", 0.0, 0.1, 150, 150, 0.02, worse=True)


def replica(name: str = "barn", state: str = "switched", **more: Any) -> TrialReplica:
    ready = state == "switched"
    known: dict[str, Any] = {"ready": ready, "process_id": f"process on {name}", "status": "healthy"}
    return TrialReplica(f"id of {name}", name, state=NodeState(state), **(known | more))


class Soak:
    """A trial that is advanced step by step; what is stored is all that the next step has."""

    def __init__(self, soak_s: float = 60.0, requests: int = 0, **trial: Any) -> None:
        settings = RolloutSettings(soak_s=soak_s, soak_requests=requests)
        known = structs.replace(TRIAL, **trial)
        self.rollout = Rollout("op", 0, "m", RolloutPhase.FETCHING, settings, NOON, trial=known)
        self.replicas: tuple[TrialReplica, ...] = (replica(),)
        self.now = NOON

    def step(self, after_s: float = 2.0, judged: Judgement | None = None) -> Rollout:
        self.now += timedelta(seconds=after_s)
        self.rollout = plan_trial(self.rollout, self.replicas, judged or Judgement(), self.now)
        return self.rollout

    def steps(self, seconds: float) -> Rollout:
        for _ in range(int(seconds / 2)):
            self.step()
        return self.rollout


def test_the_share_grows_with_the_soak() -> None:
    soak = Soak()
    assert share_of(soak.rollout) == 0
    shares = [share_of(soak.step()) for _ in range(31)]
    assert shares == [5] * 10 + [25] * 10 + [100] * 10 + [0]
    assert soak.rollout.phase is RolloutPhase.DONE
    assert soak.rollout.classes[0].passed.startswith("too few requests to judge: 0 by the new revision")


def test_the_share_grows_with_the_requests_of_a_soak_of_requests() -> None:
    soak = Soak(0.0, requests=90)
    shares = []
    for count in (0, 29, 30, 59, 60, 89):
        soak.step()
        shares.append(share_of(soak.step(judged=Judgement(count, 200))))
    assert shares == [5, 5, 25, 25, 100, 100]
    assert soak.step(judged=Judgement(90, 200, (GOOD,))).phase is RolloutPhase.DONE


@pytest.mark.parametrize("step_s", [-7200.0, 7200.0], ids=["back", "ahead"])
def test_a_clock_that_is_set_neither_ends_nor_lengthens_a_soak(step_s: float) -> None:
    soak = Soak()
    soak.steps(20)
    before_s = soak.rollout.classes[0].soaked_s
    after = soak.step(step_s)
    assert 0 <= after.classes[0].soaked_s - before_s <= 10
    assert after.phase is RolloutPhase.SOAK
    assert soak.steps(64).phase is RolloutPhase.DONE


def test_a_worse_figure_reverts_at_any_share() -> None:
    for seconds in (4, 30, 50):
        soak = Soak()
        soak.steps(seconds)
        after = soak.step(judged=Judgement(150, 150, (BAD,)))
        assert after.phase is RolloutPhase.REVERTED
        assert after.verdict.startswith("failed requests of m: 10.0 %")
        assert share_of(after) == 0


def test_nothing_counts_before_a_replica_is_ready() -> None:
    soak = Soak()
    for replicas, words in (
        ((), "a replica of the new revision starts"),
        ((replica(state="fetching"),), "a replica of the new revision starts"),
        ((replica(state="switching"),), "a replica of the new revision starts on barn"),
    ):
        soak.replicas = replicas
        assert soak.step().phase in (RolloutPhase.FETCHING, RolloutPhase.CANARY)
        assert share_of(soak.rollout) == 0
        assert trial_words(soak.rollout) == words


def test_a_promotion_does_not_wait_for_replicas_that_still_start() -> None:
    soak = Soak()
    soak.replicas = (replica(), replica("byre", "switching"))
    soak.steps(10)
    soak.rollout = structs.replace(soak.rollout, promoted_by="ann")
    assert soak.step().phase is RolloutPhase.DONE


def test_a_canary_that_leaves_is_replaced_once_and_its_share_begins_anew() -> None:
    soak = Soak()
    soak.steps(30)
    assert share_of(soak.rollout) == 25
    soak.replicas = ()
    after = soak.steps(10)
    assert after.phase is RolloutPhase.SOAK
    assert "barn is away" in after.classes[0].waiting
    soak.replicas = (replica("byre"),)
    soak.step()
    assert share_of(soak.step()) == 5
    assert soak.rollout.classes[0].canary_name == "byre"
    soak.replicas = (replica("shed"),)
    soak.step()
    assert soak.step().phase is RolloutPhase.REVERTED


@pytest.mark.parametrize("failures", [1, 2])
def test_the_second_failed_start_reverts(failures: int) -> None:
    soak = Soak(failures=failures, failed_on={"id of barn": "no memory"}, failed_node="barn")
    soak.replicas = (replica("byre", "fetching"),)
    after = soak.step()
    if failures == 1:
        assert after.phase is RolloutPhase.FETCHING
        assert trial_words(after).endswith("its first start failed: no memory")
    else:
        assert after.verdict == "barn failed to start it 2 times: no memory"


def test_in_place_it_gets_all_requests_from_the_start() -> None:
    soak = Soak(in_place=True)
    soak.replicas = ()
    assert share_of(soak.step()) == 100
    assert trial_words(soak.rollout) == "waits until a replica of the new revision is ready"


def test_a_step_that_only_lets_time_pass_is_stored_now_and_then() -> None:
    soak = Soak()
    soak.steps(4)
    before, tick = soak.rollout, timedelta(seconds=2)
    assert not is_worth_storing(before, soak.step(0.5), tick)
    soak.rollout = before
    assert is_worth_storing(before, soak.step(2.0), tick)
    soak.rollout = before
    assert is_worth_storing(before, soak.step(0.1, Judgement(3, 4)), tick)


@pytest.mark.parametrize(
    ("share", "old", "wanted"), [(0, 0, 1), (5, 1, 1), (5, 20, 1), (5, 21, 2), (25, 4, 1), (25, 5, 2), (100, 7, 7)]
)
def test_as_many_replicas_as_the_share_needs(share: int, old: int, wanted: int) -> None:
    assert replicas_for(share, old) == wanted
