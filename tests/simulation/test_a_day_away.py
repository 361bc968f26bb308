"""A node that is off for a day: what was asked meanwhile is not thrown away, and happens by itself when it is back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from corral.controller.operations.requests import OperationKind, parse_request
from corral.store.records import BackendRequest, Scope, ScopeKind
from tests.simulation.simulation import Plan, Simulation, simulate
from tests.simulation.workers import CorralWorker, LocalAIWorker, Worker

DAY_S = 86400.0
HOUR_S = 3600.0


@pytest.mark.parametrize("kind", [CorralWorker, LocalAIWorker])
@pytest.mark.parametrize("awake_s", [HOUR_S, pytest.param(DAY_S, marks=pytest.mark.long)])
def test_a_node_offline_for_a_day_then_back(template: Path, kind: type[Worker], awake_s: float) -> None:
    """`awake_s`: for so long the controller is up, which is what takes time here; then it is off as well, till the end
    of the day."""
    installed: list[bool] = []
    states: list[str] = []

    async def story(sim: Simulation) -> None:
        sim.store_luck.waits = 0.0
        sim.start_controller("c0")
        sim.add_worker(worker := kind(sim, "w0", sim.chance("w0")))
        await asyncio.sleep(30)
        sim.kill_worker("w0")
        controller = sim.some_controller()
        assert controller is not None
        request = parse_request(OperationKind.INSTALL, BackendRequest("vllm"), scope=Scope(ScopeKind.ALL))
        operation = (await controller.backends.operations.accept(request)).operation_id
        sim.accepted[operation] = "install"
        await asyncio.sleep(awake_s)
        states.append((await controller.backends.operations.view(operation)).state)
        if awake_s < DAY_S:
            sim.kill_controller("c0")
            await asyncio.sleep(DAY_S - awake_s)
            sim.start_controller("c1")
            await asyncio.sleep(60)
            controller = sim.some_controller()
            assert controller is not None
        sim.start_worker("w0")
        await asyncio.sleep(120)
        installed.append("vllm" in worker.disk.installed)
        states.append((await controller.backends.operations.view(operation)).state)

    simulate(0, template, chaos=story, plan=Plan(chaos_s=DAY_S + 300, rest_s=1200))
    assert states == ["waiting", "done"]
    assert installed == [True]
