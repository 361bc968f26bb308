"""A controller killed in any phase of a load: the next one goes on, and there is one replica in the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.replica_fleet import ReplicaFleet
from tests.support.waiting import until


@pytest.mark.parametrize("phase", ["pending", "installing", "staging", "loading"])
async def test_killed_in_each_phase(local: ReplicaFleet, phase: str) -> None:
    barn = await local.worker("barn", joins_later=phase == "pending")
    holds: dict[str, Any] = {"installing": barn.script, "staging": local.files, "loading": barn.starts}
    if phase in holds:
        holds[phase].hold = asyncio.Event()
    await local.define("m")
    await local.ask("m")

    async def there() -> bool:
        status = await local.status("m")
        return status is not None and status.state == phase

    await until(there, f"load that is {phase}")
    await local.fleet.first.kill()
    local.replicas.clear()
    local.files.hold = None
    second = await local.fleet.controller("c2")
    local.fleet.controllers.reverse()
    local.add(second)
    if phase == "pending":
        await barn.start()
        await barn.beat()
    for script in (barn.script, barn.starts):
        if script.hold is not None:
            script.hold.set()
    await local.until_ready("m")
    await local.until_settled()
    assert len(barn.started) == 1
    assert len(barn.processes) == 1


async def test_two_controllers_load_once_and_tell_the_same(fleet: ReplicaFleet) -> None:
    barn = await fleet.worker("barn", has="llama-cpp")
    second = fleet.add(await fleet.fleet.controller("c2"))
    await fleet.define("m")
    barn.starts.hold = asyncio.Event()
    await asyncio.gather(*(loads.request("m") for loads in (fleet.loads, second.loads) for _ in range(10)))
    await until(lambda: barn.processes)

    async def same() -> bool:
        return bool(await fleet.loads.find("m") == await second.loads.find("m"))

    await until(same)
    barn.starts.hold.set()
    await fleet.until_ready("m")
    assert len(barn.started) == 1


async def test_a_result_that_was_lost_and_a_worker_that_restarts_cost_time_only(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    barn.starts.lose_results = True
    barn.starts.hold = asyncio.Event()
    await local.ask("m")
    await until(lambda: barn.processes)
    await barn.restart()
    barn.starts.hold.set()
    await local.until_ready("m")
    assert len(barn.started) == 1
    assert len({order["op_id"] for order in barn.replica_orders}) == 1


async def test_the_database_away_for_a_while_costs_time_only(
    local: ReplicaFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    from corral.kit.errors import Unavailable

    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    barn.starts.hold = asyncio.Event()
    await local.ask("m")
    await until(lambda: barn.processes)

    def away() -> None:
        raise Unavailable("the database is away")

    with monkeypatch.context() as broken:
        broken.setattr(local.fleet.store, "write", away)
        broken.setattr(local.fleet.store, "read", away)
        barn.starts.hold.set()
        await until(lambda: barn.started)
        await asyncio.sleep(0.2)
    await local.until_ready("m")
    assert len(barn.started) == 1
