"""Measures the memory of processes: the scheduler places later replicas by it. In RAM here; on accelerators as
`DeviceGauge` measures it, which knows the drivers (`worker/hardware`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil

from corral.contract.messages.replicas import ReplicaDevice
from corral.worker.hardware.usage import DeviceGauge

_HIGH_WATER = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)
_FINEST = 16 * 1024**2


def rounded_up(size_bytes: int) -> int:
    """Rounded up, large values by at most a sixteenth: slow growth then causes no new report."""
    if size_bytes <= 0:
        return 0
    step = max(_FINEST, 1 << max(0, size_bytes.bit_length() - 5))
    return -(-size_bytes // step) * step


def peak_ram_bytes(shim_pid: int) -> int:
    """The sum of the peaks of the backend and its children; where the system has no peak, the present use. Mapped
    weights count as far as they were read."""
    return sum(map(_most_of, _below(shim_pid)))


def device_bytes(
    shim_pid: int, gauge: DeviceGauge, devices: Sequence[ReplicaDevice], alone: Collection[ReplicaDevice]
) -> tuple[int, ...]:
    """The memory of the backend and its children on each device."""
    pids = {process.pid for process in _below(shim_pid)}
    return gauge.held(pids, devices, alone) if pids else ()


def _below(shim_pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(shim_pid).children(recursive=True)
    except psutil.Error:
        return []


def _most_of(process: psutil.Process) -> int:
    try:
        found = _HIGH_WATER.search(Path(f"/proc/{process.pid}/status").read_bytes())
        return int(found[1]) * 1024 if found else process.memory_info().rss
    except OSError:
        pass
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
