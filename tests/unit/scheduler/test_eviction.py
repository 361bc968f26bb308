"""Which replicas give way to another, and what keeps the others."""

from __future__ import annotations

from typing import Any

import pytest

from corral.controller.scheduler.eviction import Decision, EvictFirst, Purpose, WaitForCapacity, choose_placement
from corral.controller.scheduler.placement import NoCapacity, Placed
from corral.controller.scheduler.world import GIB, Build, BuildState, Model, Node, Replica, ReplicaState
from tests.support.scheduling import ago, cpu_node, gpu, gpu_node, model, on, replica, with_schedule, world

NODE = gpu_node(gpus=[gpu(0, 8, free_gib=2)])
NEW = model("new", 6)
OLD = model("old", 6)


def there(of: Model | str = OLD, gib: float = 6, node: Node = NODE, **more: Any) -> Replica:
    return replica(node, of, gib, devices=on(0), **more)


def decide(
    *replicas: Replica, models: tuple[Model, ...] = (OLD,), nodes: tuple[Node, ...] = (NODE,), **more: Any
) -> Decision:
    return choose_placement(world(nodes, [NEW, *models], replicas), NEW, **more)


def victims(found: Decision) -> list[str]:
    assert isinstance(found, EvictFirst), found
    return [f"{victim.model}@{victim.node_id.removeprefix('id-')}" for victim in found.victims]


# Issue 4: two models that fit only one at a time.
def test_the_idle_one_gives_way() -> None:
    found = decide(there())
    assert isinstance(found, EvictFirst)
    assert victims(found) == ["old@gpu"]
    assert found.text == "gpu: evicts old first"
    assert (found.placed.node, found.placed.fit.memory_bytes) == ("gpu", 6 * GIB)


def test_nobody_goes_while_there_is_room() -> None:
    other = gpu_node("other")
    assert isinstance(decide(there(), nodes=(NODE, other)), Placed)


def test_what_is_ending_already_is_waited_for() -> None:
    found = decide(there(state=ReplicaState.STOPPING))
    assert isinstance(found, WaitForCapacity)
    assert found.text == "gpu: waits for old to stop"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"in_flight": 2}, "gpu: waits, because old is busy with 2 requests"),
        ({"activity_known": False}, "gpu: waits, because old may be busy: its node has not reported its requests yet"),
        ({"last_used_at": ago(1)}, "gpu: waits, because old was used a moment ago"),
        ({"ready_at": ago(9)}, "gpu: waits, because old was loaded a moment ago"),
    ],
)
def test_what_only_takes_time_is_waited_for(more: dict[str, Any], text: str) -> None:
    found = decide(there(**more))
    assert isinstance(found, WaitForCapacity)
    assert found.text == text


def test_one_that_starts_is_waited_for() -> None:
    node = gpu_node(gpus=[gpu(0, 8)])
    found = decide(there(node=node, state=ReplicaState.STARTING, ready_at=None), nodes=(node,))
    assert isinstance(found, WaitForCapacity)
    assert found.text == "gpu: waits, because old is starting"


def test_those_who_waited_for_it_get_their_answers_first() -> None:
    found = decide(there(), models=(model("old", 6, waiting=3),))
    assert isinstance(found, WaitForCapacity)
    assert found.text == "gpu: waits, because old has 3 requests waiting for it"


@pytest.mark.parametrize(
    ("old", "kept"),
    [
        (model("old", 6, pinned=True), "old is pinned"),
        (with_schedule(OLD, spread_all=True), "old runs on every node by its schedule"),
        (with_schedule(OLD, min_replicas=1), "old has 1 replicas and needs 1"),
    ],
)
def test_what_people_said_keeps_it(old: Model, kept: str) -> None:
    found = decide(there(old), models=(old,))
    assert isinstance(found, NoCapacity)
    assert found.kept == (kept,)
    assert found.fits_later


def test_what_is_above_the_minimum_may_go() -> None:
    old, other = with_schedule(OLD, min_replicas=1), gpu_node("other", gpus=[gpu(0, 6.5)], max_replicas_per_model=1)
    second = there(old, 6, node=other)
    assert victims(decide(there(old), second, models=(old,), nodes=(NODE, other))) == ["old@gpu"]


def test_a_second_one_on_a_node_that_is_not_well_does_not_count() -> None:
    old, other = with_schedule(OLD, min_replicas=1), gpu_node("other", status="unhealthy")
    found = decide(there(old), there(old, node=other), models=(old,), nodes=(NODE, other))
    assert isinstance(found, NoCapacity)


