"""What a process was seen to hold, and how finely that is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import cast

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.messages.replicas import ReplicaDevice
from corral.worker.hardware.usage import DeviceGauge
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.table import Entry
from corral.worker.supervisor.usage import device_bytes, peak_ram_bytes, rounded_up

MIB = 1024**2


@pytest.mark.parametrize(
    ("seen", "told"),
    [(0, 0), (-1, 0), (1, 16 * MIB), (16 * MIB, 16 * MIB), (17 * MIB, 32 * MIB), (1000 * MIB, 1024 * MIB)],
)
def test_it_is_rounded_up(seen: int, told: int) -> None:
    assert rounded_up(seen) == told


@given(st.integers(1, 1 << 46))
def test_by_little_and_never_down(seen: int) -> None:
    told = rounded_up(seen)
    assert seen <= told <= seen + max(16 * MIB, seen // 16)
    assert rounded_up(told) == told


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
sys.stdin.readline()
child.kill()
child.wait()
child.stdout.close()
"""
CHILD = """
import time
held = bytearray(80 * 1024**2)
del held
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def shim() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose child held much for a moment."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        yield parent
    finally:
        parent.communicate(b"\n", timeout=30)


@pytest.mark.skipif(sys.platform != "linux", reason="only there the system keeps the most")
def test_what_it_held_for_a_moment_counts(shim: subprocess.Popen[bytes]) -> None:
    assert 80 * MIB < peak_ram_bytes(shim.pid) < 250 * MIB


def test_one_that_is_gone_holds_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=30)
    assert peak_ram_bytes(gone.pid) == 0


class FakeGauge:
    """A gauge that remembers the measured processes."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def held(
        self, pids: Collection[int], devices: Sequence[ReplicaDevice], alone: Collection[ReplicaDevice] = ()
    ) -> tuple[int, ...]:
        self.pids = set(pids)
        return tuple(MIB if device in alone else 2 * MIB for device in devices)


def test_on_devices_the_backend_and_its_children_count_and_its_shim_does_not(shim: subprocess.Popen[bytes]) -> None:
    first, second = ReplicaDevice("nvidia", 0, "GPU-a"), ReplicaDevice("nvidia", 1, "GPU-b")
    gauge = FakeGauge()
    assert device_bytes(shim.pid, cast(DeviceGauge, gauge), (first, second), [second]) == (2 * MIB, MIB)
    assert gauge.pids == {child.pid for child in psutil.Process(shim.pid).children()}


async def test_heartbeats_tell_the_most_on_each_device() -> None:
    entry = Entry(ProcessSpec(backend="b", directory="d"), "p", "token")
    assert entry.report().device_peak_bytes == ()
    for seen in ((0, 0), (3, 1), (2, 4), ()):
        entry.record_peak(seen)
    assert entry.report().device_peak_bytes == (3, 4)
