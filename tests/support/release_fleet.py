"""Controllers that sign and order releases of Corral, and workers that take such orders as a script says."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher
from corral.bus.api import Bus
from corral.contract.codec import decode
from corral.contract.messages.models import DoneReply
from corral.contract.messages.releases import (
    CANCEL_UPGRADE,
    UPGRADE_WORKER,
    CancelUpgrade,
    UpgradeState,
    UpgradeWorker,
    UpgradeWorkerReply,
)
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.releases import (
    RELEASE_DOMAIN,
    AddRelease,
    ChangeReleaseKey,
    ReleaseOrder,
    ReleaseView,
    UpgradeFleet,
)
from corral.contract.sources import Wheel
from corral.controller.access.release_keys import ReleaseKeys
from corral.controller.distribution.own_wheel import OwnWheel
from corral.controller.releases.calls import ReleaseCalls
from corral.controller.releases.service import Releases
from corral.controller.releases.upgrades import CorralUpgrades, UpgradePace
from corral.controller.settings.backends import BackendSettings
from corral.kit.clock import SystemClock
from corral.kit.errors import CorralError
from corral.kit.settings import Seconds
from corral.kit.signing import Verifier, read_claims
from corral.kit.tasks import run_every
from tests.support.backend_fleet import Controller, Fleet
from tests.support.waiting import until

LEASE = "replicas"
QUICK = BackendSettings(retry_first_s=Seconds(0.1), retry_cap_s=Seconds(0.1), backend_accept_timeout_s=Seconds(2))
PACE = UpgradePace(interval_s=0.05, poll_s=0.05, silent_s=2.0, unhealthy_s=0.5)
DEPENDENCY = Wheel(name="dep-1.0-py3-none-any.whl", sha256="d" * 64, url="http://index/dep.whl", size=10)


def small_wheel(version: str, *, name: str = "corral", extra: str = "", schema: str = "") -> bytes:
    """A wheel of a Corral with one dependency."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in (
            (f"corral-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n{extra}\n"),
            ("corral/_requirements.txt", f"dep==1.0 --hash=sha256:{DEPENDENCY.sha256}\n"),
            ("corral/_pip.txt", ""),
            *([(f"corral/store/engine/migrations/versions/{schema}_step.py", "")] if schema else []),
        ):
            archive.writestr(zipfile.ZipInfo(path), text)
    return buffer.getvalue()


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Packages:
    errors: list[CorralError] = field(default_factory=list)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    hold: asyncio.Event | None = None

    async def fetch_all(self, release: OwnWheel, platform: str, python: str) -> tuple[Wheel, ...]:
        self.asked.append((release.version, platform, python))
        if self.hold is not None:
            await self.hold.wait()
        if self.errors:
            raise self.errors.pop(0)
        return (DEPENDENCY,)


class Sources:
    def sources_for(self, node_id: str, files: Sequence[ReplicaFile] = ()) -> tuple[tuple[str, ...], str]:
        return ("http://{host}:8090",), f"token-of-{node_id}"


class UpgradingWorker:
    """A worker that carries the order out when it is let, and remembers which version it runs."""

    def __init__(self, bus: Bus, node_id: str) -> None:
        self.bus, self.node_id = bus, node_id
        self.orders: list[UpgradeWorker] = []
        self.cancelled: list[str] = []
        self.hold: asyncio.Event | None = None
        self.phase = "building"  # while it is held
        self.replies: list[UpgradeWorkerReply] = []  # instead of success, one per attempt
        self.runs = ""  # the digest of the wheel
        self.boot_id = f"boot-of-{node_id}"
        self.not_ready = ""
        self.questions = 0  # plans that it was asked for
        self._ended: dict[tuple[str, int], UpgradeWorkerReply] = {}

    async def start(self) -> UpgradingWorker:
        await self.bus.serve(UPGRADE_WORKER, self.upgrade, node=self.node_id)
        await self.bus.serve(CANCEL_UPGRADE, self.cancel, node=self.node_id)
        return self

    async def upgrade(self, order: UpgradeWorker, _tokens: object) -> UpgradeWorkerReply:
        return msgspec.structs.replace(
            self._reply(order), program=self.runs[:16], boot_id=self.boot_id, not_ready=self.not_ready
        )

    def _reply(self, order: UpgradeWorker) -> UpgradeWorkerReply:
        if order.plan:
            self.questions += 1
            done = bool(order.signed) and released(order).sha256 == self.runs
            return UpgradeWorkerReply(state=UpgradeState.DONE if done else UpgradeState.RUNNING)
        release = released(order)
        self.orders.append(order)
        key = (order.op_id, order.attempt)
        if key not in self._ended:
            if self.hold is not None and not self.hold.is_set():
                return UpgradeWorkerReply(state=UpgradeState.RUNNING, phase=self.phase)
            self._ended[key] = self.replies.pop(0) if self.replies else UpgradeWorkerReply(state=UpgradeState.DONE)
            if self._ended[key].state == UpgradeState.DONE:
                self.runs = release.sha256
        return self._ended[key]

    async def cancel(self, order: CancelUpgrade, _tokens: object) -> DoneReply:
        self.cancelled.append(order.op_id)
        return DoneReply(success=True)

    @property
    def attempts(self) -> set[int]:
        return {order.attempt for order in self.orders}


