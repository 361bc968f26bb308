"""One step of a rollout: who may switch, whose soak has passed, what reverts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from corral.controller.rollouts.comparison import Judgement
from corral.controller.rollouts.options import allowed_at_once
from corral.controller.rollouts.plan import NodeState, RolloutNode, RolloutStep, plan_rollout
from corral.store.records import NO_SOAK, Rollout, RolloutFigure, RolloutPhase, RolloutSettings, RolloutWindow

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SOAK = RolloutSettings(soak_s=60)
GOOD = RolloutFigure("errors", "smol", 0.0, 0.0, 50, 50, 0.02)
BAD = RolloutFigure("errors", "smol", 0.0, 0.1, 150, 150, 0.02, worse=True)


def rollout(settings: RolloutSettings = SOAK, **more: Any) -> Rollout:
    made = Rollout("op7", 7, "vllm", RolloutPhase.FETCHING, settings, NOON)
    return structs.replace(made, **more)


def node(name: str, state: str = "ready", hardware: str = "cpu", **more: Any) -> RolloutNode:
    return RolloutNode(name, f"name of {name}", hardware, NodeState(state), **more)


class Trial:
    """A rollout that is advanced step by step, as the reconciler does it."""

    def __init__(self, *nodes: RolloutNode, settings: RolloutSettings = SOAK, parallel: str = "25%") -> None:
        self.nodes = {each.id: each for each in nodes}
        self.rollout = rollout(settings)
        self.parallel = parallel
        self.now = NOON
        self.last = RolloutStep(self.rollout)

    def step(self, after_s: float = 2.0, judged: Mapping[str, Judgement] | None = None) -> RolloutStep:
        self.now += timedelta(seconds=after_s)
        self.last = plan_rollout(
            self.rollout, list(self.nodes.values()), judged or {}, self.now, max_parallel=self.parallel
        )
        # What is stored is all that the next step has: another controller decides the same.
        self.rollout = self.last.rollout
        return self.last

    def set(self, name: str, **changes: Any) -> None:
        if "state" in changes:
            changes["state"] = NodeState(changes["state"])
        self.nodes[name] = replace(self.nodes[name], **changes)

    def going(self) -> list[str]:
        ready = [each.id for each in self.nodes.values() if each.state is NodeState.READY]
        return sorted(set(ready) - self.last.held.keys())

    def soak(self, seconds: float, judged: Mapping[str, Judgement] | None = None) -> RolloutStep:
        for _ in range(int(seconds // 2)):
            self.step(2, judged)
        return self.last

    def until_soak(self, canary: str = "a") -> None:
        self.step()
        assert self.going() == [canary]
        self.set(canary, state="switching")
        self.step()
        self.set(canary, state="switched", processes=("p1",))
        self.step()
        assert self.rollout.phase is RolloutPhase.SOAK


def test_without_a_soak_the_others_follow_as_soon_as_the_canary_has_switched() -> None:
    trial = Trial(*(node(name) for name in "abcdefgh"), settings=NO_SOAK)
    trial.step()
    assert trial.going() == ["a"]
    assert trial.last.held["b"].reason == "waits for the first node with cpu to switch"
    trial.set("a", state="switched")
    trial.step()
    assert trial.going() == ["b", "c"]
    assert trial.last.held["d"].reason == "waits for its turn: 25% of the nodes at once"
    for name in "bcdefgh":
        trial.set(name, state="switched")
    assert trial.step().rollout.phase is RolloutPhase.DONE


def test_one_canary_per_class_then_a_soak_then_the_others() -> None:
    trial = Trial(node("a"), node("b"), node("c", hardware="gpu"), node("d", hardware="gpu"), parallel="100%")
    trial.step()
    assert trial.going() == ["a", "c"]
    for name in "ac":
        trial.set(name, state="switched", processes=(f"p{name}",))
    trial.step()
    assert (trial.going(), trial.rollout.phase) == ([], RolloutPhase.SOAK)
    assert trial.last.held["b"].reason == "waits for the soak on name of a (cpu)"
    assert trial.last.soaking["a"].reason == "soaks: 0s of 1m, 0 requests"
    judged = {"a": Judgement(30, 30, (GOOD,)), "c": Judgement(10, 90)}
    trial.soak(58, judged)
    assert trial.going() == []
    trial.soak(4, judged)
    assert (trial.going(), trial.rollout.phase) == (["b", "d"], RolloutPhase.WAVES)
    assert [each.passed for each in trial.rollout.classes] == [
        "no figure was worse in 30 requests",
        "too few requests to judge: 10 by the new build, 90 by the old one, 20 needed; its processes kept running",
    ]


def test_a_worse_figure_reverts_at_once_and_is_named() -> None:
    trial = Trial(node("a"), node("b"))
    trial.until_soak()
    step = trial.step(judged={"a": Judgement(150, 150, (BAD,))})
    assert step.reverts
    assert step.rollout.verdict.startswith("failed requests of smol: 10.0 % in 150 requests")
    assert step.rollout.verdict.endswith("on name of a")
    assert step.rollout.ended_at == trial.now
    assert step.held["b"].stopped
    assert trial.step().rollout == step.rollout, "it is over"


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_stepped_clock_neither_ends_nor_prolongs_a_soak(jump_s: float) -> None:
    trial = Trial(node("a"), node("b"))
    trial.until_soak()
    trial.soak(20)
    before = trial.rollout.classes[0].soaked_s
    trial.step(jump_s)
    assert before <= trial.rollout.classes[0].soaked_s <= before + 10
    trial.soak(20)
    assert not trial.rollout.classes[0].passed
    trial.soak(30)
    assert trial.rollout.classes[0].passed


def test_a_soak_by_requests_waits_for_them_and_for_something_to_compare_with() -> None:
    trial = Trial(node("a"), node("b"), settings=RolloutSettings(soak_requests=100))
    trial.until_soak()
    trial.soak(600, {"a": Judgement(99, 500, (GOOD,))})
    assert trial.rollout.phase is RolloutPhase.SOAK
    trial.step(judged={"a": Judgement(100, 3)})
    assert trial.last.soaking["a"].stopped
    assert "the old build served too few" in trial.last.soaking["a"].reason
    trial.step(judged={"a": Judgement(100, 500, (GOOD,))})
    assert trial.going() == ["b"]


def test_promote_ends_the_soak() -> None:
    trial = Trial(node("a"), node("b"))
    trial.until_soak()
    trial.rollout = structs.replace(trial.rollout, promoted_by="ann")
    trial.step()
    assert trial.going() == ["b"]
    assert trial.rollout.classes[0].passed == "promoted by ann"


def test_pause_holds_everything_and_no_time_passes_but_a_bad_build_is_still_reverted() -> None:
    trial = Trial(node("a"), node("b"))
    trial.until_soak()
    trial.rollout = structs.replace(trial.rollout, paused_by="ann")
    trial.soak(600)
    assert (trial.rollout.phase, trial.rollout.classes[0].soaked_s) == (RolloutPhase.SOAK, 0.0)
    assert trial.last.soaking["a"].stopped
    assert trial.last.held["b"].stopped
    assert "paused by ann" in trial.last.soaking["a"].reason
    assert trial.step(judged={"a": Judgement(150, 150, (BAD,))}).reverts


def test_abort_reverts_in_every_phase() -> None:
    for phase_after in range(4):
        trial = Trial(node("a"), node("b"))
        for number in range(phase_after):
            if number == 1:
                trial.set("a", state="switching")
            elif number == 2:
                trial.set("a", state="switched")
            trial.step()
        trial.rollout = structs.replace(trial.rollout, aborted_by="ann")
        assert trial.step().rollout.verdict == "aborted by ann"


def test_processes_that_keep_dying_revert() -> None:
    trial = Trial(node("a", restarts=0), node("b"))
    trial.until_soak()
    trial.set("a", restarts=1)
    assert not trial.step().reverts, "once can be bad luck"
    trial.set("a", restarts=2)
    assert trial.step().rollout.verdict == "a process of the new build ended by itself 2 times on name of a"


def test_a_build_whose_process_died_once_does_not_pass() -> None:
    trial = Trial(node("a"), node("b"))
    trial.until_soak()
    trial.set("a", restarts=1)
    trial.step()
    trial.set("a", restarts=0)  # its process was replaced by a fresh one
    assert trial.soak(70).reverts
    assert "ended by itself once" in trial.rollout.verdict


def test_restarts_from_before_the_soak_do_not_count() -> None:
    trial = Trial(node("a", restarts=7), node("b"))
    trial.until_soak()
    assert not trial.soak(70).reverts


@pytest.mark.parametrize("how", ["offline", "deleted"])
def test_a_canary_that_leaves_during_its_soak_is_replaced_once(how: str) -> None:
    trial = Trial(node("a"), node("b"), node("c"))
    trial.until_soak()
    trial.soak(50)
    if how == "deleted":
        del trial.nodes["a"]
    else:
        trial.set("a", present=False)
    trial.step()
    assert trial.going() == ["b"], "another node of the class goes first now"
    trial.set("b", state="switched", processes=("p2",))
    trial.step()
    assert (trial.rollout.classes[0].canary, trial.rollout.classes[0].soaked_s) == ("b", 0.0)
    trial.soak(20)
    trial.set("b", present=False)
    assert trial.step().rollout.verdict == "2 canaries of cpu left during their soak"


def test_a_canary_that_is_drained_while_it_switches_is_one_that_left() -> None:
    trial = Trial(node("a"), node("b"))
    trial.step()
    assert trial.going() == ["a"]
    trial.set("a", state="switching")
    trial.step()
    trial.set("a", state="switched", present=False)
    trial.step()
    assert trial.going() == ["b"]
    assert trial.rollout.classes[0].lost == ("a",), "it has the build"


def test_the_only_node_of_a_class_is_waited_for() -> None:
    trial = Trial(node("a"))
    trial.until_soak()
    trial.soak(30)
    trial.set("a", present=False)
    trial.soak(600)
    assert (trial.rollout.phase, trial.rollout.classes[0].soaked_s) == (RolloutPhase.SOAK, 30.0)
    assert trial.last.soaking["a"].stopped
    trial.set("a", present=True)
    assert trial.soak(34).rollout.phase is RolloutPhase.DONE


def test_a_node_that_is_unhealthy_for_a_moment_keeps_its_place() -> None:
    trial = Trial(node("a"), node("b"))
    trial.until_soak()
    trial.set("a", steady=False)
    trial.soak(600)
    assert trial.rollout.classes[0].canary == "a"
    assert trial.rollout.classes[0].soaked_s == 0.0


def test_a_failed_switch_stops_the_rest_and_the_second_one_reverts() -> None:
    trial = Trial(*(node(name) for name in "abcd"), settings=NO_SOAK)
    trial.step()
    trial.set("a", state="switched")
    trial.set("b", switch_failures=1, reason="exit 1")
    trial.step()
    assert trial.going() == ["b"], "only the node itself may try again"
    assert trial.last.held["c"] == trial.last.held["d"]
    assert trial.last.held["c"].reason == "stopped: name of b failed to switch: exit 1"
    trial.set("b", switch_failures=2)
    assert trial.step().rollout.verdict == "name of b failed to switch 2 times: exit 1"


def test_a_switch_that_no_retry_can_cure_reverts_at_once() -> None:
    trial = Trial(node("a", "switched"), node("b", switch_failures=1, fatal=True, reason="no such flag"))
    trial.rollout = rollout(NO_SOAK)
    assert trial.step().rollout.verdict == "name of b failed to switch once, and a retry cannot help: no such flag"


def test_without_a_soak_and_with_nothing_switched_there_is_nothing_to_revert() -> None:
    """The first node of the first class is tried again for ever, as before; with a soak the upgrade ends."""
    broken = node("a", "fetching", switch_failures=9, reason="exit 1")
    for settings, reverts in ((NO_SOAK, False), (SOAK, True)):
        trial = Trial(broken, node("b"), settings=settings)
        assert trial.step().reverts is reverts
        assert trial.going() == []


def test_a_node_that_serves_requests_is_worth_waiting_for() -> None:
    trial = Trial(node("a", serves=False), node("b", "fetching"))
    trial.step()
    assert trial.going() == []
    trial.set("b", state="ready")
    trial.step()
    assert trial.going() == ["b"]
    alone = Trial(node("a", serves=False), node("b", "fetching", present=False))
    alone.step()
    assert alone.going() == ["a"], "nobody waits for a node that is away"


def test_a_class_of_which_no_node_is_there_does_not_hold_the_others() -> None:
    trial = Trial(node("a"), node("b", "fetching", "gpu", present=False), settings=NO_SOAK)
    trial.step()
    trial.set("a", state="switched")
    assert trial.step().rollout.phase is RolloutPhase.WAVES
    trial.set("b", state="ready", present=True)
    trial.step()
    assert (trial.going(), trial.rollout.phase) == (["b"], RolloutPhase.CANARY)


def test_nodes_that_had_the_build_already_are_the_first_canaries() -> None:
    trial = Trial(node("a"), node("b", "switched", processes=("p1",)))
    trial.step()
    assert (trial.going(), trial.rollout.classes[0].canary) == ([], "b")
    assert trial.rollout.phase is RolloutPhase.SOAK


def test_curves_grow_though_only_the_last_requests_are_read() -> None:
    trial = Trial(node("a"), node("b"))
    trial.until_soak()
    trial.step(judged={"a": Judgement(new_windows=(RolloutWindow(10, 5, 0), RolloutWindow(20, 9, 1)))})
    trial.step(judged={"a": Judgement(new_windows=(RolloutWindow(20, 4, 0), RolloutWindow(30, 9, 2)))})
    windows = trial.rollout.classes[0].new_windows
    assert [(each.at, each.requests, each.errors) for each in windows] == [(10, 5, 0), (20, 9, 1), (30, 9, 2)]


STATES = st.sampled_from(["fetching", "ready", "switching", "switched"])
NODES = st.dictionaries(
    st.sampled_from("abcdefgh"), st.tuples(STATES, st.sampled_from(["cpu", "gpu"]), st.booleans()), min_size=1
)


@given(NODES, st.sampled_from([NO_SOAK, SOAK]), st.sampled_from(["25%", "1", "3", "100%"]))
def test_never_more_at_once_than_said_and_at_most_one_canary_per_class(
    given_nodes: dict[str, tuple[str, str, bool]], settings: RolloutSettings, parallel: str
) -> None:
    nodes = [node(name, state, hardware, present=present) for name, (state, hardware, present) in given_nodes.items()]
    step = plan_rollout(rollout(settings), nodes, {}, NOON, max_parallel=parallel)
    again = plan_rollout(step.rollout, nodes, {}, NOON, max_parallel=parallel)
    assert again.held == step.held, "the same world, the same decision"
    ready = [each for each in nodes if each.state is NodeState.READY]
    going = [each for each in ready if each.id not in step.held]
    busy = sum(each.state is NodeState.SWITCHING for each in nodes)
    assert not going or busy + len(going) <= max(busy + 0, allowed_at_once(parallel, len(nodes)))
    passed = {each.name for each in step.rollout.classes if each.passed}
    for hardware in {each.hardware for each in going} - passed:
        assert sum(each.hardware == hardware for each in going) == 1
        begun = (NodeState.SWITCHED, NodeState.SWITCHING)
        assert not any(each.hardware == hardware and each.state in begun and each.present for each in nodes)


@given(st.lists(st.tuples(st.sampled_from("abc"), STATES, st.booleans(), st.integers(0, 2)), max_size=30))
def test_a_soak_never_passes_early_whatever_happens(events: list[tuple[str, str, bool, int]]) -> None:
    """Nodes come, go, switch and die in any order: a class passes only after a whole soak of one canary."""
    trial = Trial(*(node(name) for name in "abc"))
    for name, state, present, restarts in events:
        trial.set(name, state=state, present=present, restarts=restarts, processes=(f"p{name}",))
        before = trial.rollout.classes
        trial.step(4)
        if trial.rollout.is_over:
            break
        for each in trial.rollout.classes:
            old = next((known for known in before if known.name == each.name), each)
            assert not each.passed or old.passed or old.soaked_s >= 56
