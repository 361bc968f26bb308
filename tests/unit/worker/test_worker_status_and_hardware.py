"""The description of a node, its readiness, a hardware driver that hangs, and the address of the bus."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import cast

import pytest

from corral.bus.api import BusCredentials, FixedCredentials
from corral.contract.hardware import Device, HardwareReport
from corral.contract.messages.nodes import BusAccess, IngressOffer, NodeRegistered
from corral.kit.clock import SystemClock
from corral.kit.settings import read_settings
from corral.kit.tasks import background, run_until
from corral.kit.threads import in_daemon_thread
from corral.worker.agent.join.bus_access import BusOpener
from corral.worker.agent.join.registration import AdvertisedAddresses, describe_node
from corral.worker.hardware.monitor import HardwareMonitor
from corral.worker.hardware.probe import HardwareProbe
from corral.worker.settings import WorkerSettings
from corral.worker.status import FatalError, WorkerStatus
from corral.worker.system.users import BackendUser
from tests.support.waiting import until


def settings(data: Path, **env: str) -> WorkerSettings:
    return read_settings(WorkerSettings, flags={"data": str(data)}, env=env)


def test_the_registration_carries_the_machine(tmp_path: Path) -> None:
    report = HardwareReport(
        os="linux",
        arch="arm64",
        gpu_vendor="nvidia",
        gpu_compute_capability="8.7",
        capability="nvidia-l4t",
        devices=(Device(index=0, vendor="nvidia", total_bytes=8),),
        total_vram=8,
        available_vram=5,
        total_ram=64,
        available_ram=32,
        total_disk=100,
        available_disk=40,
    )
    given = settings(tmp_path, CORRAL_VRAM_BUDGET="80%", CORRAL_MAX_REPLICAS_PER_MODEL="2", CORRAL_LABELS="a=b")
    said = describe_node(
        given.node, report, AdvertisedAddresses("h:50051", "h:50050", "h"), IngressOffer(port=50050), BackendUser()
    )
    assert (said.total_vram, said.available_vram, said.total_ram, said.available_ram) == (8, 5, 64, 32)
    assert (said.gpu_vendor, said.capability, said.gpu_compute_capability) == ("nvidia", "nvidia-l4t", "8.7")
    assert (said.platform, said.vram_budget, said.max_replicas_per_model) == ("linux/arm64", "80%", 2)
    assert (said.address, said.http_address) == ("h:50051", "h:50050")
    assert said.labels == {"a": "b", "node.replica-slots": "2"}
    assert len(said.devices) == 1


def test_memory_that_cannot_be_measured_is_all_free_at_the_start_only(tmp_path: Path) -> None:
    report = HardwareReport(os="linux", arch="amd64", total_vram=8)
    said = describe_node(settings(tmp_path).node, report, AdvertisedAddresses(), IngressOffer(), BackendUser())
    assert said.available_vram == 8


@pytest.mark.parametrize(
    ("status", "leaving", "bus", "why"),
    [
        ("", False, False, "not registered yet"),
        ("pending", False, False, "waiting for approval"),
        ("healthy", False, False, "the bus is down"),
        ("healthy", False, True, None),
        ("draining", False, True, None),
        ("healthy", True, True, "leaving"),
    ],
)
def test_readiness(status: str, leaving: bool, bus: bool, why: str | None) -> None:
    worker = WorkerStatus("b", "w1", status=status, leaving=leaving, is_bus_connected=lambda: bus)
    assert worker.not_ready_reason() == why


class StuckProbe:
    """A driver that hangs inside its first call, and is left out of those after it."""

    def __init__(self) -> None:
        self.hanging = threading.Lock()
        self.let_go = threading.Event()
        self.calls: list[str] = []

    def full(self) -> HardwareReport:
        self.calls.append("full")
        if self.hanging.acquire(blocking=False):
            self.let_go.wait(60)
            return HardwareReport(os="linux", arch="amd64", total_ram=1)
        return HardwareReport(os="linux", arch="amd64", total_ram=2)

    def refresh(self, report: HardwareReport) -> HardwareReport:
        self.calls.append("refresh")
        raise RuntimeError("the driver is gone")


async def test_a_hanging_driver_holds_up_nobody() -> None:
    probe = StuckProbe()
    monitor = HardwareMonitor(cast(HardwareProbe, probe), SystemClock(), refresh_every_s=0.001, timeout_s=0.05)

    async def looked() -> bool:
        await monitor.measure_all()
        return monitor.report.total_ram == 2

    try:
        await monitor.measure_all()
        await until(lambda: probe.calls == ["full", "full"], "a second try within the same look")
        await until(looked, "a report")  # a busy machine may need longer than our patience for the best of probes
        async with background(monitor.run()):
            await until(lambda: probe.calls.count("refresh") > 2, "refreshes, all of which fail")
        assert monitor.report.total_ram == 2
    finally:
        probe.let_go.set()


def test_a_driver_that_answers_when_all_is_over_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do so in the very moment the loop is closed."""
    let_go, failures = threading.Event(), list[object]()
    monkeypatch.setattr(threading, "excepthook", failures.append)

    async def give_up() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "is_closed", lambda: False)  # it was not, when it was asked
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await in_daemon_thread(lambda: let_go.wait(60), name="hardware probe")

    before = set(threading.enumerate())
    asyncio.run(give_up())
    [late] = [each for each in threading.enumerate() if each not in before and each.name == "hardware probe"]
    let_go.set()
    late.join(60)
    assert failures == []


async def test_work_ends_when_told_to() -> None:
    stop, cleaned = asyncio.Event(), asyncio.Event()

    async def endless() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()
        return 1

    async def quick() -> int:
        return 2

    async def failing() -> int:
        raise FatalError("no")

    assert await run_until(stop, quick()) == 2
    with pytest.raises(FatalError):
        await run_until(stop, failing())
    asyncio.get_running_loop().call_soon(stop.set)
    assert await run_until(stop, endless()) is None
    assert cleaned.is_set()
    assert await run_until(stop, quick()) is None


async def test_where_the_bus_is(tmp_path: Path) -> None:
    source = FixedCredentials(BusCredentials())
    with pytest.raises(FatalError, match="LOCALAI_NATS_URL"):
        BusOpener(settings(tmp_path).bus, tmp_path, SystemClock())(NodeRegistered(), source)
    reply = NodeRegistered(bus=BusAccess(urls=("tls://bus:4222",), ca="PEM", inbox="_INBOX_n"))
    BusOpener(settings(tmp_path).bus, tmp_path, SystemClock())(reply, source)
    assert (tmp_path / "bus-ca.crt").read_text() == "PEM"
