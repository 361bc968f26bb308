"""A simulated machine with the worker's own handling of orders: what is accepted, listed, remembered and told is
decided by `worker/agent`; only the disk and the time that work takes are made up here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

from corral.blobs.errors import WrongDigest
from corral.blobs.progress import OnProgress, Progress
from corral.bus.local import LocalBus
from corral.contract.messages import backends as wire
from corral.contract.messages.backends import Phase
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat, HttpHeartbeat
from corral.kit.errors import Conflict, CorralError, Failed
from corral.kit.tasks import Wake
from corral.worker.agent.heartbeat.reporter import HeartbeatReporter
from corral.worker.agent.orders import replicas as replica_orders
from corral.worker.agent.orders import runner as runner_module
from corral.worker.agent.orders.backend_changes import BackendChanges
from corral.worker.agent.orders.backends import BackendOrders
from corral.worker.agent.orders.runner import EventPublisher, OrderRunner
from corral.worker.installer.installer import Installer
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.installer.records import Metadata, VersionRecord
from tests.simulation.processes import DiskOutcomes, ProcessHost
from tests.simulation.workers import BEAT_S, METRICS, Worker


class WorkerWithRealOrders(Worker):
    process_host: ProcessHost

    def forget(self) -> None:
        self.wake = Wake()
        self.publisher = EventPublisher()
        self.outcomes = DiskOutcomes(self)
        self.outcomes.load()
        on_outcome = self.publisher.publish_outcome
        self.runner = OrderRunner(self.outcomes, on_outcome, metrics=METRICS, on_change=self.wake.set)
        installer = cast(Installer, _Installer(self))
        changes = cast(BackendChanges, _Changes(self))
        self.process_host = ProcessHost(self, self.runner, self.publisher)
        self.process_host.changed = self.wake.set
        clock = self.sim.clock
        self.orders = BackendOrders(changes, installer, self.runner, self.outcomes, self.publisher, clock)
        self.reporter = HeartbeatReporter(installer, self.orders.reports, self.process_host.list_processes, self.wake)

    @contextlib.asynccontextmanager
    async def alive(self, bus: LocalBus) -> AsyncIterator[None]:
        with self.publisher.connected_to(bus, self.node_id):
            async with self.process_host.alive(bus), self.runner:
                try:
                    yield
                finally:
                    await self.reporter.close()

    async def serve(self, bus: LocalBus) -> None:
        await bus.serve(wire.INSTALL_BACKEND, self._told(self.orders.install), concurrency=256, node=self.node_id)
        await bus.serve(wire.UPGRADE_BACKEND, self._told(self.orders.upgrade), concurrency=256, node=self.node_id)
        await bus.serve(wire.DELETE_BACKEND, self._told(self.orders.delete), node=self.node_id)
        await bus.serve(wire.CANCEL_BACKEND, self.orders.cancel, node=self.node_id)
        await bus.serve(wire.LIST_BACKENDS, self.orders.list_backends, node=self.node_id)
        await self.process_host.serve(bus)

    def orders_under_way(self) -> set[str]:
        return {key.op_id for key in self.runner.running()}

    async def pause(self) -> None:
        await self.wake.wait(BEAT_S * self.chance.uniform(0.9, 1.1))

    async def beat(self) -> None:
        assert self.bus is not None
        report, on_sent = await self.reporter.collect()
        beat = BusHeartbeat(
            boot_id=self.boot_id,
            inventory=report.inventory,
            inventory_seq=report.inventory_seq,
            orders=report.orders,
            processes=report.processes,
            available_ram=self.available_ram,
        )
        try:
            await self.bus.publish(NODE_HEARTBEAT, beat, node=self.node_id)
        except CorralError:
            self.sim.http_beat(self, HttpHeartbeat(bus="down", boot_id=self.boot_id))
        else:
            on_sent()

    def _told(self, handle: Callable[..., Any]) -> Any:
        async def handler(order: Any, tokens: Any) -> Any:
            self.sim.note(self.name, "is told", type(order).__name__, order.backend, order.op_id, order.attempt)
            await self.step()
            answer = await handle(order, tokens)
            await self.step()
            return answer

        return handler


class _Installer:
    """What is on the disk."""

    def __init__(self, worker: WorkerWithRealOrders) -> None:
        self._worker = worker

    @property
    def sequence(self) -> int:
        return self._worker.disk.seq

    async def list_backends(self) -> tuple[wire.NodeBackend, ...]:
        rows = self._worker.disk.rows()
        await asyncio.sleep(self._worker.chance.choice((0.0, 0.0, 0.05)))
        return rows


class _Changes:
    """As `BackendChanges`: one order at a time for a backend, and a switch that is done or not."""

    def __init__(self, worker: WorkerWithRealOrders) -> None:
        self._worker = worker

    async def install(
        self, order: wire.InstallBackend, tell: OnProgress, on_commit: Callable[[], None]
    ) -> InstalledBackend:
        return await self._have(order, tell, on_commit, again=order.force)

    async def upgrade(
        self, order: wire.UpgradeBackend, tell: OnProgress, on_commit: Callable[[], None]
    ) -> InstalledBackend:
        return await self._have(order, tell, on_commit, aside=order.fetch_only)

    async def delete(self, name: str, _stopped: list[str]) -> None:
        worker = self._worker
        async with worker.lock(name):
            await asyncio.sleep(worker.chance.uniform(0.01, 0.3))
            await worker.step()
            if worker.fails():
                raise Failed("it does not go")
            await worker.process_host.stop_all_of(name)
            if worker.process_host.is_in_use(name):  # by one that was started meanwhile
                raise Conflict(f"{name} is in use")
            worker.change("delete", name, "", "")

    async def _have(
        self,
        order: wire.InstallBackend | wire.UpgradeBackend,
        tell: OnProgress,
        on_commit: Callable[[], None],
        *,
        again: bool = False,
        aside: bool = False,
    ) -> InstalledBackend:
        worker, name = self._worker, order.backend
        assert order.digest, "the controller resolves"
        async with worker.lock(name):
            there = worker.disk.installed.get(name)
            is_it = there is not None and there["digest"] == order.digest
            kept = there is not None and order.digest in (*there["previous"], *there["fetched"])
            if again or not (is_it or kept):
                await self._fetch(order, tell)
            if not aside or there is None:
                tell(Progress(Phase.STARTING, name))
                await worker.step()
                on_commit()
                await asyncio.sleep(worker.chance.uniform(0.0, 0.2))
                if worker.fails():
                    raise Failed("the new process does not start")
                if again or not is_it:
                    worker.change("install", name, order.digest, order.version, order.variant)
                    await worker.process_host.replace_all_of(name)
            elif not (is_it or kept):
                worker.disk.fetch(name, order.digest)
        record = VersionRecord(order.digest, order.digest)
        return InstalledBackend(order.variant, Path(), metadata=Metadata(version=order.version), record=record)

    async def _fetch(self, order: wire.InstallBackend | wire.UpgradeBackend, tell: OnProgress) -> None:
        worker, size = self._worker, 1000
        took_s = worker.takes_s()
        for phase in (Phase.RESOLVING, Phase.DOWNLOADING, Phase.VERIFYING, Phase.EXTRACTING):
            for part in (0.3, 1.0):
                tell(Progress(phase, order.backend, int(part * size), size))
                await asyncio.sleep(took_s / 8)
                await worker.step()
            if worker.chance.random() < worker.sim.luck.fails / 4:
                if worker.chance.random() < worker.sim.luck.permanently:
                    raise WrongDigest(f"{phase} brought something else")
                raise Failed(f"{phase} failed")


@contextlib.contextmanager
def disks_without_threads() -> Iterator[None]:
    async def here(work: Callable[[], Any]) -> Any:
        return work()

    def write(disk: Any, content: bytes, *, mode: int) -> None:
        disk.outcomes_file = content

    async def at_once(work: Callable[..., Any], *words: Any) -> Any:
        return work(*words)

    def as_ordered(order: Any, _build: object, _models: object) -> Any:
        return order  # the host knows what to make of it

    with (
        mock.patch.object(runner_module, "in_daemon_thread", new=here),
        mock.patch.object(runner_module, "write_atomically", new=write),
        mock.patch.object(asyncio, "to_thread", new=at_once),
        mock.patch.object(replica_orders, "spec_of", new=as_ordered),
    ):
        yield
