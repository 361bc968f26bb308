"""Loads and replicas of several models on several nodes."""

from __future__ import annotations

import asyncio

from corral.store.tables import backend_rules, nodes, operations
from tests.support.replica_fleet import ReplicaFleet
from tests.support.waiting import until


async def test_another_model_and_another_replica_are_loads_of_their_own(local: ReplicaFleet) -> None:
    """One that does not come up holds up nobody else."""
    barn, shed = await local.worker("barn", has="llama-cpp"), await local.worker("shed", has="llama-cpp")
    barn.starts.hold = asyncio.Event()
    await local.define("a")
    await local.schedule("a", min_replicas=2)
    [ready] = await local.until_ready("a")
    assert ready.node_id == "id-of-shed", "the other replica of it"
    await until(lambda: barn.processes, "the one that hangs")
    mill = await local.worker("mill", has="llama-cpp")
    await local.define("b")
    await local.ask("b")
    [other] = await local.until_ready("b")
    assert other.node_id == "id-of-mill", "another model"
    assert [len(worker.started) for worker in (barn, shed, mill)] == [0, 1, 1]
    barn.starts.hold.set()
    await local.until_ready("a", 2)


async def test_several_replicas_of_one_model_on_one_node(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp", max_replicas_per_model=2)
    await local.define("m")
    await local.schedule("m", min_replicas=2)
    shown = await local.until_ready("m", 2)
    assert {(each.node_id, each.replica) for each in shown} == {("id-of-barn", 0), ("id-of-barn", 1)}
    first = next(each for each in shown if each.replica == 0)
    await barn.lose(first.process_id)
    await until(lambda: len(barn.started) == 3, "its return")
    again = await local.until_ready("m", 2)
    assert {each.replica for each in again} == {0, 1}, "the lowest number that is free"


async def test_a_node_nobody_listens_on_is_left_alone_until_it_is_heard_of(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    shed = await local.worker("shed", has="llama-cpp", total_ram=32 << 30, available_ram=30 << 30)
    await local.define("m")
    await barn.stop()  # and nobody has noticed
    await local.ask("m")
    [ready] = await local.until_ready("m")
    assert ready.node_id == "id-of-shed"
    async with local.fleet.store.read() as tx:
        assert {node.name: node.status for node in await nodes.list_(tx)} == {"barn": "unhealthy", "shed": "healthy"}
    assert len(shed.started) == 1


async def test_a_model_brings_its_backend_nowhere_until_it_is_loaded(local: ReplicaFleet) -> None:
    await local.worker("barn")
    await local.worker("shed")
    await local.define("m")
    await asyncio.sleep(0.5)
    async with local.fleet.store.read() as tx:
        assert await backend_rules.list_live(tx) == []
        assert await operations.list_(tx, limit=10) == []
    await local.ask("m")
    [ready] = await local.until_ready("m")
    async with local.fleet.store.read() as tx:
        [rule] = await backend_rules.list_live(tx)
    assert (rule.origin, rule.scope_kind, rule.scope_value) == ("load", "node", ready.node_id), "and there only"
