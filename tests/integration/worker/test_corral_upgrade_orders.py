"""What a worker does with an order to upgrade Corral, before another version is built: whom it believes, what it
fetches, what it refuses."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from corral.blobs.errors import NoSpace
from corral.blobs.progress import OnProgress, ignore_progress
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.fetcher import Fetcher
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.contract.codec import encode
from corral.contract.messages.releases import (
    CancelUpgrade,
    ReleasePackage,
    UpgradeState,
    UpgradeWorker,
    UpgradeWorkerReply,
)
from corral.contract.releases import RELEASE_DOMAIN, ReleaseOrder
from corral.kit.clock import SystemClock
from corral.kit.errors import CorralError, NotFound
from corral.kit.signing import Signer
from corral.worker.settings.node import UpgradeSettings
from corral.worker.status import WorkerStatus
from corral.worker.upgrade import versions as places
from corral.worker.upgrade.orders import CorralUpgradeOrders
from corral.worker.upgrade.release_pin import Pin, ReleasePin
from corral.worker.upgrade.trial import Trial, TrialState, write_trial
from corral.worker.upgrade.versions import COMPLETE, Versions
from tests.support.release_fleet import DEPENDENCY, small_wheel
from tests.support.waiting import until

KEY = Signer(Signer.new_private_key())
STATUS = WorkerStatus(boot_id="boot", name="barn")
WHEEL = small_wheel("2.0")
SHA256 = hashlib.sha256(WHEEL).hexdigest()


class FleetOfBlobs:
    """The blobs that controllers have."""

    def __init__(self, **blobs: bytes) -> None:
        self.blobs = {f"sha256:{digest}": data for digest, data in blobs.items()}
        self.errors: list[CorralError] = []
        self.hold: asyncio.Event | None = None
        self.asked: list[str] = []

    async def obtain(
        self,
        store: BlobStore,
        wanted: ExpectedBlob,
        sources: Sequence[str],
        token: str,
        on_progress: OnProgress = ignore_progress,
        *,
        name: str,
    ) -> Blob:
        self.asked.append(name)
        if self.hold is not None:
            await self.hold.wait()
        if self.errors:
            raise self.errors.pop(0)
        if wanted.digest not in self.blobs:
            raise NotFound(f"{name}: no source has it")
        data = self.blobs[wanted.digest]
        return await store.write(wanted.digest, lambda: iter([data]), ExpectedBlob(wanted.digest), name)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A version in a folder of versions."""
    versions = Versions(tmp_path / "corral")
    folder = versions.folder("0" * 64)
    folder.mkdir(parents=True)
    (folder / COMPLETE).touch()
    versions.make_current(folder)
    return folder


@asynccontextmanager
async def worker(
    folder: Path, program: Path, fleet: FleetOfBlobs | None = None, *, self_upgrade: str = "on"
) -> AsyncIterator[CorralUpgradeOrders]:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    pin = ReleasePin(data)
    pin.learn(KEY.public_key, ())
    store = BlobStore(folder / "blobs", Fetcher(clock=SystemClock()))
    source: Any = fleet or FleetOfBlobs(**{SHA256: WHEEL})
    settings = UpgradeSettings(self_upgrade=self_upgrade)
    orders = CorralUpgradeOrders(data, pin, source, store, settings=settings, status=STATUS, program=program)
    async with orders:
        yield orders


def order(
    *, counter: int = 1, version: str = "2.0", sha256: str = SHA256, by: Signer = KEY, attempt: int = 1, **more: object
) -> UpgradeWorker:
    signed = by.sign(encode(ReleaseOrder(counter, version, sha256, len(WHEEL))), domain=RELEASE_DOMAIN)
    return UpgradeWorker(op_id="op", attempt=attempt, signed=signed, sources=("http://c",), **more)  # type: ignore[arg-type]


async def ask(orders: CorralUpgradeOrders, asked: UpgradeWorker) -> UpgradeWorkerReply:
    return await orders.upgrade(asked, {})