def released(order: UpgradeWorker) -> ReleaseOrder:
    return decode(ReleaseOrder, read_claims(order.signed))


def verified(order: UpgradeWorker, public_key: str) -> ReleaseOrder:
    return decode(ReleaseOrder, Verifier(public_key).verify(order.signed, domain=RELEASE_DOMAIN))


@dataclass
class ReleaseSite:
    fleet: Fleet
    folder: Path
    packages: Packages = field(default_factory=Packages)
    keys: ReleaseKeys = None  # type: ignore[assignment]
    releases: Releases = None  # type: ignore[assignment]

    async def open(self) -> ReleaseSite:
        self.keys = ReleaseKeys(self.fleet.store, SystemClock())
        await self.keys.open()
        first = self.fleet.first

        async def own() -> OwnWheel:
            content = small_wheel("1.0")
            return OwnWheel("corral-1.0-py3-none-any.whl", "1.0", content, sha256_of(content))

        self.uploaded = BlobStore(self.folder / "uploads", Fetcher(clock=SystemClock()))
        self.releases = Releases(
            self.fleet.store,
            self.keys,
            ReleaseCalls(first.bus, timeout_s=1.0),
            first.feed,
            self.uploaded,
            own,
            lambda node, selector: first.backends.operations.scope(node=node, selector=selector),
            live_for_s=60.0,
        )
        return self

    async def lead(self, controller: Controller, *, pace: UpgradePace = PACE) -> CorralUpgrades:
        clock = SystemClock()
        upgrades = CorralUpgrades(
            controller.store,
            self.keys,
            ReleaseCalls(controller.bus, timeout_s=1.0),
            self.packages,
            BlobStore(self.folder / f"artifacts-{controller.name}", Fetcher(clock=clock)),
            Sources(),
            controller.leadership,
            controller.feed,
            clock,
            QUICK,
            lease=LEASE,
            pace=pace,
        )

        async def claim() -> None:
            await controller.leadership.lead(LEASE)

        controller.tasks.append(asyncio.create_task(run_every("lead", 0.05, claim, clock=clock)))
        await until(lambda: controller.leadership.epoch(LEASE) or len(self.fleet.controllers) > 1)
        controller.tasks.append(asyncio.create_task(upgrades.run()))
        return upgrades

    async def worker(self, name: str, **known: Any) -> UpgradingWorker:
        scripted = await self.fleet.corral(name, **known)
        return await UpgradingWorker(scripted.bus, f"id-of-{name}").start()

    async def upload(self, content: bytes) -> str:
        digest = f"sha256:{sha256_of(content)}"
        partial = self.uploaded.partial_path("upload")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        self.uploaded.accept(partial, digest, len(content))
        return sha256_of(content)

    async def release(self, version: str, *, signed: str = "") -> ReleaseView:
        return await self.releases.add(AddRelease(await self.upload(small_wheel(version)), signed), by="boss")

    async def change_key(self, public_key: str, proof: str = "", *, is_lost: bool = False) -> None:
        await self.releases.change_key(ChangeReleaseKey(public_key, proof, is_lost, is_new=not public_key), by="boss")

    async def upgrade(self, version: str = "2.0", **more: Any) -> str:
        """The operation."""
        request = UpgradeFleet(version=version, **{"max_parallel": "100%", **more})
        return (await self.releases.upgrade(request, by="boss")).operation
