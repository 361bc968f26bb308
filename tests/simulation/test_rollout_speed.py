"""How long an upgrade of 100 workers takes beside its unavoidable parts, in virtual time: the decisions and the
protocol alone, without the noise of a machine. `-s` prints the figures that docs/reference/performance.md quotes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from corral.controller.rollouts.options import parse_rollout
from tests.simulation.simulation import Plan, Simulation, simulate
from tests.simulation.test_found_by_the_simulation import ask, begin
from tests.simulation.workers import CorralWorker

WORKERS = 100
SOAK_S = 60.0
FETCH_S = (5.0, 20.0)
SWITCH_S = (5.0, 40.0)  # until new processes serve
LIMIT = 1.2


class TimedWorker(CorralWorker):
    """Notes how long it fetches and switches."""

    def __init__(self, sim: Any, name: str, chance: Random, **known: Any) -> None:
        super().__init__(sim, name, chance, **known)
        self.switch_s = Random(name).uniform(*SWITCH_S)
        self.fetched_s = 0.0
        self.switched_s = 0.0
        self.switched_at = 0.0

    async def _work(self, kind: str, order: Any, key: tuple[str, int]) -> dict[str, Any]:
        began_s = self.sim.clock.monotonic()
        is_switch = kind == "upgrade" and not order.fetch_only
        if is_switch:
            await asyncio.sleep(self.switch_s)
        result = await super()._work(kind, order, key)
        now_s = self.sim.clock.monotonic()
        if is_switch:
            self.switched_s, self.switched_at = now_s - began_s, now_s
        elif kind == "upgrade":
            self.fetched_s = now_s - began_s
        return result


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hundred_workers_upgrade_in_the_time_of_canary_soak_and_slowest(template: Path) -> None:
    measured: dict[str, float] = {}

    async def story(sim: Simulation) -> None:
        workers = [each for each in await begin(sim, *[TimedWorker] * WORKERS) if isinstance(each, TimedWorker)]
        sim.luck.takes_s = FETCH_S
        await ask(sim, "install")
        await asyncio.sleep(90)
        sim.catalogue.publish("vllm")
        began_s = sim.loop.time()
        operation = await ask(sim, "upgrade", max_parallel="100%", rollout=parse_rollout(soak=f"{SOAK_S:g}s"))
        controller = sim.controllers["c0"]
        assert controller is not None
        view = await controller.backends.operations.view(operation)
        while view.state != "done":
            await asyncio.sleep(0.5)
            view = await controller.backends.operations.view(operation)
        assert view.counts == {"success": WORKERS}
        measured["took"] = sim.loop.time() - began_s
        canary = min(workers, key=lambda worker: worker.switched_at)
        measured["canary"] = canary.fetched_s + canary.switched_s
        measured["slowest"] = max(worker.switched_s for worker in workers)
        waits_s = [
            worker.switched_at - worker.switched_s - canary.switched_at for worker in workers if worker != canary
        ]
        assert min(waits_s) >= SOAK_S, "nobody switches before the soak has ended"

    simulate(0, template, chaos=story, plan=Plan(rest_s=1200))
    parts_s = measured["canary"] + SOAK_S + measured["slowest"]
    ratio = measured["took"] / parts_s
    print(
        f"\n{WORKERS} workers: {measured['took']:.1f} s; canary {measured['canary']:.1f} s, soak {SOAK_S:.0f} s, "
        f"slowest {measured['slowest']:.1f} s: {ratio:.3f} of their sum"
    )
    assert ratio <= LIMIT
