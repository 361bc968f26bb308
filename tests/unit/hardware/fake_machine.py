"""A machine made of files: a root folder laid out as the kernel lays out /sys and /proc, commands that are real
scripts, and an NVML that has the real one's method names and raises the real one's errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from corral.worker.hardware.host import Host
from corral.worker.hardware.machine import Space
from corral.worker.hardware.probe import HardwareProbe

GIB = 1024**3
RAM = Space(64 * GIB, 48 * GIB)


class FakeMachine:
    def __init__(self, root: Path, *, system: str = "Linux", machine: str = "x86_64") -> None:
        self.root = root
        self.system = system
        self.machine = machine
        self.env: dict[str, str] = {"PATH": str(root / "usr/bin")}
        self.nvml = FakeNvml(installed=False)
        self.ram = RAM
        (root / "models").mkdir(parents=True)

    def host(self, command_timeout_s: float = 30.0) -> Host:
        return Host(self.env, self.root, self.system, self.machine, command_timeout_s)

    def probe(self, *, ram: Callable[[], Space] | None = None, patience_s: float = 2.0) -> HardwareProbe:
        return HardwareProbe(
            self.root / "models",
            env=self.env,
            host=self.host(),
            nvml=lambda: self.nvml,
            ram=ram or (lambda: self.ram),
            patience_s=patience_s,
        )

    def write(self, path: str | Path, content: str | bytes | int = "") -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
        return target

    def command(self, name: str, script: str) -> None:
        path = self.write(f"usr/bin/{name}", f"#!/bin/sh\n{script}")
        path.chmod(0o755)

    def card(
        self,
        number: int,
        pci: str,
        *,
        vendor: str,
        device: str = "0x0001",
        driver: str = "",
        files: Mapping[str, str | bytes | int] | None = None,
    ) -> Path:
        """A graphics card as sysfs shows it: a PCI device, linked from the bus and from /sys/class/drm."""
        folder = Path("sys/devices/pci0000:00") / pci
        self.write(folder / "vendor", vendor)
        self.write(folder / "device", device)
        self.write(folder / "class", "0x030000")
        for name, content in (files or {}).items():
            self.write(folder / name, content)
        self.write(folder / f"drm/card{number}/uevent")
        self.write(folder / f"drm/renderD{128 + number}/uevent")
        if driver:
            (self.root / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
            self._link(folder / "driver", Path("sys/bus/pci/drivers") / driver)
        self._link(Path("sys/bus/pci/devices") / pci, folder)
        self._link(folder / f"drm/card{number}/device", folder)
        self._link(Path(f"sys/class/drm/card{number}"), folder / f"drm/card{number}")
        self.write(f"sys/class/drm/card{number}-HDMI-A-1/status", "disconnected")
        return self.root / folder

    def _link(self, place: Path, target: Path) -> None:
        link = self.root / place
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.root / target, link.parent))


@dataclass
class FakeGpu:
    name: str = "NVIDIA GeForce RTX 4090"
    uuid: str = "GPU-4090"
    total: int = 24 * GIB
    used: int = 4 * GIB
    capability: tuple[int, int] = (8, 9)
    bus_id: str | bytes = "00000000:65:00.0"
    memory_error: Exception | None = None
    mig: list[FakeGpu | None] | None = None  # None = this device cannot do MIG at all
    processes: dict[int, int | None] = field(default_factory=dict)  # by pid: what it holds; None = not told


@dataclass
class FakeNvml:
    """Handles are the FakeGpu objects themselves."""

    gpus: list[FakeGpu] = field(default_factory=list)
    installed: bool = True
    init_error: Exception | None = None
    opened: int = 0

    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_NotFound = pynvml.NVMLError_NotFound

    def nvmlInit(self) -> None:
        if not self.installed:
            raise pynvml.NVMLError_LibraryNotFound()
        if self.init_error is not None:
            raise self.init_error
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self._check()
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._check()
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        self._check()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._check()
        return self.gpus[index]

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:
        self._check()
        return handle.name

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:
        self._check()
        return handle.uuid

    def nvmlDeviceGetPciInfo(self, handle: FakeGpu) -> Any:
        self._check()
        return SimpleNamespace(busId=handle.bus_id)

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> Any:
        self._check()
        if handle.memory_error is not None:
            raise handle.memory_error
        return SimpleNamespace(total=handle.total, used=handle.used, free=handle.total - handle.used)

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeGpu) -> tuple[int, int]:
        self._check()
        return handle.capability

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        self._check()
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 44

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        self._check()
        if handle.uuid.startswith("MIG-"):
            raise pynvml.NVMLError_NotSupported()
        return 285_600

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> Any:
        self._check()
        if handle.uuid.startswith("MIG-"):
            raise pynvml.NVMLError_NotSupported()
        return SimpleNamespace(gpu=37, memory=5)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeGpu) -> list[Any]:
        self._check()
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes.items()]

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        self._check()
        if handle.mig is None:
            raise pynvml.NVMLError_NotSupported()
        return [pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        self._check()
        return len(handle.mig or [])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeGpu:
        self._check()
        found = (handle.mig or [])[index]
        if found is None:
            raise pynvml.NVMLError_NotFound()
        return found

    def _check(self) -> None:
        if self.opened < 1:
            raise pynvml.NVMLError_Uninitialized()
