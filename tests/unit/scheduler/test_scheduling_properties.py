"""Whatever the world looks like: nothing is handed out twice, nobody needed is ended, and carrying out steps comes to
rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.contract.budget import Amount
from corral.contract.hardware import Device
from corral.contract.labels import selector_of_map
from corral.controller.scheduler.eviction import EvictFirst, Purpose, WaitForCapacity, can_answer, choose_placement
from corral.controller.scheduler.explain import explain_model, explain_node
from corral.controller.scheduler.free_memory import as_replica_device, devices_of, free_memory_of
from corral.controller.scheduler.groups import shared_groups, why_must_leave
from corral.controller.scheduler.placement import NoCapacity, Placed, choose_node, evaluate_node
from corral.controller.scheduler.scaling import ScaleDown, ScaleUp, Unsatisfied, plan_scaling
from corral.controller.scheduler.world import (
    GIB,
    Build,
    BuildState,
    Memory,
    Model,
    ModelFile,
    Node,
    Policy,
    Replica,
    ReplicaState,
    Schedule,
    World,
    budget_of,
)
from tests.support.scheduling import NOON, ago

NAMES = ["a", "b", "c"]
SOME = settings(max_examples=150, deadline=None)


# Worlds are made from a seed: drawing each of their hundred numbers by itself would take most of the time, and what is
# left to shrink is small.


def some_gib(chance: Random, most: int) -> int:
    return chance.randint(0, most) * GIB


def a_device(chance: Random, index: int) -> Device:
    total = chance.choice([0, 8, 8, 8, 16]) * GIB
    return Device(
        index=index,
        vendor="nvidia",
        uuid=f"GPU-{index}",
        total_bytes=total,
        free_bytes=chance.choice([None, total, some_gib(chance, total // GIB)]),
        unified=chance.random() < 0.15,
    )


def a_node(chance: Random, name: str) -> Node:
    ram = chance.choice([0, 4, 16, 64])
    build = Build(
        chance.choice([BuildState.INSTALLED] * 8 + list(BuildState)), devices=chance.choice(["", "one", "many", "none"])
    )
    return Node(
        id=f"id-{name}",
        name=name,
        status=chance.choice(["healthy"] * 8 + ["unhealthy", "draining", "offline"]),
        labels={"tier": chance.choice(["fast", "slow"])},
        capability=chance.choice(["nvidia", "default"]),
        gpu_vendor="nvidia",
        devices=tuple(a_device(chance, index) for index in range(chance.randint(0, 4))),
        total_ram=ram * GIB,
        available_ram=some_gib(chance, ram),
        total_disk=chance.choice([0, 100 * GIB]),
        available_disk=some_gib(chance, 50),
        max_replicas_per_model=chance.randint(1, 3),
        budget=budget_of(chance.choice(["", "", "", "50%", "10GiB"])),
        bus_down=chance.random() < 0.1,
        builds={"engine": build},
    )


def a_model(chance: Random, name: str) -> Model:
    spread, least = chance.random() < 0.15, chance.randint(0, 2)
    selector = selector_of_map({"tier": "fast"} if chance.random() < 0.2 else {})
    most = chance.choice([0, least, least + 1])
    total = chance.choice([0, 1, 2, 4, 6, 6, 8, 12, 20]) * GIB
    return Model(
        name=name,
        backend="engine",
        revision="r1",
        memory=Memory(total, min(total, chance.choice([0, GIB])), chance.choice([0, GIB])),
        files=chance.choice([None, (ModelFile("sha256:x", 5 * GIB),)]),
        tensor_parallel=chance.choice([0, 0, 0, 1, 2, 3]),
        device_share=chance.choice([0.0, 0.0, 0.0, 0.9]),
        concurrency_groups=chance.choice([(), ("g",)]),
        pinned=chance.random() < 0.15,
        disabled=chance.random() < 0.1,
        schedule=Schedule(selector, spread_all=True) if spread else Schedule(selector, least, most),
        idle_unload_s=chance.choice([0.0, 60.0]),
        waiting=chance.choice([0, 0, 2]),
        busy_for_s=chance.choice([0.0, 60.0]),
    )


def a_replica(chance: Random, node: Node, index: int) -> Replica:
    state = chance.choice([ReplicaState.READY] * 4 + list(ReplicaState))
    starting = state is ReplicaState.STARTING
    own = devices_of(node)
    chosen = chance.sample(own, min(len(own), chance.choice([0, 1, 1, 2])))
    return Replica(
        node_id=node.id,
        model=chance.choice([*NAMES, *NAMES, "nobody's"]),
        index=index,
        state=state,
        revision=chance.choice(["r1", "r1", "r1", "r0"]),
        process_id=f"{node.name}-{index}",
        memory_bytes=some_gib(chance, 8),
        host_bytes=chance.choice([0, GIB]),
        devices=tuple(map(as_replica_device, chosen)),
        in_flight=chance.choice([0, 0, 0, 1, 3]),
        ready_at=None if starting else ago(chance.choice([1, 100, 9000])),
        last_used_at=None if starting else chance.choice([None, ago(1), ago(50)]),
    )


def as_measured(node: Node, replicas: Sequence[Replica]) -> Node:
    """As it is mostly: what is free is what nobody has."""
    shown = [replica for replica in replicas if replica.node_id == node.id and replica.ready_at is not None]
    taken: Counter[int] = Counter()
    for replica in shown:
        for device in replica.devices:
            taken[device.index] += replica.memory_bytes // len(replica.devices)
    devices = tuple(
        msgspec.structs.replace(device, free_bytes=max(0, device.total_bytes - taken[device.index]))
        for device in node.devices
    )
    ram = sum(replica.host_bytes + (0 if replica.devices else replica.memory_bytes) for replica in shown)
    return replace(node, devices=devices, available_ram=max(0, node.total_ram - ram))


def a_world(seed: int) -> World:
    chance = Random(seed)
    some = [a_node(chance, name) for name in ("n1", "n2", "n3")[: chance.randint(1, 3)]]
    there = tuple(a_replica(chance, node, index) for node in some for index in range(chance.randint(0, 4)))
    if chance.random() < 0.5:  # nothing but memory is in the way: most of what there is to decide is decided here
        some = [
            replace(
                node, status="healthy", bus_down=False, total_disk=0, builds={"engine": Build(BuildState.INSTALLED)}
            )
            for node in some
        ]
        there = tuple(replace(replica, in_flight=0, last_used_at=None) for replica in there)
    fleet = [as_measured(node, there) if chance.random() < 0.7 else node for node in some]
    return World(
        NOON,
        {node.id: node for node in fleet},
        {name: a_model(chance, name) for name in NAMES},
        there,
        Policy(disk_check=chance.random() < 0.5),
    )


def worlds() -> st.SearchStrategy[World]:
    return st.integers(0, 2**64).map(a_world)


def carried_out(world: World, placed: Placed, model: Model) -> World:
    new = Replica(
        placed.node_id,
        model.name,
        placed.index,
        ReplicaState.STARTING,
        model.revision,
        f"new-{len(world.replicas)}",
        placed.fit.memory_bytes,
        placed.fit.host_bytes,
        placed.fit.devices,
    )
    return replace(world, replicas=(*world.replicas, new))


def world_without(world: World, *ended: Replica) -> World:
    return replace(world, replicas=tuple(replica for replica in world.replicas if replica not in ended))


def free_bytes(world: World, node: Node) -> list[int | None]:
    free = free_memory_of(node, world.on_node.get(node.id, ()), world.policy)
    return [pool.free_bytes for pool in (*free.devices, free.ram)]


@SOME
@given(worlds())
def test_what_was_placed_fits_and_is_taken(world: World) -> None:
    for model in world.models.values():
        found = choose_node(world, model)
        if not isinstance(found, Placed):
            continue
        node = world.nodes[found.node_id]
        assert node.status == "healthy"
        assert not node.bus_down
        assert model.schedule.selector.matches(node.labels)
        before, free = world, free_memory_of(node, world.on_node.get(node.id, ()), world.policy)
        after = carried_out(before, found, model)
        for pool, left in zip((*free.devices, free.ram), free_bytes(after, node), strict=True):
            if pool.free_bytes is None or left is None or not model.memory.known:
                continue
            uses = pool.device is not None and as_replica_device(pool.device) in found.fit.devices
            if uses:
                assert pool.free_bytes >= found.fit.each_bytes
                assert left <= pool.free_bytes - found.fit.each_bytes + 1
        if isinstance(node.budget, Amount) and found.fit.devices and model.memory.known:
            assert free.left_of_budget is not None
            assert found.fit.memory_bytes <= free.left_of_budget
        if not found.fit.devices and model.memory.known and free.ram.free_bytes is not None:
            assert found.fit.memory_bytes + found.fit.host_bytes <= free.ram.free_bytes


def members_together(world: World) -> set[tuple[str, str]]:
    """Models of one group on one node, as pairs of (node, both names)."""
    return {
        (node_id, f"{one.model} and {other.model}")
        for node_id, there in world.on_node.items()
        for one in there
        for other in there
        if one.model in world.models and shared_groups(world, world.models[one.model], other)
    }


@SOME
@given(worlds(), st.sampled_from(list(Purpose)))
def test_no_decision_brings_two_members_of_a_group_together(world: World, purpose: Purpose) -> None:
    for model in world.models.values():
        found = choose_placement(world, model, purpose)
        if not isinstance(found, Placed):
            continue
        assert members_together(carried_out(world, found, model)) == members_together(world)


@SOME
@given(worlds())
def test_placing_again_and_again_ends_and_never_exceeds_what_there_is(world: World) -> None:
    model = world.models["a"]
    for _ in range(20):
        found = choose_node(world, model)
        if isinstance(found, NoCapacity):
            break
        world = carried_out(world, found, model)
    else:
        pytest.fail("a node takes at most three, and there are three nodes")
    keys = [replica.key for replica in world.replicas if replica.process_id.startswith("new")]
    assert len(keys) == len(set(keys))


@SOME
@given(worlds(), st.sampled_from(list(Purpose)))
def test_nobody_is_ended_who_is_needed(world: World, purpose: Purpose) -> None:
    for model in world.models.values():
        found = choose_placement(world, model, purpose)
        if not isinstance(found, EvictFirst):
            continue
        assert found.victims
        left = world_without(world, *found.victims)
        answering = Counter(replica.model for replica in left.replicas if can_answer(left, replica))
        for victim in found.victims:
            own = world.models.get(victim.model)
            assert victim.node_id == found.placed.node_id
            assert victim.state is ReplicaState.READY
            assert victim.in_flight == 0
            assert victim.model != model.name
            if own is None:
                continue
            assert not own.pinned
            assert not own.schedule.spread_all
            assert answering[own.name] >= own.schedule.min_replicas  # invariant 8
            assert answering[own.name] or not own.waiting
            assert answering[own.name] or purpose is not Purpose.GROWTH


@SOME
@given(worlds())
def test_room_that_was_made_is_enough_and_not_too_much(world: World) -> None:
    for model in world.models.values():
        found = choose_placement(world, model)
        if not isinstance(found, EvictFirst):
            continue
        node = world.nodes[found.placed.node_id]
        stopping = {replica.key for replica in world.replicas if replica.state is ReplicaState.STOPPING}
        ended = {victim.key for victim in found.victims}
        assert evaluate_node(world, model, node, stopping | ended).eligible
        for victim in found.victims:
            assert not evaluate_node(world, model, node, stopping | ended - {victim.key}).eligible


@SOME
@given(worlds())
def test_the_order_in_which_things_are_told_does_not_matter(world: World) -> None:
    nodes = dict(reversed(list(world.nodes.items())))
    other = replace(world, nodes=nodes, replicas=tuple(reversed(world.replicas)))
    for model in world.models.values():
        assert choose_placement(world, model) == choose_placement(other, model)
        assert plan_scaling(world, model) == plan_scaling(other, model)


@SOME
@given(worlds())
def test_carrying_out_steps_comes_to_rest(world: World) -> None:
    """What starts becomes ready at once, what is told to end ends; nobody asks for anything meanwhile."""
    calm = {name: replace(model, waiting=0, busy_for_s=0.0) for name, model in world.models.items()}
    world = replace(world, models=calm)
    for _ in range(100):
        moved = False
        for model in world.models.values():
            changed = _carry_out(world, model)
            moved |= changed is not world
            world = changed
        if not moved:
            break
    else:
        pytest.fail(f"still moving: {world}")
    _at_rest(world)


def _carry_out(world: World, model: Model) -> World:
    match plan_scaling(world, model):
        case ScaleUp(decision=Placed() as placed):
            after = carried_out(world, placed, model)
            ready = replace(after.replicas[-1], state=ReplicaState.READY, ready_at=NOON)
            return replace(after, replicas=(*after.replicas[:-1], ready))
        case ScaleUp(decision=EvictFirst(victims=victims)):
            return world_without(world, *victims)
        case ScaleDown(replica=replica):
            assert replica in world.replicas
            return world_without(world, replica)
        case _:
            return world


def _at_rest(world: World) -> None:
    for model in world.models.values():
        step = plan_scaling(world, model)
        if model.disabled or model.schedule.spread_all:
            continue
        answering = [replica for replica in world.of_model.get(model.name, ()) if can_answer(world, replica)]
        fewer = len(answering) < model.schedule.min_replicas
        waits = isinstance(step, Unsatisfied) or (
            isinstance(step, ScaleUp) and isinstance(step.decision, WaitForCapacity)
        )
        starting = any(
            replica.state is ReplicaState.STARTING and replica.revision == model.revision
            for replica in world.of_model.get(model.name, ())
        )
        assert not fewer or waits or starting, "the least was possible and is not there"


@SOME
@given(worlds())
def test_scaling_takes_nobody_who_is_needed(world: World) -> None:
    for model in world.models.values():
        step = plan_scaling(world, model)
        if not isinstance(step, ScaleDown) or model.disabled:
            continue
        replica = step.replica
        assert replica.state is not ReplicaState.STOPPING
        others = [
            other
            for other in world.of_model[model.name]
            if other is not replica and other.revision == model.revision and can_answer(world, other)
        ]
        stays = replica.revision == model.revision and world.nodes[replica.node_id].status == "healthy"
        if stays and model.schedule.selector.matches(world.nodes[replica.node_id].labels):
            assert replica.in_flight == 0
            if replica.ready_at is None and why_must_leave(world, model, replica):
                continue  # it answers nobody yet, and must not come up where it is
            assert len(others) >= model.schedule.min_replicas
            assert others or not model.waiting


@SOME
@given(worlds())
def test_everything_can_be_explained(world: World) -> None:
    for model in world.models.values():
        explained = explain_model(world, model)
        assert len(explained.nodes) == len(world.nodes)
        for verdict in explained.nodes:
            assert verdict.eligible == all(check.ok for check in verdict.checks)
            assert verdict.text
    for node in world.nodes.values():
        assert len(explain_node(world, node).models) == len(world.models)


def test_the_worlds_are_worth_looking_at() -> None:
    """Every kind of decision and step comes up, or what is said of it above says nothing."""
    kinds: Counter[str] = Counter()
    for seed in range(300):
        world = a_world(seed)
        for model in world.models.values():
            kinds[type(choose_placement(world, model)).__name__] += 1
            kinds[type(plan_scaling(world, model)).__name__] += 1
    assert set(kinds) == {
        "Placed",
        "EvictFirst",
        "WaitForCapacity",
        "NoCapacity",
        "ScaleUp",
        "ScaleDown",
        "Hold",
        "Unsatisfied",
    }
    assert min(kinds.values()) >= 5, kinds
