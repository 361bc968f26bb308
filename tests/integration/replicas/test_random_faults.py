"""Everything at once, in an order that a seed decides: when it is over, the fleet is as people said."""

from __future__ import annotations

import asyncio
import random

import pytest

from corral.controller.inventory.routing import read_routing
from corral.store.tables import models, node_backends
from tests.support.invariants import misrouted
from tests.support.replica_fleet import ReplicaFleet, ReplicaWorker
from tests.support.waiting import until

MODELS = ("a", "b", "c")


@pytest.mark.parametrize("seed", range(6))
async def test_wanted_replicas_return_after_trouble(local: ReplicaFleet, seed: int) -> None:
    chance = random.Random(seed)
    workers = {name: await local.worker(name, has="llama-cpp") for name in ("w0", "w1", "w2")}
    for name in MODELS:
        await local.define(name)
    await local.schedule("a", min_replicas=2)
    await local.schedule("b", min_replicas=1, max_replicas=2)
    routed: set[tuple[str, str]] = set()
    for step in range(25):
        await _trouble(local, workers, chance, step)
        routed |= {(shown.process_id, shown.revision) for shown in await local.shown()}
        assert await _breaches(local) == []
        await asyncio.sleep(chance.random() * 0.12)
    assert len({process_id for process_id, _ in routed}) == len(routed), "a process has one revision, for ever"
    for worker in workers.values():
        worker.starts.failures, worker.starts.takes_s = [], 0.0
        if not worker._subscriptions:
            await worker.restart(forget=False)
        await local.set_node(worker.node_id.removeprefix("id-of-"), status="healthy", drained=False)
        await worker.in_flight()
        await worker.beat()
    await _at_rest(local, workers)


async def _breaches(local: ReplicaFleet) -> list[str]:
    """Of one moment."""
    async with local.fleet.store.read() as tx:
        shown, _ = await read_routing(tx)
        allowed = {row.id: (row.revision, *row.previous_revisions) for row in await models.list_(tx)}
        listed = {row.node_id: row for row in await node_backends.list_(tx)}
    return misrouted(shown, allowed, listed)


async def _trouble(local: ReplicaFleet, workers: dict[str, ReplicaWorker], chance: random.Random, step: int) -> None:
    name = chance.choice(list(workers))
    worker = workers[name]
    alive = bool(worker._subscriptions)
    match chance.choice(["lose", "restart", "reboot", "die", "fail", "slow", "edit", "ask", "drain", "busy", "leader"]):
        case "lose" if alive and worker.processes:
            await worker.lose(chance.choice(list(worker.processes)))
        case "restart" if alive:
            await worker.restart(forget=False)
        case "reboot" if alive:
            await worker.restart()
        case "die" if alive and sum(bool(each._subscriptions) for each in workers.values()) > 1:
            await worker.stop()
            await local.set_node(name, status="offline")
        case "fail":
            worker.starts.failures = ["broken"]
        case "slow":
            worker.starts.takes_s = 0.2
        case "edit":
            await local.define(chance.choice(MODELS), context_size=1000 + step, recreate=chance.random() < 0.3)
        case "ask":
            await local.ask("c")
        case "drain" if alive:
            await local.set_node(name, status="draining", drained=True)
        case "busy" if alive and worker.processes:
            await worker.in_flight(**{chance.choice(list(worker.processes)): 1})
        case "leader":
            old = local.fleet.first
            await old.kill()
            fresh = await local.fleet.controller(f"c-{step}")
            local.fleet.controllers = [fresh]
            local.replicas.clear()
            local.add(fresh)
        case _:
            pass


async def _at_rest(local: ReplicaFleet, workers: dict[str, ReplicaWorker]) -> None:
    async def as_wanted() -> bool:
        rows, shown = await local.rows(), await local.shown()
        listed = {
            (worker.node_id, process.model, process.replica, process.revision)
            for worker in workers.values()
            for process in worker.processes.values()
        }
        running = {(row.node_id, row.model, row.replica, row.revision) for row in rows}
        assert not [status for status in await local.loads.list_() if status.state != "failed"]
        assert len([each for each in shown if each.model == "a"]) >= 2, rows
        assert len([each for each in shown if each.model == "b"]) in (1, 2), rows
        assert {row.stage for row in rows} == {"running"}, rows
        assert listed == running, (listed ^ running, rows)
        assert sum(len(worker.processes) for worker in workers.values()) == len(rows), "two of one replica"
        return True

    await until(as_wanted, "rest")
