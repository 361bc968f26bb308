"""Concurrency groups: two models that share one are never on the same node together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from corral.controller.scheduler.eviction import EvictFirst, Purpose, WaitForCapacity, choose_placement
from corral.controller.scheduler.placement import NoCapacity, Placed
from corral.controller.scheduler.scaling import Hold, ScaleDown, ScaleUp, plan_scaling
from corral.controller.scheduler.world import Policy, Replica, ReplicaState, World
from tests.support.scheduling import ago, cpu_node, model, replica, with_schedule, world

A, B = cpu_node("a", ram_gib=64), cpu_node("b", ram_gib=32)
NEW = model("new", 1, concurrency_groups=("big",))
OLD = model("old", 1, concurrency_groups=("small", "big"))


def fleet(
    *replicas: Replica, nodes: tuple[Any, ...] = (A,), models: tuple[Any, ...] = (NEW, OLD), **more: Any
) -> World:
    return world(nodes, models, replicas, **more)


def test_another_node_is_chosen_while_there_is_one() -> None:
    found = choose_placement(fleet(replica(A, OLD), nodes=(A, B)), NEW)
    assert isinstance(found, Placed)
    assert found.node == "b"


def test_an_idle_rival_is_evicted() -> None:
    found = choose_placement(fleet(replica(A, OLD)), NEW)
    assert isinstance(found, EvictFirst), found
    assert [victim.model for victim in found.victims] == ["old"]
    assert found.placed.node == "a"


def test_only_the_rival_is_evicted() -> None:
    other = model("other", 1, concurrency_groups=("small",))
    there = (replica(A, other, ready_at=ago(9000)), replica(A, OLD), replica(A, "unknown"))
    found = choose_placement(fleet(*there, models=(NEW, OLD, other)), NEW)
    assert isinstance(found, EvictFirst), found
    assert [victim.model for victim in found.victims] == ["old"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"in_flight": 1}, "a: waits, because old is busy with 1 request"),
        ({"state": ReplicaState.STARTING, "ready_at": None}, "a: waits, because old is starting"),
        ({"last_used_at": ago(1)}, "a: waits, because old was used a moment ago"),
        ({"state": ReplicaState.STOPPING}, "a: waits for old to stop"),
    ],
)
def test_a_rival_in_use_is_waited_for(more: dict[str, Any], text: str) -> None:
    found = choose_placement(fleet(replica(A, OLD, **more)), NEW)
    assert isinstance(found, WaitForCapacity), found
    assert found.text == text


@pytest.mark.parametrize(
    ("rival", "why"),
    [
        (replace(OLD, pinned=True), "old is pinned"),
        (with_schedule(OLD, min_replicas=1), "old has 1 replicas and needs 1"),
        (with_schedule(OLD, spread_all=True), "old runs on every node by its schedule"),
    ],
)
def test_a_rival_that_is_required_stays_and_the_refusal_names_it(rival: Any, why: str) -> None:
    found = choose_placement(fleet(replica(A, rival), models=(NEW, rival)), NEW)
    assert isinstance(found, NoCapacity), found
    assert found.fits_later
    assert "runs old of the same concurrency group 'big'" in found.text
    assert found.kept == (why,)


def test_growth_makes_no_rival_cold() -> None:
    assert isinstance(choose_placement(fleet(replica(A, OLD)), NEW, Purpose.GROWTH), NoCapacity)


def test_replicas_of_one_model_are_no_rivals() -> None:
    node = replace(A, max_replicas_per_model=2)
    found = choose_placement(fleet(replica(node, NEW), nodes=(node,)), NEW)
    assert isinstance(found, Placed)


def test_as_a_preference_a_rival_is_joined_when_there_is_no_other_node() -> None:
    found = choose_placement(fleet(replica(A, OLD), policy=Policy(exclusive_groups=False)), NEW)
    assert isinstance(found, Placed)
    assert "avoids nodes that run old" in found.text


# A group added to the definition of a model that runs already.


def together(**of_new: Any) -> tuple[Replica, Replica]:
    return replica(A, OLD, ready_at=ago(9000)), replica(A, NEW, **of_new)


def test_of_two_that_meet_one_leaves() -> None:
    there = fleet(*together())
    leaves = plan_scaling(there, NEW)
    assert isinstance(leaves, ScaleDown)
    assert leaves.text == "old of the same concurrency group 'big' has precedence on a"
    assert isinstance(plan_scaling(there, OLD), Hold)


def test_the_one_in_use_stays() -> None:
    there = fleet(*together(in_flight=1))
    assert isinstance(plan_scaling(there, OLD), ScaleDown)
    assert isinstance(plan_scaling(there, NEW), Hold)


def test_the_pinned_one_stays() -> None:
    pinned = replace(NEW, pinned=True)
    there = fleet(*together(), models=(pinned, OLD))
    assert isinstance(plan_scaling(there, OLD), ScaleDown)
    assert isinstance(plan_scaling(there, pinned), Hold)


def test_one_that_was_used_lately_moves_before_it_leaves() -> None:
    there = fleet(*together(last_used_at=ago(60)), nodes=(A, B))
    step = plan_scaling(there, NEW)
    assert isinstance(step, ScaleUp)
    assert isinstance(step.decision, Placed)
    assert step.decision.node == "b"


@pytest.mark.parametrize("waiting", [0, 1])
def test_one_that_has_never_served_leaves_before_another_begins(waiting: int) -> None:
    """It went on starting beside its rival until its successor answered: two loads at once (seeds 0 and 450)."""
    asked = replace(NEW, waiting=waiting)
    there = fleet(*together(state=ReplicaState.STARTING, ready_at=None), nodes=(A, B), models=(asked, OLD))
    step = plan_scaling(there, asked)
    assert isinstance(step, ScaleDown)
    assert step.replica.node_id == A.id
    assert isinstance(plan_scaling(there, OLD), Hold)


# Two that were edited to share a group, and still answer as before: seed 2330 of the simulation.


def edited(requests: int = 0, *coming: Replica) -> World:
    """Both loads are under way and look for a place; `requests` wait besides, for each."""
    waits: dict[str, Any] = {"revision": "r2", "waiting": max(1, requests), "only_load_waits": not requests}
    both = (replace(NEW, **waits), replace(OLD, **waits))
    return fleet(*together(), *coming, nodes=(A, B) if coming else (A,), models=both)


@pytest.mark.parametrize(("name", "rival"), [("new", "old"), ("old", "new")])
def test_a_load_without_a_place_does_not_keep_what_it_shall_replace(name: str, rival: str) -> None:
    """Each waited for the other, whose load counted as a request that waited for what still ran."""
    there = edited()
    found = choose_placement(there, there.models[name])
    assert isinstance(found, EvictFirst), found
    assert [(victim.model, victim.revision) for victim in found.victims] == [(rival, "r1")]
    step = plan_scaling(there, there.models[name])
    assert isinstance(step, ScaleUp)
    assert isinstance(step.decision, EvictFirst)


def test_requests_that_wait_keep_also_one_of_an_earlier_revision() -> None:
    there = edited(2)
    found = choose_placement(there, there.models["new"])
    assert isinstance(found, WaitForCapacity), found
    assert found.text == "a: waits, because old has 2 requests waiting for it"


def test_one_of_an_earlier_revision_stays_while_its_successor_starts() -> None:
    there = edited(0, replica(B, OLD, revision="r2", state=ReplicaState.STARTING, ready_at=None))
    found = choose_placement(there, there.models["new"], only={A.id})
    assert isinstance(found, WaitForCapacity), found
    assert found.text == "a: waits, because old has 1 request waiting for it"


def test_the_load_of_its_own_revision_keeps_one_that_has_come_up() -> None:
    asked = replace(OLD, waiting=1, only_load_waits=True)
    found = choose_placement(fleet(replica(A, OLD), models=(NEW, asked)), NEW)
    assert isinstance(found, WaitForCapacity), found
