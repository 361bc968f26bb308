"""NVIDIA GPUs through NVML, and NVIDIA's systems-on-chip where NVML is silent.

NVML stays initialised between calls, so that a heartbeat costs microseconds. Its library is absent on most machines,
which is ordinary unless an NVIDIA card sits on the bus. On chips whose GPU works in the machine's RAM (Jetson, GB10)
NVML answers NOT_SUPPORTED when asked for memory, or is not there at all; then the RAM is the device's memory.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from corral.contract.hardware import NVIDIA, Device
from corral.worker.hardware import sysfs
from corral.worker.hardware.host import Host
from corral.worker.hardware.machine import Space
from corral.worker.hardware.usage import Held

T = TypeVar("T")
Handle = Any  # NVML's own pointer; only ever handed back to it

# GPUs without memory of their own, by the names NVML gives them ("Orin (nvgpu)", "NVIDIA Thor", "NVIDIA GB10").
_INTEGRATED = re.compile(r"\b(GB10|Thor|Orin|Xavier|Tegra|nvgpu)\b", re.IGNORECASE)
_MIG_ENABLED = 1  # NVML_DEVICE_MIG_ENABLE
_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU


class NvmlLibrary(Protocol):
    """What we use of the module `pynvml`."""

    NVMLError: type[Exception]
    NVMLError_LibraryNotFound: type[Exception]
    NVMLError_DriverNotLoaded: type[Exception]
    NVMLError_NotSupported: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle: ...
    def nvmlDeviceGetName(self, handle: Handle) -> str: ...
    def nvmlDeviceGetUUID(self, handle: Handle) -> str: ...
    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> Any: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle) -> tuple[int, int]: ...
    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> list[Any]: ...
    def nvmlDeviceGetMigMode(self, handle: Handle) -> list[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int) -> Handle: ...


def load_nvml() -> NvmlLibrary:
    """Importing the bindings costs 14 MB, so the driver's own library is looked for first. OSError: there is none."""
    if sys.platform == "linux":
        ctypes.CDLL("libnvidia-ml.so.1")
    library: NvmlLibrary = importlib.import_module("pynvml")
    return library


@dataclass(frozen=True, slots=True)
class _Opened:
    library: NvmlLibrary
    handles: dict[str, Handle]  # by Device.key


