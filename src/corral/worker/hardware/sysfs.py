"""AMD and Intel GPUs, and who made the graphics cards, as the kernel shows them below /sys. Reads only.

A GPU inside the processor has no memory of its own: it is listed with none, so that nobody places a model on it. The
exceptions are AMD chips made for it (Strix: see `_ROCM_APUS`) and a share of RAM that the firmware cut off for the GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from corral.contract.hardware import AMD, INTEL, NVIDIA, TOO_LITTLE_VRAM_BYTES, Device
from corral.worker.hardware import drm
from corral.worker.hardware.host import Host
from corral.worker.hardware.machine import Space

VENDOR_IDS = {0x10DE: NVIDIA, 0x1002: AMD, 0x8086: INTEL}
_DISPLAY_CLASS = 0x03
_CARD = re.compile(r"card[0-9]+")  # card0-HDMI-A-1 is a connector
# Processors whose GPU AMD's ROCm supports; they are bought to run models in RAM. Others of its kind have an `amd`
# build installed that does not start on them.
_ROCM_APUS = ("gfx1150", "gfx1151")
_APU_METRICS = (2, 3)  # format revisions of gpu_metrics that only processors with a GPU have
_PCI_NAMES = ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids")


@dataclass(frozen=True, slots=True)
class Card:
    folder: Path  # /sys/class/drm/card0
    device: Path  # its PCI device
    vendor: str
    pci: str
    driver: str


def pci_vendors(host: Host) -> set[str]:
    """Makers of the graphics cards on the PCI bus, drivers or not."""
    return {
        vendor
        for device in host.listing("sys/bus/pci/devices", "*")
        if (host.number(device / "class", 16) or 0) >> 16 == _DISPLAY_CLASS
        and (vendor := VENDOR_IDS.get(host.number(device / "vendor", 16) or 0))
    }


def cards(host: Host) -> list[Card]:
    """Graphics cards of makers we know, in PCI order, the order in which their runtimes number them."""
    folders = (folder for folder in host.listing("sys/class/drm", "card*") if _CARD.fullmatch(folder.name))
    found = [card for folder in folders if (card := _card(host, (folder / "device").resolve(), folder))]
    return sorted(found, key=lambda card: card.pci)


def _card(host: Host, device: Path, folder: Path) -> Card | None:
    vendor = VENDOR_IDS.get(host.number(device / "vendor", 16) or 0)
    if vendor is None:
        return None
    return Card(folder, device, vendor, device.name, (device / "driver").resolve().name)


def devices(host: Host, ram: Space) -> list[Device]:
    """The AMD and Intel GPUs. NVIDIA's are NVML's business."""
    by_vendor = {AMD: _amd_device, INTEL: _intel_device}
    numbers = {AMD: 0, INTEL: 0}
    found = []
    for card in cards(host):
        if card.vendor in by_vendor:
            found.append(by_vendor[card.vendor](host, card, numbers[card.vendor], ram))
            numbers[card.vendor] += 1
    return found


def refreshed(host: Host, device: Device, ram: Space) -> Device:
    """The same device with its numbers of now; None where the kernel no longer shows it."""
    folder = host.root / "sys/bus/pci/devices" / device.pci
    card = _card(host, folder.resolve(), next(iter(host.listing(folder, "drm/card*")), folder))
    if card is None:
        return msgspec.structs.replace(device, free_bytes=None, temperature_c=None, utilisation=None, power_w=None)
    return msgspec.structs.replace(
        device,
        free_bytes=_free(host, card, device, ram) if device.total_bytes else None,
        temperature_c=_temperature(host, card),
        utilisation=_busy(host, card),
        power_w=_power(host, card),
    )


def _free(host: Host, card: Card, device: Device, ram: Space) -> int | None:
    if card.vendor == INTEL:
        memory = _intel_memory(host, card)
        return memory.available_bytes if memory else None
    if device.unified:
        return _shared(host, card, ram).available_bytes
    return _measured(host, card, "vram").available_bytes


def _amd_device(host: Host, card: Card, index: int, ram: Space) -> Device:
    memory, unified = _amd_memory(host, card, ram)
    serial = host.text(card.device / "unique_id") or ""
    return Device(
        index=index,
        vendor=AMD,
        name=host.text(card.device / "product_name") or _pci_name(host, card) or "AMD GPU",
        uuid=f"GPU-{serial}" if serial.strip("0") else "",
        pci=card.pci,
        total_bytes=memory.total_bytes,
        free_bytes=memory.available_bytes,
        unified=unified,
        driver=card.driver,
        temperature_c=_temperature(host, card),
        utilisation=_busy(host, card),
        power_w=_power(host, card),
    )


def _amd_memory(host: Host, card: Card, ram: Space) -> tuple[Space, bool]:
    """(memory, unified). Inside a processor ROCm works in the firmware's share or in RAM, whichever is larger."""
    own = _measured(host, card, "vram")
    if not _is_apu(host, card):
        return own, False
    if _gfx(host, card) in _ROCM_APUS:
        shared = _shared(host, card, ram)
        if shared.total_bytes > own.total_bytes:
            return shared, True
    # The usual share is half a gigabyte for the screen; one this large was set by a person, for models.
    return (own, False) if own.total_bytes > TOO_LITTLE_VRAM_BYTES else (Space(), True)