def test_growth_takes_no_other_model_to_zero() -> None:
    assert isinstance(decide(there(), purpose=Purpose.GROWTH), NoCapacity)
    other = gpu_node("other", gpus=[gpu(0, 6.5, free_gib=0)])
    found = decide(there(), there(node=other), nodes=(NODE, other), purpose=Purpose.GROWTH)
    assert len(victims(found)) == 1


def test_a_model_nobody_knows_any_more_goes() -> None:
    assert victims(decide(there("forgotten"), models=())) == ["forgotten@gpu"]


def test_its_own_replicas_do_not_go_for_it() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=2)], max_replicas_per_model=2)
    found = decide(there(NEW, node=node), nodes=(node,))
    assert isinstance(found, NoCapacity)
    assert found.kept == ("new is the model itself",)


def test_the_least_recently_used_goes() -> None:
    node = gpu_node(gpus=[gpu(0, 12, free_gib=0)])
    a, b = (
        there("a", 6, node, last_used_at=ago(100)),
        there("b", 6, node, last_used_at=ago(200)),
    )
    assert victims(decide(a, b, models=(model("a"), model("b")), nodes=(node,))) == ["b@gpu"]


def test_rather_one_of_several_than_the_last() -> None:
    node, other = gpu_node(gpus=[gpu(0, 12, free_gib=0)]), cpu_node("other", ram_gib=6)
    a, b = there("a", 6, node, last_used_at=ago(100)), there("b", 6, node, last_used_at=ago(200))
    elsewhere = replica(other, "a", 4)
    models = (model("a"), model("b"))
    assert victims(decide(a, b, elsewhere, models=models, nodes=(node, other))) == ["a@gpu"]


def test_no_more_go_than_it_takes() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=0)])
    small, large = there("small", 1, node, last_used_at=ago(500)), there("large", 7, node, last_used_at=ago(50))
    models = (model("small"), model("large"))
    assert victims(decide(small, large, models=models, nodes=(node,))) == ["large@gpu"]


def test_several_go_together_when_it_takes_them() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=0)])
    each = [there(name, 2, node) for name in "abcd"]
    found = decide(*each, models=tuple(map(model, "abcd")), nodes=(node,))
    assert victims(found) == ["a@gpu", "b@gpu", "c@gpu"]
    assert isinstance(found, EvictFirst)
    assert found.text == "gpu: evicts a, b, c first"


def test_the_node_whose_victims_were_unused_longest() -> None:
    other = gpu_node("other", gpus=[gpu(0, 8, free_gib=2)])
    a, b = there("a", last_used_at=ago(100)), there("b", 6, other, last_used_at=ago(900))
    assert victims(decide(a, b, models=(model("a"), model("b")), nodes=(NODE, other))) == ["b@other"]


def test_nobody_goes_where_it_would_not_help() -> None:
    """What others than we use stays used."""
    node = gpu_node(gpus=[gpu(0, 8, free_gib=1)])
    assert isinstance(decide(there(gib=2, node=node), nodes=(node,)), NoCapacity)
    no_build = gpu_node(gpus=[gpu(0, 8, free_gib=2)], builds={})
    found = decide(there(node=no_build), nodes=(no_build,))
    assert isinstance(found, NoCapacity)
    assert found.kept == ()


def test_a_build_that_is_being_looked_up_is_waited_for_and_called_so() -> None:
    looking = {"llama-cpp": Build(BuildState.LOOKING_UP)}
    found = decide(nodes=(cpu_node("vm", builds=looking), cpu_node("away", status="offline", builds=looking)))
    assert isinstance(found, WaitForCapacity)
    assert found.text == "looking up a build of llama-cpp for vm …"
    assert [verdict.why_not for verdict in found.verdicts] == [
        "is offline; looking up a build of llama-cpp for this node",
        "looking up a build of llama-cpp for this node",
    ]
    small = decide(nodes=(cpu_node("vm", ram_gib=1, builds=looking),))
    assert isinstance(small, NoCapacity), "whatever is found there, it would not fit"


def test_what_is_ending_counts_with_what_has_to() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=0)])
    stopping, idle = there("a", 3, node, state=ReplicaState.STOPPING), there("b", 3, node)
    pinned = there("c", 2, node)
    models = (model("a"), model("b"), model("c", pinned=True))
    assert victims(decide(stopping, idle, pinned, models=models, nodes=(node,))) == ["b@gpu"]


def test_room_on_several_devices() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=2), gpu(1, 8, free_gib=2)])
    a, b = replica(node, "a", 6, devices=on(0)), replica(node, "b", 6, devices=on(1))
    wide = model("new", 12, tensor_parallel=2)
    found = choose_placement(world([node], [wide, model("a"), model("b")], [a, b]), wide)
    assert victims(found) == ["a@gpu", "b@gpu"]