class Nvml:
    """One thread at a time; `probe.py` sees to it."""

    def __init__(self, host: Host, load: Callable[[], NvmlLibrary] = load_nvml) -> None:
        self._host = host
        self._load = load
        self._opened: _Opened | None = None
        self._broken = False  # a call failed since the last full look: the driver may have been exchanged

    def devices(self, ram: Space) -> list[Device]:
        """A full look. NVML is opened first if need be, and again if it failed in the meantime."""
        if self._broken:
            self.close()
        if self._opened is None and (library := self._initialised()) is not None:
            self._opened = _Opened(library, {})
        if self._opened is None:
            return []
        self._broken = False
        self._opened.handles.clear()
        driver = self._ask("driver version", self._opened.library.nvmlSystemGetDriverVersion) or ""
        count = self._ask("device count", self._opened.library.nvmlDeviceGetCount) or 0
        return [device for index in range(count) for device in self._look_at(index, driver, ram)]

    def refreshed(self, device: Device, ram: Space) -> Device:
        """The same device with its numbers of now; None where NVML no longer answers for it."""
        handle = self._opened.handles.get(device.key) if self._opened else None
        if handle is None:
            # A chip that NVML never showed still has the RAM.
            free = ram.available_bytes if device.unified else None
            return msgspec.structs.replace(device, free_bytes=free, temperature_c=None, utilisation=None, power_w=None)
        return msgspec.structs.replace(
            device,
            free_bytes=ram.available_bytes if device.unified else self._free(handle),
            temperature_c=self._temperature(handle),
            utilisation=self._utilisation(handle),
            power_w=self._power(handle),
        )

    def held_on(self, device: Device) -> list[Held]:
        """What each process holds of it, as far as the driver tells. Of one that works in RAM nothing is its own."""
        handle = self._opened.handles.get(device.key) if self._opened else None
        if handle is None or device.unified:
            return []
        assert self._opened is not None
        found = self._ask_quietly(self._opened.library.nvmlDeviceGetComputeRunningProcesses, handle) or []
        return [
            Held(device.vendor, device.index, device.uuid, int(process.pid), int(process.usedGpuMemory))
            for process in found
            if process.usedGpuMemory  # None where the driver does not say
        ]

    def close(self) -> None:
        if self._opened is not None:
            self._ask_quietly(self._opened.library.nvmlShutdown)  # it may have gone away already
            self._opened = None

    def _initialised(self) -> NvmlLibrary | None:
        try:
            library = self._load()
        except ImportError as error:
            self._host.notices.tell("nvml", str(error))
            return None
        except OSError as error:  # no driver; that is ordinary on a machine without NVIDIA's hardware
            self._host.notices.tell("nvml", str(error), ordinary=NVIDIA not in sysfs.pci_vendors(self._host))
            return None
        try:
            library.nvmlInit()
        except (library.NVMLError_LibraryNotFound, library.NVMLError_DriverNotLoaded) as error:
            self._host.notices.tell("nvml", str(error), ordinary=NVIDIA not in sysfs.pci_vendors(self._host))
            return None
        except library.NVMLError as error:
            # A driver updated under a running kernel lands here: a person should reboot or reload it.
            self._host.notices.tell("nvml", str(error))
            return None
        return library

    def _look_at(self, index: int, driver: str, ram: Space) -> list[Device]:
        assert self._opened is not None
        library = self._opened.library
        handle = self._ask(f"device {index}", library.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return []
        whole = self._described(handle, index, driver, ram)
        mode = self._ask_quietly(library.nvmlDeviceGetMigMode, handle)
        if mode is None or mode[0] != _MIG_ENABLED:
            return [self._kept(whole, handle)]
        # With MIG on, no process can use the whole device: its instances are what there is.
        instances = self._mig_instances(handle, whole, driver, ram)
        if not instances:
            self._host.notices.tell("nvml", f"{whole.name} ({whole.pci}) has MIG enabled but no instance")
        return instances

    def _mig_instances(self, parent: Handle, whole: Device, driver: str, ram: Space) -> list[Device]:
        assert self._opened is not None
        library = self._opened.library
        found = []
        for number in range(self._ask("MIG count", library.nvmlDeviceGetMaxMigDeviceCount, parent) or 0):
            handle = self._ask_quietly(library.nvmlDeviceGetMigDeviceHandleByIndex, parent, number)
            if handle is None:  # the slots are numbered up to the most there could be
                continue
            instance = self._described(handle, whole.index, driver, ram)
            instance = msgspec.structs.replace(
                instance,
                mig=number,
                name=instance.name or f"{whole.name} MIG {number}",
                pci=whole.pci,
                compute_capability=whole.compute_capability,
            )
            found.append(self._kept(instance, handle))
        return found

    def _kept(self, device: Device, handle: Handle) -> Device:
        assert self._opened is not None
        self._opened.handles[device.key] = handle
        return device

    def _described(self, handle: Handle, index: int, driver: str, ram: Space) -> Device:
        assert self._opened is not None
        library = self._opened.library
        name = self._ask("name", library.nvmlDeviceGetName, handle) or ""
        capability = self._ask_quietly(library.nvmlDeviceGetCudaComputeCapability, handle)
        memory, unified = self._memory(handle, name, ram)
        return Device(
            index=index,
            vendor=NVIDIA,
            name=name,
            uuid=self._ask("uuid", library.nvmlDeviceGetUUID, handle) or "",
            pci=_bus_address(self._ask_quietly(library.nvmlDeviceGetPciInfo, handle)),
            total_bytes=memory.total_bytes,
            free_bytes=memory.available_bytes,
            unified=unified,
            compute_capability=f"{capability[0]}.{capability[1]}" if capability else "",
            driver=driver,
            temperature_c=self._temperature(handle),
            utilisation=self._utilisation(handle),
            power_w=self._power(handle),
        )

    def _memory(self, handle: Handle, name: str, ram: Space) -> tuple[Space, bool]:
        """(memory, unified). By name first: some drivers answer for a GB10 with numbers that mean nothing."""
        assert self._opened is not None
        library = self._opened.library
        if _INTEGRATED.search(name):
            return ram, True
        try:
            info = library.nvmlDeviceGetMemoryInfo(handle)
        except library.NVMLError_NotSupported:
            info = None
        except library.NVMLError as error:
            self._broken = True
            self._host.notices.tell("nvml", f"memory of {name}: {error}")
            return Space(), False
        if info is not None and info.total > 0:
            return Space(int(info.total), int(info.free)), False
        # No memory of its own. A discrete card of some PC that will not tell must not pass for all of its RAM.
        shares_ram = self._host.arch == "arm64" or is_nvidia_soc(self._host)
        return (ram, True) if shares_ram else (Space(), False)

    def _free(self, handle: Handle) -> int | None:
        assert self._opened is not None
        info = self._ask("memory", self._opened.library.nvmlDeviceGetMemoryInfo, handle)
        return None if info is None else int(info.free)

    def _temperature(self, handle: Handle) -> int | None:
        assert self._opened is not None
        return self._ask_quietly(self._opened.library.nvmlDeviceGetTemperature, handle, _GPU_SENSOR)

    def _utilisation(self, handle: Handle) -> float | None:
        assert self._opened is not None
        rates = self._ask_quietly(self._opened.library.nvmlDeviceGetUtilizationRates, handle)
        return None if rates is None else min(100, int(rates.gpu)) / 100

    def _power(self, handle: Handle) -> int | None:
        assert self._opened is not None
        milliwatts = self._ask_quietly(self._opened.library.nvmlDeviceGetPowerUsage, handle)
        return None if milliwatts is None else round(milliwatts / 1000)

    def _ask(self, what: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """None on any refusal, which is told once and makes the next full look open NVML anew."""
        assert self._opened is not None
        try:
            return call(*arguments)
        except self._opened.library.NVMLError as error:
            self._broken = True
            self._host.notices.tell("nvml", f"{what}: {error}")
            return None

    def _ask_quietly(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """For what many devices do not have: temperature of a MIG instance, MIG on a desktop card."""
        assert self._opened is not None
        try:
            return call(*arguments)
        except self._opened.library.NVMLError:
            return None


def _bus_address(info: Any) -> str:
    """NVML's 00000000:0F:00.0 as sysfs writes it, 0000:0f:00.0."""
    raw = getattr(info, "busId", "")
    text = raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)
    domain, colon, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if colon else ""


def is_nvidia_soc(host: Host) -> bool:
    """A chip with NVIDIA's GPU in it: the Tegra family, or the maker's code that GB10 carries."""
    if host.text("sys/devices/soc0/family") == "Tegra":
        return True
    soc = host.text("sys/devices/soc0/soc_id") or ""
    # The code 0426 is MediaTek's, who made GB10's processor half; on their other chips there is no NVIDIA GPU.
    return soc == "jep106:0426:8901" or (soc.startswith("jep106:0426") and _has_driver(host))


def _has_driver(host: Host) -> bool:
    return any((host.root / path).exists() for path in ("proc/driver/nvidia", "dev/nvidiactl", "dev/nvhost-gpu"))


def soc_device(host: Host, ram: Space) -> Device:
    """The GPU of an NVIDIA chip that NVML does not show (containers on a Jetson often lack the library)."""
    board = host.text("proc/device-tree/model") or host.text("sys/devices/soc0/machine")
    return Device(
        index=0,
        vendor=NVIDIA,
        name=board or "NVIDIA integrated GPU",
        total_bytes=ram.total_bytes,
        free_bytes=ram.available_bytes,
        unified=True,
    )
