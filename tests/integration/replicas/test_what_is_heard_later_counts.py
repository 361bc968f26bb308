"""Two heartbeats close together: the later one counts, however long asking for the time took."""

from __future__ import annotations

from typing import Any

from corral.contract.messages.backends import NodeBackend
from corral.contract.messages.nodes import BusHeartbeat
from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.desired.inventories import with_boot
from corral.controller.desired.observations import Looked
from corral.store import node_backends
from tests.support.replica_fleet import ReplicaFleet


async def test_a_slow_look_at_the_clock_does_not_let_an_earlier_beat_win(local: ReplicaFleet, monkeypatch: Any) -> None:
    await local.fleet.first.kill()
    node_id = await local.fleet.node("barn")
    inventories = local.fleet.first.backends.inventories
    passed = [100.0]
    monkeypatch.setattr(local.fleet.clock, "monotonic", lambda: passed[0])
    for state, flushed_after_s in (("starting", 0.0), ("ready", 0.5)):
        process = ReplicaProcess("p", "m", 0, "b", state, "openai")
        inventories.heard(node_id, BusHeartbeat(boot_id="boot-1", inventory=(), processes=(process,)))
        passed[0] += flushed_after_s
        await inventories.flush()
        passed[0] += 0.001
    async with local.fleet.store.read() as tx:
        told = await node_backends.find(tx, node_id)
    assert told is not None
    assert [each.state for each in told.processes] == ["ready"]


async def test_a_list_of_backends_says_nothing_of_what_runs(local: ReplicaFleet) -> None:
    """A worker that was started again is asked what it has before it tells by itself. Its replicas are not gone."""
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    [before] = await local.until_ready("m")
    await local.until_settled()
    await local.fleet.set_node("barn", boot_id="boot-2")
    async with local.fleet.store.write() as tx:
        rows = (NodeBackend("llama-cpp", False, False, digest="sha256:cpu-llama-cpp-1"),)
        await node_backends.put_all(tx, await with_boot(tx, [Looked("id-of-barn", rows)]))
        told = await node_backends.find(tx, "id-of-barn")
    assert told is not None
    assert (told.boot_id, [each.process_id for each in told.processes]) == ("boot-2", [before.process_id])
    assert told.told_at is None
    for _ in range(3):
        await local.replicas["c1"].loop.look()
    assert [row.stage for row in await local.rows("m")] == ["running"]
    assert len(barn.started) == 1
