"""Many workers in one process on one connection, for benches of the controller: they accept at once, tell how far they
are, and are done when their time is over. What they install is only remembered.

    simulated_workers.py BUS_URL KEYS_FOLDER FLEET_FILE

The file maps node ids to the seconds each takes. As real workers do, they beat every 10 s and whenever an order begins
or ends; what has not changed is told with every third beat. Their user is a controller's: the only kind that may speak
for many nodes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from corral.bus.api import Bus, FixedCredentials, Tokens
from corral.bus.auth import mint_service_credentials
from corral.bus.keys import load_or_create_keys
from corral.bus.nats import NatsBus
from corral.contract.messages.backends import (
    CANCEL_BACKEND,
    INSTALL_BACKEND,
    INSTALL_PROGRESS,
    INSTALL_RESULT,
    LIST_BACKENDS,
    BackendList,
    BackendResult,
    CancelBackend,
    CancelReply,
    InstallBackend,
    InstallProgress,
    InstallReply,
    ListBackends,
    NodeBackend,
    OrderReport,
)
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat

BEAT_S = 10.0
PROGRESS_S = 0.25
BOOT_ID = "simulated"
SIZE_BYTES = 2 * 2**30


class SimulatedWorker:
    def __init__(self, bus: Bus, node_id: str, seconds: float) -> None:
        self._bus = bus
        self._node_id = node_id
        self._seconds = seconds
        self._installed: dict[str, NodeBackend] = {}
        self._orders: dict[tuple[str, int], OrderReport] = {}
        self._seq = 1
        self._beats = 0
        self.told = 0

    def list_backends(self) -> BackendList:
        return BackendList(backends=tuple(self._installed.values()), seq=self._seq)

    def accept(self, order: InstallBackend) -> bool:
        """False: it has this one already."""
        key = order.op_id, order.attempt
        if key in self._orders:
            return False
        self._orders[key] = OrderReport(op_id=order.op_id, attempt=order.attempt, kind="install", backend=order.backend)
        return True

    async def carry_out(self, order: InstallBackend) -> None:
        now = asyncio.get_running_loop().time
        started, seq = now(), 0
        await self.beat()
        while (passed := now() - started) < self._seconds:
            seq += 1
            await self._tell(order, seq, passed / self._seconds)
            await asyncio.sleep(min(PROGRESS_S, self._seconds - passed))
        self._seq += 1
        self._installed[order.backend] = NodeBackend(
            name=order.backend, digest=order.digest, version=order.version, installed_at=f"{self._seq}"
        )
        result = BackendResult(
            op_id=order.op_id,
            attempt=order.attempt,
            node_id=self._node_id,
            backend=order.backend,
            success=True,
            variant=order.variant,
            digest=order.digest,
        )
        self._orders[order.op_id, order.attempt] = OrderReport(
            op_id=order.op_id, attempt=order.attempt, kind="install", backend=order.backend, result=result
        )
        await self._bus.publish(INSTALL_RESULT, result, node=self._node_id, op=order.op_id)
        await self.beat()

    async def beat(self, *, news: bool = True) -> None:
        whole = news or self._beats % 3 == 0
        self._beats += 1
        beat = BusHeartbeat(
            boot_id=BOOT_ID,
            status_seen="healthy",
            available_vram=20 * 2**30,
            available_ram=50 * 2**30,
            available_disk=500 * 2**30,
            inventory=tuple(self._installed.values()) if whole else None,
            inventory_seq=self._seq,
            orders=tuple(self._orders.values()) if whole else None,
            processes=() if whole else None,
        )
        await self._bus.publish(NODE_HEARTBEAT, beat, node=self._node_id)

    async def _tell(self, order: InstallBackend, seq: int, share: float) -> None:
        done = int(share * SIZE_BYTES)
        event = InstallProgress(
            op_id=order.op_id,
            node_id=self._node_id,
            backend=order.backend,
            file_name=f"{order.backend}.tar.gz",
            current=f"{done / 2**20:.1f} MiB",
            total=f"{SIZE_BYTES / 2**20:.1f} MiB",
            percentage=share * 100,
            phase="downloading",
            attempt=order.attempt,
            seq=seq,
            current_bytes=done,
            total_bytes=SIZE_BYTES,
            rate=SIZE_BYTES / self._seconds,
        )
        await self._bus.publish(INSTALL_PROGRESS, event, node=self._node_id, op=order.op_id)
        self.told += 1


class SimulatedFleet:
    def __init__(self, bus: Bus, seconds_by_node: dict[str, float], tasks: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._tasks = tasks
        self._workers = {id: SimulatedWorker(bus, id, seconds) for id, seconds in seconds_by_node.items()}

    async def serve(self) -> None:
        await self._bus.serve(INSTALL_BACKEND, self._install, concurrency=64)
        await self._bus.serve(LIST_BACKENDS, self._list, concurrency=64)
        await self._bus.serve(CANCEL_BACKEND, self._cancel)
        self._tasks.create_task(self._count())
        while True:
            for worker in self._workers.values():  # spread evenly, as a real fleet's beats are
                await worker.beat(news=False)
                await asyncio.sleep(BEAT_S / len(self._workers))

    async def _count(self) -> None:
        """How much progress was told, for whoever measures: on a busy machine it may be less than it should be."""
        while True:
            print("told", sum(worker.told for worker in self._workers.values()), flush=True)
            await asyncio.sleep(0.1)

    async def _install(self, order: InstallBackend, tokens: Tokens) -> InstallReply:
        worker = self._workers[tokens["node"]]
        if worker.accept(order):
            self._tasks.create_task(worker.carry_out(order))
        return InstallReply(success=True, accepted=True)

    async def _list(self, _: ListBackends, tokens: Tokens) -> BackendList:
        return self._workers[tokens["node"]].list_backends()

    async def _cancel(self, _: CancelBackend, __: Tokens) -> CancelReply:
        return CancelReply(success=True, running=False)


async def play(bus_url: str, keys_folder: Path, seconds_by_node: dict[str, float]) -> None:
    keys = load_or_create_keys(keys_folder, datetime.now(UTC))
    minted = mint_service_credentials(
        keys.account_seed, keys.service_user_seed, now=datetime.now(UTC), ttl_s=3600, reply_ttl_s=60
    )
    async with NatsBus([bus_url], FixedCredentials(minted.credentials()), inbox_prefix=minted.inbox) as bus:
        await bus.wait_connected(30)
        async with asyncio.TaskGroup() as tasks:
            await SimulatedFleet(bus, seconds_by_node, tasks).serve()


def main() -> None:
    uvloop.run(play(sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())))


if __name__ == "__main__":
    main()
