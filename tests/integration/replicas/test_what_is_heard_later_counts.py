"""Two heartbeats close together: the later one counts, however long asking for the time took."""

from __future__ import annotations

from typing import Any

from corral.contract.messages.nodes import BusHeartbeat
from corral.contract.messages.replicas import ReplicaProcess
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
