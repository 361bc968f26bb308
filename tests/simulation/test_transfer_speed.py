"""How long many workers take for one file when all links have the same rate, in virtual time: the decisions of planner
and tracker alone, without the noise of a machine. `scripts/bench swarm` measures the real thing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.blobs.swarm.planner import PlanLimits
from corral.worker.files.served_blobs import UPLOAD_SLOTS
from tests.simulation.links import Links
from tests.simulation.test_transfers import MEMORY
from tests.simulation.transfer_machines import CHUNK, Server, SimulatedWorker, Weights
from tests.simulation.transfers import InlineLoop, Transfers, simulate_world

CHUNKS = 48  # 200 MB
CHUNKS_PER_S = 2.0  # of a link: 8 MB/s


class SharedFile(Transfers):
    """Workers that stage one file at the same moment."""

    slots = UPLOAD_SLOTS
    limits = PlanLimits()

    def __init__(self, seed: int, loop: InlineLoop, folder: Path, workers: int) -> None:
        self._count = workers
        super().__init__(seed, loop, folder)
        del self.controllers["controller-2"]
        self.links = Links(loop, CHUNKS_PER_S)
        self.times_s: dict[str, float] = {}

    def choose_weights(self) -> list[Weights]:
        return [Weights("m0", self.chance.randbytes(CHUNKS * CHUNK))]

    def count_workers(self) -> int:
        return self._count

    async def send(
        self, server: Server, receiver: SimulatedWorker, count: int, on_bytes: Callable[[int], None]
    ) -> None:
        await self.links.transfer(server.name, receiver.name, count / CHUNK, lambda: on_bytes(0))
        on_bytes(count)

    async def run(self) -> None:
        began_s = self.loop.time()
        for name in self.workers:
            self.order(name, "m0")
        while self.open_orders:
            for name in self.workers:
                if (name, "m0") not in self.open_orders:
                    self.times_s.setdefault(name, self.loop.time() - began_s)
            await self.clock.sleep(0.05)
        for name in self.workers:
            self.times_s.setdefault(name, self.loop.time() - began_s)
        self.check()

    @property
    def slowest_s(self) -> float:
        return max(self.times_s.values())

    @property
    def controller_share(self) -> float:
        return self.links.sent["controller-1"] / CHUNKS


def share_file(workers: int, seed: int = 0) -> SharedFile:
    with tempfile.TemporaryDirectory(prefix="corral-sim-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        return simulate_world(lambda loop: SharedFile(seed, loop, Path(folder), workers), Path(folder))


@pytest.mark.parametrize(("workers", "ratio"), [(8, 1.5), (16, 1.7)])
def test_many_workers_take_little_longer_than_one(workers: int, ratio: float) -> None:
    alone_s = share_file(1).slowest_s
    shared = share_file(workers)
    assert shared.slowest_s <= ratio * alone_s
    assert shared.controller_share <= 1.5