def _measured(host: Host, card: Card, pool: str) -> Space:
    total = host.number(card.device / f"mem_info_{pool}_total") or 0
    used = host.number(card.device / f"mem_info_{pool}_used")
    return Space(total, None if used is None or not total else max(0, total - used))


def _shared(host: Host, card: Card, ram: Space) -> Space:
    """What the driver lets the GPU take of the RAM. Free is what both the driver and the RAM have left."""
    pool = _measured(host, card, "gtt")
    free = [size for size in (pool.available_bytes, ram.available_bytes) if size is not None]
    return Space(pool.total_bytes, min(free, default=None))


def _is_apu(host: Host, card: Card) -> bool:
    """Whether the GPU is part of the processor, told by the format of its measurements."""
    if not _awake(host, card):  # such a GPU never sleeps by itself
        return False
    try:
        with (card.device / "gpu_metrics").open("rb") as metrics:
            header = metrics.read(4)  # u16 size, u8 format revision, u8 content revision
    except OSError:
        return False
    return len(header) == 4 and header[2] in _APU_METRICS


def _awake(host: Host, card: Card) -> bool:
    """Reading a sensor of a sleeping card would wake it, and a heartbeat would keep it so for ever."""
    return host.text(card.device / "power/runtime_status") in (None, "active", "unsupported")


def _gfx(host: Host, card: Card) -> str:
    """The instruction set, gfx1151, as the compute driver knows it."""
    minors = {node.name.removeprefix("renderD") for node in host.listing(card.device, "drm/renderD*")}
    for node in host.listing("sys/class/kfd/kfd/topology/nodes", "*/properties"):
        properties = dict(line.split(" ", 1) for line in (host.text(node) or "").splitlines() if " " in line)
        version = properties.get("gfx_target_version", "")
        if properties.get("drm_render_minor") in minors and version.isdigit():
            major, minor, stepping = int(version) // 10000, int(version) // 100 % 100, int(version) % 100
            return f"gfx{major}{minor:x}{stepping:x}"
    return ""


def _intel_device(host: Host, card: Card, index: int, ram: Space) -> Device:
    memory = _intel_memory(host, card)
    # Graphics inside the processor always sit at 00:02.0; a card may, too, once it is passed through to a guest.
    integrated = memory.total_bytes == 0 if memory else card.pci.endswith(":00:02.0")
    if memory is None and not integrated:
        host.notices.tell(card.pci, "the driver does not say how much memory this Intel card has")
    return Device(
        index=index,
        vendor=INTEL,
        name=_pci_name(host, card) or "Intel GPU",
        pci=card.pci,
        total_bytes=memory.total_bytes if memory else 0,
        free_bytes=memory.available_bytes if memory and memory.total_bytes else None,
        unified=integrated,
        driver=card.driver,
        temperature_c=_temperature(host, card),
    )


def _intel_memory(host: Host, card: Card) -> Space | None:
    """From the driver if we may ask it, else from the files that some kernels have; None if neither knows."""
    for node in host.listing(card.device, "drm/renderD*"):
        if (memory := drm.local_memory(host.root / "dev/dri" / node.name, card.driver)) is not None:
            return memory
    for folder in (card.folder, card.device):  # Intel's own i915 packages
        if total := host.number(folder / "lmem_total_bytes"):
            return Space(total, host.number(folder / "lmem_avail_bytes"))
    tiles = [host.number(size) or 0 for size in host.listing(card.device, "tile*/**/physical_vram_size_bytes")]
    return Space(sum(tiles), None) if any(tiles) else None


def _temperature(host: Host, card: Card) -> int | None:
    sensors = host.listing(card.device, "hwmon/hwmon*/temp1_input") if _awake(host, card) else []
    readings = [thousandths for sensor in sensors if (thousandths := host.number(sensor)) is not None]
    return round(max(readings) / 1000) if readings else None


def _power(host: Host, card: Card) -> int | None:
    """Newer chips have only the value of the moment. Intel's drivers count energy instead, which is not read here."""
    if not _awake(host, card):
        return None
    for name in ("power1_average", "power1_input"):
        for sensor in host.listing(card.device, f"hwmon/hwmon*/{name}"):
            if (microwatts := host.number(sensor)) is not None:
                return round(microwatts / 1e6)
    return None


def _busy(host: Host, card: Card) -> float | None:
    percent = host.number(card.device / "gpu_busy_percent") if _awake(host, card) else None
    return None if percent is None else min(100, max(0, percent)) / 100


def _pci_name(host: Host, card: Card) -> str:
    """The marketing name from the system's list of PCI ids, where one is installed."""
    vendor, device = host.number(card.device / "vendor", 16), host.number(card.device / "device", 16)
    if vendor is None or device is None:
        return ""
    for path in _PCI_NAMES:
        if (listed := host.text(path)) is not None:
            return _named(listed, f"{vendor:04x}", f"{device:04x}")
    return ""


def _named(listed: str, vendor: str, device: str) -> str:
    _, found, rest = f"\n{listed}".partition(f"\n{vendor}  ")
    if not found:
        return ""
    maker, _, lines = rest.partition("\n")
    for line in lines.split("\n"):
        if line.startswith(f"\t{device}  "):
            return f"{maker} {line[7:].strip()}"
        if line and not line.startswith(("\t", "#")):  # the next maker
            break
    return ""
