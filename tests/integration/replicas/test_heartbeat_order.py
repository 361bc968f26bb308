"""Two heartbeats close together: the later one counts, however long asking for the time took."""

from __future__ import annotations

from typing import Any

from corral.contract.messages.backends import NodeBackend
from corral.contract.messages.nodes import BusHeartbeat
from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.inventory.collector import complete_inventories
from corral.controller.orders.observations import InventoryRead
from corral.store.tables import node_backends, nodes
from tests.support.replica_fleet import ReplicaFleet


async def test_a_slow_look_at_the_clock_does_not_let_an_earlier_beat_win(local: ReplicaFleet, monkeypatch: Any) -> None:
    await local.fleet.first.kill()
    node_id = await local.fleet.node("barn")
    inventories = local.fleet.first.backends.inventories
    passed = [100.0]
    monkeypatch.setattr(local.fleet.clock, "monotonic", lambda: passed[0])
    for state, flushed_after_s in (("starting", 0.0), ("ready", 0.5)):
        process = ReplicaProcess("p", "m", 0, "b", state, "openai")
        inventories.on_heartbeat(node_id, BusHeartbeat(boot_id="boot-1", inventory=(), processes=(process,)))
        passed[0] += flushed_after_s
        await inventories.flush()
        passed[0] += 0.001
    async with local.fleet.store.read() as tx:
        report = await node_backends.find(tx, node_id)
    assert report is not None
    assert [each.state for each in report.processes] == ["ready"]


async def test_a_list_of_backends_says_nothing_of_what_runs(local: ReplicaFleet) -> None:
    """A worker that was started again is asked what it has before it tells by itself. Its replicas are not gone."""
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    [before] = await local.until_ready("m")
    await local.until_settled()
    async with local.fleet.store.write() as tx:  # one for all: the worker goes on telling of its first start meanwhile
        await nodes.set_boot_ids(tx, {"id-of-barn": "boot-2"})
        rows = (NodeBackend("llama-cpp", False, False, digest="sha256:cpu-llama-cpp-1"),)
        await node_backends.put_all(tx, await complete_inventories(tx, [InventoryRead("id-of-barn", rows)]))
        report = await node_backends.find(tx, "id-of-barn")
    assert report is not None
    assert (report.boot_id, [each.process_id for each in report.processes]) == ("boot-2", [before.process_id])
    assert report.reported_at is None
    for _ in range(3):
        await local.replicas["c1"].reconciler.run_once()
    assert [row.stage for row in await local.rows("m")] == ["running"]
    assert len(barn.started) == 1


async def test_what_a_node_tells_counts_though_an_answer_said_the_same(local: ReplicaFleet) -> None:
    """It was no news, so nobody ever knew what ran there, and what had left was said to be leaving for ever."""
    await local.fleet.first.kill()
    node_id = await local.fleet.node("barn")
    inventories = local.fleet.first.backends.inventories
    await local.fleet.set_node("barn", boot_id="boot-2")
    rows = (NodeBackend("llama-cpp", False, False, digest="sha256:cpu-llama-cpp-1"),)
    async with local.fleet.store.write() as tx:
        await node_backends.put_all(tx, await complete_inventories(tx, [InventoryRead(node_id, rows, 1)]))
    found = []
    for _ in range(2):
        inventories.on_heartbeat(node_id, BusHeartbeat(boot_id="boot-2", inventory=rows, inventory_seq=1))
        await inventories.flush()
        async with local.fleet.store.read() as tx:
            found.append(await node_backends.find(tx, node_id))
    assert found[0] is not None
    assert found[0].reported_at is not None
    assert found[1] == found[0], "from then on the same is no news"


async def test_once_the_new_one_has_answered_the_former_never_does_again(local: ReplicaFleet) -> None:
    """Not even when the new one ends before whoever keeps the replicas has looked."""
    await local.fleet.first.kill()
    node_id = await local.fleet.node("barn")
    inventories = local.fleet.first.backends.inventories
    former = await local.define("m")
    present = await local.define("m", context_size=4096)
    old = ReplicaProcess("p-old", "m", 0, "b", "ready", "openai", revision=former.revision)
    new = ReplicaProcess("p-new", "m", 1, "b", "ready", "openai", revision=present.revision)
    seen = []
    for report in ((old,), (old, new), (old,)):
        inventories.on_heartbeat(node_id, BusHeartbeat(boot_id="boot-1", inventory=(), processes=report))
        await inventories.flush()
        seen.append([each.process_id for each in await local.shown("m")])
    assert seen == [["p-old"], ["p-new"], []]


async def test_what_an_offline_node_said_last_is_not_said_to_be_so(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    await local.until_ready("m")
    await local.until_settled()
    rows = next(iter(local.replicas.values())).rows
    assert [row["process_state"] for row in await rows.list_(model="m")] == ["ready"]
    await barn.stop()
    await local.set_node("barn", status="offline")
    assert [row["process_state"] for row in await rows.list_(model="m")] == ["node offline"]
