"""Releases of Corral on a simulated machine: the worker's own handling of the order, on a disk and with a process that
builds, checks and tries the version, which are made up here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from corral.blobs.store import BlobStore
from corral.bus.local import LocalBus
from corral.contract.messages.releases import CANCEL_UPGRADE, UPGRADE_WORKER, UpgradeWorker
from corral.contract.releases import ReleaseOrder
from corral.kit.errors import Failed
from corral.worker.files.fleet_blobs import FleetBlobs
from corral.worker.settings.node import UpgradeSettings
from corral.worker.status import WorkerStatus
from corral.worker.upgrade import orders as orders_module
from corral.worker.upgrade.orders import CorralUpgradeOrders
from corral.worker.upgrade.release_pin import Pin, ReleasePin
from corral.worker.upgrade.trial import Trial, TrialState
from corral.worker.upgrade.versions import Versions

if TYPE_CHECKING:
    from tests.simulation.workers import Worker

BASELINE = "0" * 64  # the wheel that every machine begins with
_ROOT = Path("/simulated")
_READY_S = 60.0
_RESTART_S = (0.5, 4.0)


@dataclass
class VersionsOnDisk:
    """What a machine keeps of releases."""

    pin: Pin
    current: str = BASELINE  # the wheel that a worker is started from
    trial: Trial | None = None
    builder: asyncio.Task[None] | None = None  # the process that builds and tries: it outlives workers
    highest: int = 0  # of all counters that were ever installed here
    ran: list[tuple[datetime, str]] = field(default_factory=list)  # since when which wheel

    @property
    def is_busy(self) -> bool:
        return self.builder is not None and not self.builder.done()

    def starts(self, now: datetime) -> None:
        """A worker, from the current version."""
        self.ran.append((now, self.current))

    def has_run_since(self, wheel: str, since: datetime) -> bool:
        before = [each for at, each in self.ran if at <= since][-1:]
        return wheel in (*before, *(each for at, each in self.ran if at > since))

    def loses_power(self) -> bool:
        """Whether a version was being built or tried."""
        was_busy = self.is_busy
        if self.builder is not None:
            self.builder.cancel()
        return was_busy


class _Pin(ReleasePin):
    """On the simulated disk."""

    def __init__(self, versions: VersionsOnDisk) -> None:
        super().__init__(_ROOT)
        self._versions = versions

    def _stored(self) -> Pin:
        return self._versions.pin

    def _write(self, pin: Pin) -> None:
        self._versions.pin = pin


class UpgradeOrders(CorralUpgradeOrders):
    def __init__(self, worker: Worker, versions: VersionsOnDisk, settings: UpgradeSettings) -> None:
        program = Versions(_ROOT).folder(versions.current)
        super().__init__(
            cast(Path, versions),  # `read_trial` of this data folder is the trial on the simulated disk
            _Pin(versions),
            cast(FleetBlobs, None),
            cast(BlobStore, None),
            settings=settings,
            status=WorkerStatus(boot_id="", name=worker.name),  # only a soak looks at it
            program=program,
        )
        self._worker = worker
        self._disk = versions
        self._versions = Versions(_ROOT)

    async def _fetch_all(self, _folder: Path, _order: UpgradeWorker, release: ReleaseOrder, fetch: Any) -> Path:
        worker, chance = self._worker, self._worker.chance
        for part in (0.3, 1.0):
            await asyncio.sleep(chance.uniform(0.2, 10))
            await worker.step()
            fetch.current_bytes = int(part * fetch.total_bytes)
        if chance.random() < worker.sim.luck.fails:
            worker.sim.census.faults["wheels not fetched"] += 1
            raise Failed("no source has the wheel")
        return Path(release.sha256)

    async def _start(self, name: str, wheel: Path, _packages: Path | None) -> None:
        disk = self._disk
        if disk.is_busy:
            raise Failed("another upgrade of this machine is in progress: wait for its end")
        build = Build(self._worker, disk, name, str(wheel), disk.pin.counter)
        disk.trial = build.trial
        disk.builder = self._worker.sim.spawn(build.run())

    def _is_busy(self) -> bool:
        return self._disk.is_busy

    def _stop_build(self, operation: str) -> bool:
        trial = self._disk.trial
        if trial is None or trial.order.rpartition(":")[0] != operation or not self._disk.is_busy:
            return False
        if trial.state not in (TrialState.BUILDING, TrialState.CHECKING):
            return False
        assert self._disk.builder is not None
        self._disk.builder.cancel()
        self._disk.trial = replace_trial(trial, TrialState.REJECTED, "cancelled")
        return True


class Build:
    """As `worker/upgrade/detached.py` and `trial.py`."""

    def __init__(self, worker: Worker, disk: VersionsOnDisk, order: str, wheel: str, counter: int) -> None:
        self._worker = worker
        self._disk = disk
        self._wheel = wheel
        self._counter = counter
        self.trial = Trial(disk.current, wheel, TrialState.BUILDING, order=order)

    async def run(self) -> None:
        worker, chance = self._worker, self._worker.chance
        kind = worker.sim.quality_of(self._wheel, worker)
        hangs = chance.random() < worker.sim.luck.slow / 4
        await asyncio.sleep(300.0 if hangs else chance.uniform(1, 30))
        if hangs:
            worker.sim.census.faults["build of a release hung"] += 1
            return self._end(TrialState.REJECTED, "pip did not end within 300 s")
        if chance.random() < worker.sim.luck.fails:
            worker.sim.census.faults["disk full while a release was built"] += 1
            return self._end(TrialState.REJECTED, "no space left on device")
        self._write(TrialState.CHECKING)
        await asyncio.sleep(chance.uniform(0.5, 5))
        if kind == "fails its check":
            return self._end(TrialState.REJECTED, "the new version does not work here", is_final=True)
        self._write(TrialState.STARTING)
        self._install()
        if kind == "does not start":
            await asyncio.sleep(_READY_S)
            return self._return(f"the new version did not take over within {_READY_S:g} s")
        self._restart()
        self._write(TrialState.WATCHING)
        ends = worker.sim.clock.monotonic() + _READY_S
        while worker.sim.clock.monotonic() < ends:
            await asyncio.sleep(2.0)
            if kind != "is never ready" and worker.bus is not None and worker.bus.connected:
                return self._end(TrialState.DONE)
        return self._return(f"the new version was not ready within {_READY_S:g} s")

    def _install(self) -> None:
        worker = self._worker
        if self._counter < self._disk.highest:
            worker.sim.failed(f"{worker.name} installs release {self._counter} after release {self._disk.highest}")
        if not worker.sim.is_release(self._wheel):
            worker.sim.failed(f"{worker.name} installs a wheel that nobody has released")
        self._disk.highest = max(self._disk.highest, self._counter)
        self._disk.current = self._wheel

    def _return(self, reason: str) -> None:
        self._disk.current = self.trial.old
        self._restart()
        self._end(TrialState.RETURNED, reason)

    def _restart(self) -> None:
        self._worker.sim.replaces(self._worker, self._worker.chance.uniform(*_RESTART_S))

    def _write(self, state: TrialState) -> None:
        self._disk.trial = self.trial = replace_trial(self.trial, state)
        self._worker.sim.note(self._worker.name, "release", self._wheel[:4], state.value)

    def _end(self, state: TrialState, reason: str = "", *, is_final: bool = False) -> None:
        self._disk.trial = self.trial = replace_trial(self.trial, state, reason, is_final=is_final)
        self._worker.sim.note(self._worker.name, "release", self._wheel[:4], state.value, reason)


def replace_trial(trial: Trial, state: TrialState, reason: str = "", *, is_final: bool = False) -> Trial:
    return Trial(trial.old, trial.new, state, reason, trial.order, is_final)


@contextlib.asynccontextmanager
async def serving_releases(worker: Worker, bus: LocalBus) -> AsyncIterator[None]:
    """Around the life of a worker that knows such orders. One in ten is older, and one in ten was told to refuse."""
    versions = worker.disk.versions
    if versions is None or worker.knows_releases == "not":
        yield
        return
    settings = UpgradeSettings(self_upgrade="off" if worker.knows_releases == "refuses" else "on")
    async with UpgradeOrders(worker, versions, settings) as orders:
        await bus.serve(UPGRADE_WORKER, orders.upgrade, node=worker.node_id)
        await bus.serve(CANCEL_UPGRADE, orders.cancel, node=worker.node_id)
        yield


@contextlib.contextmanager
def versions_without_files() -> Iterator[None]:
    async def here(work: Any, *words: Any, **_names: Any) -> Any:
        return work(*words)

    def read(data: Any) -> Trial | None:
        found: Trial | None = data.trial
        return found

    with (
        mock.patch.object(orders_module, "in_daemon_thread", new=here),
        mock.patch.object(orders_module, "read_trial", new=read),
    ):
        yield
