"""The hardware probe: everything a worker tells about its machine, in one report.

`full()` looks everywhere and may take seconds (commands are run): at registration, and every few minutes after.
`refresh()` takes a report and brings its free numbers up to date in about a millisecond: for heartbeats.
Neither raises on account of the hardware. A driver can hang inside a call, for ever: whoever waits for the thread
should do so with a deadline. Later calls then find the drivers taken, and tell the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from corral.contract.hardware import AMD, INTEL, NVIDIA, Device, HardwareReport
from corral.worker.hardware import apple, sysfs, vulkan
from corral.worker.hardware.capability import CUDA_FOLDERS, HostFacts, detect_capability, run_file_paths
from corral.worker.hardware.host import Host
from corral.worker.hardware.machine import Space, host_ram, read_cpus, read_disk, read_ram
from corral.worker.hardware.nvidia import Nvml, NvmlLibrary, is_nvidia_soc, load_nvml, soc_device
from corral.worker.hardware.usage import DeviceGauge, Held
from corral.worker.hardware.vendor import choose_vendor, first_sighting, highest_compute_capability, memory_of

T = TypeVar("T")


class HardwareProbe:
    def __init__(
        self,
        models_dir: Path,
        *,
        env: Mapping[str, str],
        host: Host | None = None,
        nvml: Callable[[], NvmlLibrary] = load_nvml,
        ram: Callable[[], Space] = host_ram,
        patience_s: float = 2.0,
    ) -> None:
        """`host`, `nvml` and `ram` are for tests. `patience_s`: how long a call waits for another's driver call."""
        self._models_dir = models_dir
        self._host = host or Host(env)
        self._nvml = Nvml(self._host, nvml)
        self._ram = ram
        self._patience_s = patience_s
        self._drivers = threading.Lock()
        self._seen: list[Device] = []
        self._held: tuple[Held, ...] = ()

    def gauge(self, devices: Callable[[], Sequence[Device]]) -> DeviceGauge:
        """What processes hold of these, as of the last look."""
        return DeviceGauge(self._host, lambda: self._held, devices)

    def full(self) -> HardwareReport:
        host = self._host
        ram = read_ram(host, self._ram)
        # Silence is not death: while a driver hangs, its devices are the ones seen last, their numbers unknown.
        unknown = [_unmeasured(device) for device in self._seen]
        devices = self._seen = self._with_drivers(lambda: self._devices(ram), unknown)
        vendor = choose_vendor(devices, lambda: first_sighting(host))
        total_vram = memory_of(devices, vendor).total_bytes
        report = HardwareReport(
            os=host.os,
            arch=host.arch,
            cpus=read_cpus(host),
            gpu_vendor=vendor,
            gpu_compute_capability=highest_compute_capability(devices),
            capability=detect_capability(self._facts(vendor, total_vram, devices)),
            total_vram=total_vram,
        )
        return self._with_numbers_of_now(report, devices, ram)

    def refresh(self, report: HardwareReport) -> HardwareReport:
        """The same machine now. What can no longer be measured is None; what came or went waits for `full()`."""
        ram = read_ram(self._host, self._ram)
        unknown = [_unmeasured(device) for device in report.devices]
        devices = self._with_drivers(lambda: self._refreshed_all(report.devices, ram), unknown)
        return self._with_numbers_of_now(report, devices, ram)

    def close(self) -> None:
        """Lets go of NVML. A later `full()` opens it again."""
        self._with_drivers(self._nvml.close, None)

    def _with_numbers_of_now(self, report: HardwareReport, devices: Sequence[Device], ram: Space) -> HardwareReport:
        disk = read_disk(self._host, self._models_dir)
        return msgspec.structs.replace(
            report,
            devices=tuple(devices),
            available_vram=memory_of(devices, report.gpu_vendor).available_bytes,
            total_ram=ram.total_bytes,
            available_ram=ram.available_bytes,
            total_disk=disk.total_bytes or report.total_disk,
            available_disk=disk.available_bytes,
        )

    def _devices(self, ram: Space) -> list[Device]:
        host = self._host
        if host.os == "darwin":
            return self._attempt("apple", lambda: apple.devices(host, ram), [])
        found: list[Device] = self._attempt("nvml", lambda: self._nvml.devices(ram), [])
        if not found and is_nvidia_soc(host):
            found = [soc_device(host, ram)]
        cards: list[Device] = self._attempt("sysfs", lambda: sysfs.devices(host, ram), [])
        if found or cards or first_sighting(host):
            return [*found, *cards]
        return self._attempt("vulkan", lambda: vulkan.devices(host, ram), [])

    def _refreshed_all(self, devices: Sequence[Device], ram: Space) -> list[Device]:
        held: list[Held] = []
        for device in devices:
            if device.vendor == NVIDIA:
                none: list[Held] = []
                held += self._attempt("nvml", partial(self._nvml.held_on, device), none)
        self._held = tuple(held)
        return [self._refreshed(device, ram) for device in devices]

    def _refreshed(self, device: Device, ram: Space) -> Device:
        by_vendor: dict[str, Callable[[], Device]] = {
            NVIDIA: lambda: self._nvml.refreshed(device, ram),
            AMD: lambda: sysfs.refreshed(self._host, device, ram),
            INTEL: lambda: sysfs.refreshed(self._host, device, ram),
        }
        shared = msgspec.structs.replace(device, free_bytes=ram.available_bytes if device.unified else None)
        return self._attempt(device.vendor, by_vendor.get(device.vendor, lambda: shared), _unmeasured(device))

    def _attempt(self, source: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except Exception as error:  # one source's surprise must not cost the report the others
            self._host.notices.tell(source, type(error).__name__, detail=str(error))
            return otherwise

    def _with_drivers(self, read: Callable[[], T], otherwise: T) -> T:
        """One thread at a time talks to drivers. If one never comes back, the others do not pile up behind it."""
        if not self._drivers.acquire(timeout=self._patience_s):
            self._host.notices.tell("drivers", "an earlier call has not come back")
            return otherwise
        try:
            return read()
        finally:
            self._drivers.release()

    def _facts(self, vendor: str, total_vram: int, devices: Sequence[Device]) -> HostFacts:
        host = self._host
        return HostFacts(
            os=host.os,
            arch=host.arch,
            gpu_vendor=vendor,
            total_vram=total_vram,
            env=host.env,
            run_files=[host.text(path) for path in run_file_paths(host.env, host.root)],
            cuda_folders=frozenset(name for name in CUDA_FOLDERS if (host.root / "usr/local" / name).exists()),
            driver=next((device.driver for device in devices if device.vendor == NVIDIA and device.driver), ""),
        )


def _unmeasured(device: Device) -> Device:
    return msgspec.structs.replace(device, free_bytes=None, temperature_c=None, utilisation=None, power_w=None)