async def outcome(orders: CorralUpgradeOrders, asked: UpgradeWorker) -> UpgradeWorkerReply:
    """As the controller asks: until it has ended."""
    last: list[UpgradeWorkerReply] = []

    async def ended() -> bool:
        last[:] = [await ask(orders, asked)]
        return last[0].state != "running"

    await until(ended, "the end")
    return last[0]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (order(by=Signer(Signer.new_private_key())), "not signed by the key that this worker trusts"),
        (order(counter=2), "has the counter 2, and this worker has accepted 3"),
    ],
)
async def test_a_foreign_key_and_a_replayed_counter_are_refused_for_good(
    tmp_path: Path, program: Path, asked: UpgradeWorker, reason: str
) -> None:
    fleet = FleetOfBlobs()
    async with worker(tmp_path, program, fleet) as orders:
        ReleasePin(tmp_path / "data").accept(ReleaseOrder(3, "1.9", "b" * 64, 1))
        reply = await ask(orders, asked)
    assert (reply.state, reply.is_final, reply.is_version_bad) == ("failed", True, False)
    assert reason in reply.reason
    assert fleet.asked == []


async def test_a_worker_may_refuse_and_checkouts_and_containers_do(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(tmp_path, program, self_upgrade="off") as orders:
        reply = await ask(orders, order(plan=True))
    assert (reply.state, "--self-upgrade=off" in reply.reason) == ("refused", True)
    checkout = tmp_path / "checkout" / ".venv"
    checkout.mkdir(parents=True)
    (checkout.parent / "pyproject.toml").touch()
    async with worker(tmp_path, checkout) as orders:
        reply = await ask(orders, order())
    assert (reply.state, "runs from a checkout" in reply.reason) == ("refused", True)
    mark = tmp_path / "containerenv"
    mark.touch()
    monkeypatch.setattr(places, "_CONTAINER_MARKS", (mark,))
    async with worker(tmp_path, tmp_path / "usr") as orders:
        reply = await ask(orders, order())
    assert (reply.state, "runs in a container" in reply.reason) == ("refused", True)


async def test_a_plan_changes_nothing(tmp_path: Path, program: Path) -> None:
    fleet = FleetOfBlobs()
    async with worker(tmp_path, program, fleet) as orders:
        assert (await ask(orders, order(plan=True))).state == "running"
        versions = Versions(tmp_path / "corral")
        versions.folder(SHA256).symlink_to(program)
        assert (await ask(orders, order(plan=True))).state == "done"
    assert fleet.asked == []
    assert ReleasePin(tmp_path / "data").read() == Pin(KEY.public_key)


@pytest.mark.parametrize(
    ("asked", "blobs", "reason"),
    [
        (order(version="3.0"), {SHA256: WHEEL}, "the wheel is of version 2.0, and 3.0 was signed"),
        (order(packages=(ReleasePackage("x.whl", "c" * 64, 5),)), {SHA256: WHEEL}, "not among the packages that the"),
        (order(packages=(ReleasePackage("../x.whl", DEPENDENCY.sha256, 5),)), {SHA256: WHEEL}, "names a package"),
        (order(packages=(ReleasePackage("x.whl", DEPENDENCY.sha256, 0),)), {SHA256: WHEEL}, "names a package"),
    ],
)
async def test_what_does_not_fit_the_signed_wheel_is_final(
    tmp_path: Path, program: Path, asked: UpgradeWorker, blobs: dict[str, bytes], reason: str
) -> None:
    async with worker(tmp_path, program, FleetOfBlobs(**blobs)) as orders:
        reply = await outcome(orders, asked)
    assert (reply.state, reply.is_final) == ("failed", True)
    assert reason in reply.reason
    assert ReleasePin(tmp_path / "data").read().counter == 0, "it was not accepted"


async def test_a_full_disk_while_the_wheels_are_fetched_is_tried_again(tmp_path: Path, program: Path) -> None:
    fleet = FleetOfBlobs()
    fleet.errors = [NoSpace("not enough disk for the wheel")]
    async with worker(tmp_path, program, fleet) as orders:
        first = await outcome(orders, order())
        assert (first.state, first.is_final, first.reason) == ("failed", False, "not enough disk for the wheel")
        assert (await ask(orders, order())).reason == first.reason, "the same attempt says the same"
        again = await outcome(orders, order(attempt=2))
        assert "no source has it" in again.reason


async def test_a_cancelled_transfer_ends(tmp_path: Path, program: Path) -> None:
    fleet = FleetOfBlobs(**{SHA256: WHEEL})
    fleet.hold = asyncio.Event()
    async with worker(tmp_path, program, fleet) as orders:
        assert (await ask(orders, order())).phase == "fetching"
        assert not (await orders.cancel(CancelUpgrade(op_id="other"), {})).success
        assert (await orders.cancel(CancelUpgrade(op_id="op"), {})).success
        await until(lambda: not orders._tasks.running())
    assert ReleasePin(tmp_path / "data").read().counter == 0


async def until_only(orders: CorralUpgradeOrders, name: str) -> None:
    await until(lambda: orders._tasks.running() == (name,))


async def test_a_later_order_replaces_a_transfer_and_the_earlier_may_come_again(tmp_path: Path, program: Path) -> None:
    fleet = FleetOfBlobs(**{SHA256: WHEEL})
    fleet.hold = asyncio.Event()
    async with worker(tmp_path, program, fleet) as orders:
        for attempt in (1, 2, 1):
            reply = await ask(orders, order(attempt=attempt))
            assert (reply.state, reply.phase) == (UpgradeState.RUNNING, "fetching")
            await until_only(orders, f"op:{attempt}")
        assert len(fleet.asked) == 3


async def test_the_worker_that_took_over_answers_for_the_one_before(tmp_path: Path, program: Path) -> None:
    old, new = str(program), str(tmp_path / "corral" / "versions" / SHA256[:16])
    async with worker(tmp_path, program) as orders:
        for state, expected in (
            (TrialState.RETURNED, ("failed", True, True)),
            (TrialState.REJECTED, ("failed", False, False)),
            (TrialState.DONE, ("done", False, False)),
        ):
            write_trial(tmp_path / "data", Trial(old, new, state, "it was not ready", "op:1"))
            reply = await ask(orders, order())
            assert (reply.state, reply.is_final, reply.is_version_bad) == expected
        unusable = Trial(old, new, TrialState.REJECTED, "does not work here", "op:1", is_final=True)
        write_trial(tmp_path / "data", unusable)
        reply = await ask(orders, order())
        assert (reply.state, reply.is_final, reply.is_version_bad) == ("failed", True, True)


def start_build(data: Path, name: str) -> subprocess.Popen[bytes]:
    words = ("import time; time.sleep(60)", "corral.worker.upgrade.detached", str(data), name)
    return subprocess.Popen((sys.executable, "-c", *words))


@pytest.mark.parametrize(
    ("state", "is_stopped"), [(TrialState.BUILDING, True), (TrialState.CHECKING, True), (TrialState.WATCHING, False)]
)
async def test_a_cancel_ends_a_build_and_no_take_over(
    tmp_path: Path, program: Path, state: TrialState, is_stopped: bool
) -> None:
    async with worker(tmp_path, program) as orders:
        data = tmp_path / "data"
        write_trial(data, Trial(str(program), "/new", state, order="op:1"))
        building, other = [start_build(data, name) for name in ("op:1", "other:1")]
        try:
            reply = await orders.cancel(CancelUpgrade(op_id="op"), {})
            assert reply.success is is_stopped
            if is_stopped:
                await until(lambda: building.poll() is not None, "the end of the build")
            assert [each.poll() is None for each in (building, other)] == [not is_stopped, True]
        finally:
            for each in (building, other):
                each.kill()
                each.wait()
