"""How many replicas there should be, one step per look."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from corral.contract.labels import selector_of_map
from corral.controller.scheduler.eviction import EvictFirst, Purpose, WaitForCapacity
from corral.controller.scheduler.placement import Placed
from corral.controller.scheduler.scaling import (
    Hold,
    NotTaken,
    ScaleDown,
    ScaleStep,
    ScaleUp,
    Unsatisfied,
    plan_scaling,
)
from corral.controller.scheduler.world import Build, BuildState, Model, Node, Policy, Replica, ReplicaState
from tests.support.scheduling import NOON, ago, cpu_node, gpu, gpu_node, model, on, replica, with_schedule, world

A, B, C = cpu_node("a"), cpu_node("b"), cpu_node("c")
PLAIN = model("m", 1)


def step(of: Model, *replicas: Replica, nodes: tuple[Node, ...] = (A, B, C), **more: Any) -> ScaleStep:
    return plan_scaling(world(nodes, [of, *more.pop("others", ())], replicas, **more), of)


def up(found: ScaleStep) -> str:
    """Which node gets one."""
    assert isinstance(found, ScaleUp), found
    assert isinstance(found.decision, Placed), found.decision
    return found.decision.node


def down(found: ScaleStep) -> tuple[str, int]:
    assert isinstance(found, ScaleDown), found
    return found.replica.node_id.removeprefix("id-"), found.replica.index


def held(found: ScaleStep) -> str:
    assert isinstance(found, Hold), found
    return found.text


def at(node: Node, of: Model = PLAIN, **more: Any) -> Replica:
    return replica(node, of, 1, **more)


# --- the least


def test_a_model_nobody_scheduled_waits_to_be_asked_for() -> None:
    assert held(step(PLAIN)) == "0 ready, 0 starting, 0 to any number wanted"


def test_one_more_while_there_are_too_few() -> None:
    of = with_schedule(PLAIN, min_replicas=2)
    assert up(step(of)) == "a"
    assert up(step(of, at(A))) == "b"
    assert held(step(of, at(A), at(B)))


def test_one_that_starts_counts() -> None:
    of = with_schedule(PLAIN, min_replicas=1)
    assert held(step(of, at(A, state=ReplicaState.STARTING))) == "0 ready, 1 starting, 1 to any number wanted"


@pytest.mark.parametrize("status", ["unhealthy", "offline"])
def test_one_on_a_node_that_is_gone_does_not_count(status: str) -> None:
    of = with_schedule(PLAIN, min_replicas=1)
    assert up(step(of, at(A), nodes=(replace(A, status=status), B))) == "b"
    assert up(step(of, at(A), nodes=(B,))) == "b"


def test_one_on_a_node_without_bus_still_counts() -> None:
    of = with_schedule(PLAIN, min_replicas=1)
    assert held(step(of, at(A), nodes=(replace(A, bus_down=True), B)))


def test_others_give_way_for_the_least() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=2)])
    of, other = with_schedule(model("m", 6), min_replicas=1), model("other", 6)
    found = step(of, replica(node, other, 6, devices=on(0)), nodes=(node,), others=(other,))
    assert isinstance(found, ScaleUp)
    assert isinstance(found.decision, EvictFirst)
    assert found.purpose is Purpose.MINIMUM
    busy = replica(node, other, 6, devices=on(0), in_flight=1)
    found = step(of, busy, nodes=(node,), others=(other,))
    assert isinstance(found, ScaleUp)
    assert isinstance(found.decision, WaitForCapacity)


def test_what_cannot_be_had_is_left_alone_after_three_looks() -> None:
    of = with_schedule(model("m", 100), min_replicas=1)
    first = step(of)
    assert isinstance(first, Unsatisfied)
    assert (first.ticks, first.until) == (1, NOON + timedelta(seconds=30))
    assert first.text.startswith("none of 3 nodes can run m (needs 100.0 GiB: told): 3 for memory")
    second = step(with_schedule(of, unsatisfiable_ticks=1, unsatisfiable_until=NOON))
    assert isinstance(second, Unsatisfied)
    assert (second.ticks, second.until) == (2, NOON + timedelta(seconds=30))
    third = step(with_schedule(of, unsatisfiable_ticks=2))
    assert isinstance(third, Unsatisfied)
    assert (third.ticks, third.until) == (0, NOON + timedelta(minutes=5))


def test_looks_that_follow_each_other_at_once_count_as_one() -> None:
    """Passes are as frequent as events; what is free is reported once per heartbeat."""
    soon = NOON + timedelta(seconds=1)
    of = with_schedule(model("m", 100), min_replicas=1, unsatisfiable_ticks=2, unsatisfiable_until=soon)
    again = step(of)
    assert isinstance(again, Unsatisfied)
    assert (again.ticks, again.until) == (2, soon)
    fits = with_schedule(PLAIN, min_replicas=1, unsatisfiable_ticks=2, unsatisfiable_until=soon)
    assert up(step(fits)) == "a"  # it is looked for all the time


def test_a_cooldown_holds_until_its_end() -> None:
    of = with_schedule(PLAIN, min_replicas=1, unsatisfiable_until=NOON + timedelta(seconds=1))
    found = step(of)
    assert isinstance(found, Hold)
    assert not found.satisfied
    assert up(step(with_schedule(of, unsatisfiable_until=NOON))) == "a"


def test_a_selector_nobody_matches_cannot_be_satisfied() -> None:
    of = with_schedule(PLAIN, min_replicas=1, selector=selector_of_map({"tier": "fast"}))
    assert isinstance(step(of), Unsatisfied)


def test_no_free_slot_cannot_be_satisfied() -> None:
    assert isinstance(step(with_schedule(PLAIN, min_replicas=2), at(A), nodes=(A,)), Unsatisfied)


# --- one on every node


def test_one_on_every_node() -> None:
    of = with_schedule(PLAIN, spread_all=True)
    assert up(step(of, at(A))) == "b"
    assert up(step(of, at(A), at(B))) == "c"
    assert held(step(of, at(A), at(B), at(C))) == "3 ready, 0 starting, one on every node wanted"
    assert held(step(of, nodes=()))


def test_every_node_means_those_that_could_have_one() -> None:
    of = with_schedule(PLAIN, spread_all=True, selector=selector_of_map({"tier": "fast"}))
    fast = {"tier": "fast"}
    arm = cpu_node("arm", labels=fast, builds={"llama-cpp": Build(BuildState.MISSING, "no linux/arm64 build")})
    nodes = (replace(A, labels=fast), B, replace(C, labels=fast, status="offline"), arm)
    assert held(step(of, at(A), nodes=nodes))


def test_two_on_one_node_are_one_too_many() -> None:
    of = with_schedule(PLAIN, spread_all=True)
    roomy = replace(A, max_replicas_per_model=2)
    assert down(step(of, at(roomy), at(roomy, index=1), at(B), nodes=(roomy, B))) == ("a", 1)


# --- growth


GROWING = with_schedule(model("m", 1, busy_for_s=5.0), min_replicas=1, max_replicas=2)


def test_one_more_when_all_are_busy() -> None:
    found = step(GROWING, at(A, in_flight=1))
    assert up(found) == "b"
    assert isinstance(found, ScaleUp)
    assert (found.purpose, found.text) == (Purpose.GROWTH, "all its replicas are busy")


@pytest.mark.parametrize(
    ("changed", "grows"),
    [
        ({"busy_for_s": 4.9}, False),
        ({"busy_for_s": 0.0, "waiting": 1}, True),
        ({"busy_for_s": 0.0, "pressure": 1}, True),
        ({"schedule": PLAIN.schedule}, False),
    ],
)
def test_when_it_grows(changed: dict[str, Any], grows: bool) -> None:
    found = step(replace(GROWING, **changed), at(A, in_flight=1))
    assert isinstance(found, ScaleUp) is grows


@pytest.mark.parametrize(
    "replicas",
    [
        (at(A, in_flight=1), at(B, last_used_at=ago(10))),
        (at(A, in_flight=1), at(B, state=ReplicaState.STARTING)),
        (at(A, in_flight=3, slots=4),),
        (at(A, activity_known=False),),
    ],
    ids=["one is free", "one is starting", "a slot is free", "nobody has listened yet"],
)
def test_not_while_there_is_room_in_what_there_is(replicas: tuple[Replica, ...]) -> None:
    assert isinstance(step(with_schedule(replace(GROWING, waiting=1), max_replicas=5), *replicas), Hold)


@pytest.mark.parametrize(("waiting", "grows"), [(0, False), (1, False), (2, True), (4, True)])
def test_more_than_all_slots_wait_though_one_was_told_to_be_free(waiting: int, grows: bool) -> None:
    """The moment between two requests is when a node tells of them."""
    of = replace(GROWING, busy_for_s=0.0, waiting=waiting)
    assert isinstance(step(of, at(A, in_flight=1, slots=2)), ScaleUp) is grows


def test_not_above_the_most() -> None:
    busy = at(A, in_flight=1), at(B, in_flight=1)
    assert held(step(GROWING, *busy))
    assert up(step(with_schedule(GROWING, max_replicas=0), *busy)) == "c"


def test_growth_that_finds_no_room_is_told_and_no_fault() -> None:
    found = step(GROWING, at(A, in_flight=1), nodes=(A,))
    assert isinstance(found, Hold)
    assert found.satisfied
    assert "all its replicas are busy, but no node can run m" in found.text


# --- fewer


def test_what_nobody_has_listened_to_may_be_in_use() -> None:
    of = with_schedule(model("m", 1), max_replicas=1)
    assert held(step(of, at(A, activity_known=False), at(B, activity_known=False)))
    assert down(step(of, at(A), at(B, activity_known=False))) == ("a", 0)


def test_unused_ones_go_one_by_one_the_highest_number_first() -> None:
    roomy = replace(A, max_replicas_per_model=3)
    of = with_schedule(PLAIN, min_replicas=1)
    three = [at(roomy, index=index) for index in range(3)]
    assert down(step(of, *three, nodes=(roomy,))) == ("a", 2)
    assert down(step(of, *three[:2], nodes=(roomy,))) == ("a", 1)
    assert held(step(of, *three[:1], nodes=(roomy,)))


def test_the_longest_unused_of_those_with_one_number() -> None:
    of = with_schedule(PLAIN, min_replicas=1)
    assert down(step(of, at(A, last_used_at=ago(400)), at(B, last_used_at=ago(500)))) == ("b", 0)


@pytest.mark.parametrize(
    "more", [{"in_flight": 1}, {"last_used_at": ago(299)}, {"ready_at": ago(10)}], ids=["busy", "used", "new"]
)
def test_used_ones_stay(more: dict[str, Any]) -> None:
    of = with_schedule(PLAIN, min_replicas=1)
    assert held(step(of, at(A, **more), at(B, **more)))


def test_above_the_most_they_need_not_be_unused_for_long() -> None:
    of = with_schedule(PLAIN, max_replicas=1)
    assert down(step(of, at(A, last_used_at=ago(1)), at(B, last_used_at=ago(1)))) == ("a", 0)
    assert held(step(of, at(A, in_flight=1), at(B, in_flight=1)))


def test_the_only_one_that_answers_stays_while_another_starts() -> None:
    of = with_schedule(PLAIN, max_replicas=1)
    assert held(step(of, at(A), at(B, state=ReplicaState.STARTING)))


def test_above_the_most_those_that_answer_stay_while_others_start() -> None:
    of = with_schedule(PLAIN, min_replicas=2, max_replicas=2)
    assert held(step(of, at(A), at(B), at(C, state=ReplicaState.STARTING)))


def test_to_zero_only_when_allowed() -> None:
    of = replace(PLAIN, idle_unload_s=900.0)
    assert down(step(of, at(A))) == ("a", 0)
    for stays in (
        PLAIN,
        replace(of, pinned=True),
        replace(of, waiting=1),
        replace(of, idle_unload_s=7200.0),
        with_schedule(of, min_replicas=1),
    ):
        assert held(step(stays, at(A)))
    assert held(step(of, at(A, in_flight=1)))


def test_an_order_that_would_not_arrive_is_not_given() -> None:
    of = with_schedule(PLAIN, min_replicas=1)
    nodes = (replace(A, bus_down=True), B)
    assert down(step(of, at(A, last_used_at=ago(9000)), at(B, last_used_at=ago(400)), nodes=nodes)) == ("b", 0)


def test_a_disabled_model_has_none() -> None:
    of = replace(with_schedule(PLAIN, min_replicas=2), disabled=True)
    assert down(step(of, at(A, in_flight=1), at(B))) == ("b", 0)
    assert held(step(of)) == "is disabled"


# --- those that leave


DRAINED = replace(A, status="draining")


def test_drain_moves_a_replica_first() -> None:
    of = with_schedule(PLAIN, min_replicas=1)
    nodes = (DRAINED, B)
    assert up(step(of, at(DRAINED), nodes=nodes)) == "b"
    assert held(step(of, at(DRAINED), at(B, state=ReplicaState.STARTING), nodes=nodes))
    found = step(of, at(DRAINED, in_flight=1), at(B), nodes=nodes)
    assert down(found) == ("a", 0)
    assert isinstance(found, ScaleDown)
    assert found.text == "a is draining"


def test_what_is_in_use_moves_also_without_a_schedule() -> None:
    nodes = (DRAINED, B)
    assert up(step(PLAIN, at(DRAINED, in_flight=1), nodes=nodes)) == "b"
    assert up(step(PLAIN, at(DRAINED, last_used_at=ago(10)), nodes=nodes)) == "b"
    assert down(step(PLAIN, at(DRAINED), nodes=nodes)) == ("a", 0)


def test_what_is_in_use_and_fits_nowhere_else_stays() -> None:
    found = step(PLAIN, at(DRAINED, in_flight=1), nodes=(DRAINED,))
    assert isinstance(found, Hold)
    assert not found.satisfied


def test_labels_that_no_longer_fit_move_it() -> None:
    of = with_schedule(PLAIN, min_replicas=1, selector=selector_of_map({"tier": "fast"}))
    fast = replace(B, labels={"tier": "fast"})
    assert up(step(of, at(A), nodes=(A, fast))) == "b"
    found = step(of, at(A), at(fast), nodes=(A, fast))
    assert isinstance(found, ScaleDown)
    assert found.text == "a no longer matches the selector"


def test_a_new_revision_answers_before_the_old_one_goes() -> None:
    of = replace(PLAIN, revision="r2")
    old = at(A, in_flight=1)
    assert up(step(of, old)) == "b"
    assert held(step(of, old, at(B, revision="r2", state=ReplicaState.STARTING)))
    assert down(step(of, old, at(B, revision="r2"))) == ("a", 0)


def test_without_room_for_both_the_old_revision_goes_first() -> None:
    node = cpu_node("a", ram_gib=8)
    of = replace(model("m", 5), revision="r2")
    old = replica(node, "m", 5, last_used_at=ago(5))
    found = step(of, old, nodes=(node,), policy=Policy(ram_share=0))
    assert down(found) == ("a", 0)
    assert isinstance(found, ScaleDown)
    assert found.text == "is of an earlier revision, and memory cannot hold both"


def test_what_leaves_and_is_out_of_reach_is_not_waited_for() -> None:
    of = replace(with_schedule(PLAIN, min_replicas=1), revision="r2")
    nodes = (replace(A, status="offline"), B)
    assert held(step(of, at(A), at(B, revision="r2"), nodes=nodes))


def test_of_those_on_every_node_each_leaves_for_itself() -> None:
    of = with_schedule(PLAIN, spread_all=True)
    too_small = cpu_node("c", ram_gib=0.1)
    found = step(
        with_schedule(of, unsatisfiable_until=NOON + timedelta(minutes=1)),
        at(DRAINED, in_flight=1),
        at(B),
        nodes=(DRAINED, B, too_small),
    )
    assert down(found) == ("a", 0)


# --- a node that has to end its only replica for a while


def switching(node: Node, why: str = "", of: Model = PLAIN) -> Node:
    return replace(node, switching={of.name: why})


def test_another_node_takes_the_model_before_its_only_node_switches() -> None:
    found = step(PLAIN, at(A), nodes=(switching(A), B))
    assert up(found) == "b"
    assert isinstance(found, ScaleUp)
    assert (found.purpose, found.text) == (Purpose.SWITCH, "a switches llama-cpp")


@pytest.mark.parametrize("other", [at(B), at(B, state=ReplicaState.STARTING)], ids=["it serves", "it starts"])
def test_one_is_enough(other: Replica) -> None:
    assert isinstance(step(PLAIN, at(A), other, nodes=(switching(A), B, C)), Hold)


def test_one_on_a_node_that_is_away_is_none() -> None:
    away = replace(B, status="offline")
    assert up(step(PLAIN, at(A), at(away), nodes=(switching(A), away, C))) == "c"


def test_nodes_that_wait_to_switch_do_not_take_it_from_each_other() -> None:
    assert up(step(PLAIN, at(A), at(B), nodes=(switching(A), switching(B), C))) == "c"


def not_taken(found: ScaleStep) -> str:
    assert isinstance(found, NotTaken), found
    return found.text


def test_where_no_node_can_take_it_that_is_said_once() -> None:
    large = model("m", 10)
    small = cpu_node("small", 4)
    nodes = (switching(A, of=large), small)
    assert not_taken(step(large, at(A, large), nodes=nodes)).startswith(
        "no node can run m (needs 10.0 GiB: told): small"
    )
    refused = (switching(A, "no node can take it", large), small)
    assert isinstance(step(large, at(A, large), nodes=refused), Hold)


def test_a_node_without_the_backend_is_not_given_a_build_that_nobody_tried() -> None:
    bare = cpu_node("bare", builds={"llama-cpp": Build(BuildState.INSTALLABLE)})
    assert not_taken(step(PLAIN, at(A), nodes=(switching(A), bare))) == "no other node has llama-cpp"


def test_a_replica_that_is_not_kept_is_not_replaced() -> None:
    assert not_taken(step(PLAIN, nodes=(switching(A), B))) == "its replicas there are not kept"


def test_no_other_model_goes_cold_for_it() -> None:
    other = model("other", 10)
    full = cpu_node("full", 16, free_gib=2)
    large = model("m", 10)
    nodes = (switching(A, of=large), full)
    found = step(large, at(A, large), replica(full, other, 10), nodes=nodes, others=(other,))
    assert not_taken(found).startswith("no node can run m (needs 10.0 GiB: told): full")
    spare = cpu_node("spare", 16)
    found = step(
        large,
        at(A, large),
        replica(full, other, 10),
        replica(spare, other, 1),
        nodes=(switching(A, of=large), full, replace(spare, available_ram=1)),
        others=(other,),
    )
    assert isinstance(found, ScaleUp), found
    assert isinstance(found.decision, EvictFirst)


def test_until_the_switch_is_over_none_is_one_too_many_and_none_is_added() -> None:
    of = with_schedule(PLAIN, min_replicas=1, max_replicas=1)
    assert down(step(of, at(A), at(B)))
    assert isinstance(step(of, at(A), at(B), nodes=(switching(A), B, C)), Hold)
    assert isinstance(step(of, at(A), at(B), nodes=(switching(A, "too small"), B, C)), Hold)
    busy = with_schedule(replace(PLAIN, waiting=3), min_replicas=1, max_replicas=5)
    full = [at(A, in_flight=1), at(B, in_flight=1)]
    assert up(step(busy, *full)) == "c"
    assert isinstance(step(busy, *full, nodes=(switching(A), B, C)), Hold)


def test_the_replica_of_a_canary_is_not_the_one_too_many() -> None:
    of = with_schedule(PLAIN, min_replicas=1, max_replicas=1)
    canary = replace(A, is_canary=True)
    used = at(B, last_used_at=ago(400))
    assert down(step(of, at(A), used, nodes=(A, B)))[0] == "a"
    assert down(step(of, at(canary), used, nodes=(canary, B)))[0] == "b"
    assert isinstance(step(of, at(canary), at(B, in_flight=1), nodes=(canary, B)), Hold)
    assert down(step(PLAIN, at(canary), at(B), nodes=(canary, B)))[0] == "b", "unused for long"
