"""The agent's small parts: description, readiness, measuring that may hang, waiting, and where the bus is."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from corral.bus.api import BusCredentials, FixedCredentials
from corral.contract.hardware import Device, HardwareReport
from corral.contract.messages.nodes import BusAccess, IngressOffer, NodeRegistered
from corral.kit.clock import SystemClock
from corral.kit.settings import read_settings
from corral.worker.addresses import Told
from corral.worker.agent.bus_access import BusOpener
from corral.worker.agent.describe import describe
from corral.worker.agent.machine import Machine
from corral.worker.agent.standing import Standing
from corral.worker.agent.stop import CannotGoOn
from corral.worker.agent.waiting import alongside, unless_set
from corral.worker.settings import WorkerSettings


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
    said = describe(given, report, Told("h:50051", "h:50050", "h"), IngressOffer(port=50050))
    assert (said.total_vram, said.available_vram, said.total_ram, said.available_ram) == (8, 5, 64, 32)
    assert (said.gpu_vendor, said.capability, said.gpu_compute_capability) == ("nvidia", "nvidia-l4t", "8.7")
    assert (said.platform, said.vram_budget, said.max_replicas_per_model) == ("linux/arm64", "80%", 2)
    assert (said.address, said.http_address) == ("h:50051", "h:50050")
    assert said.labels == {"a": "b", "node.replica-slots": "2"}
    assert len(said.devices) == 1


def test_memory_that_cannot_be_measured_is_all_free_at_the_start_only(tmp_path: Path) -> None:
    report = HardwareReport(os="linux", arch="amd64", total_vram=8)
    said = describe(settings(tmp_path), report, Told(), IngressOffer())
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
    standing = Standing("b", "w1", status=status, leaving=leaving, bus_connected=lambda: bus)
    assert standing.not_ready() == why


class StuckProbe:
    """A driver that hangs inside its first call, and is left out of the second."""

    def __init__(self) -> None:
        self.calls = 0
        self.let_go = threading.Event()

    def full(self) -> HardwareReport:
        self.calls += 1
        if self.calls == 1:
            self.let_go.wait(30)
        return HardwareReport(os="linux", arch="amd64", total_ram=self.calls)

    def refresh(self, report: HardwareReport) -> HardwareReport:
        raise RuntimeError("the driver is gone")


async def test_a_hanging_driver_holds_up_nobody() -> None:
    probe = StuckProbe()
    machine = Machine(probe, SystemClock(), refresh_every_s=0.001, patience_s=0.05)
    await machine.look()
    assert machine.report.total_ram == 2
    async with alongside(machine.run()):  # every refresh fails from now on
        await asyncio.sleep(0.02)
    assert machine.report.total_ram == 2
    probe.let_go.set()


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
        raise CannotGoOn("no")

    assert await unless_set(stop, quick()) == 2
    with pytest.raises(CannotGoOn):
        await unless_set(stop, failing())
    asyncio.get_running_loop().call_soon(stop.set)
    assert await unless_set(stop, endless()) is None
    assert cleaned.is_set()
    assert await unless_set(stop, quick()) is None


async def test_where_the_bus_is(tmp_path: Path) -> None:
    source = FixedCredentials(BusCredentials())
    with pytest.raises(CannotGoOn, match="LOCALAI_NATS_URL"):
        BusOpener(settings(tmp_path), SystemClock())(NodeRegistered(), source)
    reply = NodeRegistered(bus=BusAccess(urls=("tls://bus:4222",), ca="PEM", inbox="_INBOX_n"))
    BusOpener(settings(tmp_path), SystemClock())(reply, source)
    assert (tmp_path / "bus-ca.crt").read_text() == "PEM"
