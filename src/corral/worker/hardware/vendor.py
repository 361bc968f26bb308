"""Whose GPU the node reports, and how much memory that is. Pure, except for `sightings`, which looks.

LocalAI's order of detection (docs/reference/wire/gallery.md#gpu-vendor) names the first maker seen, which may be the
maker of a display chip beside the card that does the work. So a maker whose devices have memory worth using comes
first; only without one does the plain order decide. And only that maker's memory is summed: builds for one maker cannot
use another's cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set

from corral.contract.hardware import AMD, APPLE, INTEL, NVIDIA, TOO_LITTLE_VRAM_BYTES, VULKAN, Device
from corral.worker.hardware import sysfs
from corral.worker.hardware.host import Host
from corral.worker.hardware.machine import Space
from corral.worker.hardware.nvidia import is_nvidia_soc

PRIORITY = (NVIDIA, AMD, INTEL, VULKAN, APPLE)
_TOOLS = (("nvidia-smi", NVIDIA), ("rocm-smi", AMD), ("xpu-smi", INTEL), ("intel_gpu_top", INTEL))


def sightings(host: Host) -> Iterator[Set[str]]:
    """The makers that each source sees, in the contract's order. Lazy: later sources cost more."""
    yield sysfs.pci_vendors(host)
    yield {card.vendor for card in sysfs.cards(host)}
    yield set(next(([maker] for tool, maker in _TOOLS if host.which(tool)), []))
    yield {NVIDIA} if is_nvidia_soc(host) else set()


def first_sighting(host: Host) -> str:
    """The contract's answer; empty if no source saw a maker."""
    return next((best_of(makers) for makers in sightings(host) if makers), "")


def best_of(makers: Set[str]) -> str:
    return next((maker for maker in PRIORITY if maker in makers), "")


def choose_vendor(devices: Sequence[Device], first_seen: Callable[[], str]) -> str:
    """The maker with memory worth using, else the first one seen, else that of whatever device there is."""
    usable = {maker for maker in PRIORITY if memory_of(devices, maker).total_bytes > TOO_LITTLE_VRAM_BYTES}
    return best_of(usable) or first_seen() or best_of({device.vendor for device in devices})


def memory_of(devices: Sequence[Device], vendor: str) -> Space:
    """The sum over one maker's cards. Memory that is the machine's RAM counts once, and only if there is no card."""
    theirs = [device for device in devices if device.vendor == vendor and device.total_bytes]
    cards = [device for device in theirs if not device.unified]
    if cards:
        free = [device.free_bytes for device in cards]
        known = [size for size in free if size is not None]
        return Space(sum(card.total_bytes for card in cards), sum(known) if len(known) == len(free) else None)
    if not theirs:
        return Space()
    widest = max(theirs, key=lambda device: device.total_bytes)
    return Space(widest.total_bytes, widest.free_bytes)


def highest_compute_capability(devices: Sequence[Device]) -> str:
    """As upstream tells it: the newest of NVIDIA's on this machine. By number: 12.1 is above 9.0."""
    known = [device.compute_capability for device in devices if device.vendor == NVIDIA and device.compute_capability]
    return max(known, key=lambda text: tuple(int(part) for part in text.split(".")), default="")
