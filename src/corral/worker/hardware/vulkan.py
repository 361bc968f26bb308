"""GPUs that only Vulkan knows (boards with Mali, Adreno, V3D; rare makers), from what `vulkaninfo` prints.

The last resort: it is a whole program run, so only the full probe asks it. Software renderers are not GPUs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from corral.contract.hardware import VULKAN, Device
from corral.worker.hardware.host import Host
from corral.worker.hardware.machine import Space

_GPU = re.compile(r"^GPU(\d+):\s*$", re.MULTILINE)
_HEAP = re.compile(r"^\s*memoryHeaps\[\d+\]:\s*$", re.MULTILINE)
_INTEGRATED = "PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU"
_REAL = (_INTEGRATED, "PHYSICAL_DEVICE_TYPE_DISCRETE_GPU", "PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU")


@dataclass(frozen=True, slots=True)
class VulkanGpu:
    index: int
    name: str
    integrated: bool
    total_bytes: int
    free_bytes: int | None  # None where the driver does not keep a budget


def devices(host: Host, ram: Space) -> list[Device]:
    return [_device(gpu, ram) for gpu in parse_vulkaninfo(host.run("vulkaninfo") or "")]


def _device(gpu: VulkanGpu, ram: Space) -> Device:
    free = [size for size in (gpu.free_bytes, ram.available_bytes) if size is not None]
    return Device(
        index=gpu.index,
        vendor=VULKAN,
        name=gpu.name,
        total_bytes=gpu.total_bytes,
        free_bytes=min(free, default=None) if gpu.integrated else gpu.free_bytes,
        unified=gpu.integrated,
    )


def parse_vulkaninfo(text: str) -> list[VulkanGpu]:
    pieces = _GPU.split(text)
    found = [_gpu(int(number), block) for number, block in zip(pieces[1::2], pieces[2::2], strict=True)]
    # Sections before the properties may head a block with the same GPU0: and no type in it.
    return [gpu for gpu in found if gpu is not None]


def _gpu(index: int, block: str) -> VulkanGpu | None:
    kind = _value(block, "deviceType")
    total, free = 0, 0
    budgeted = True
    for heap in _HEAP.split(block.partition("memoryTypes:")[0])[1:]:
        if "MEMORY_HEAP_DEVICE_LOCAL_BIT" in heap:
            total += _number(heap, "size") or 0
            budget = _number(heap, "budget")
            budgeted = budgeted and bool(budget)
            free += budget or 0
    if kind not in _REAL or not total:
        return None
    return VulkanGpu(
        index,
        _value(block, "deviceName") or "Vulkan GPU",
        kind == _INTEGRATED,
        total,
        min(total, free) if budgeted else None,
    )


def _value(block: str, key: str) -> str:
    found = re.search(rf"^\s*{key}\s*=\s*(.+?)\s*$", block, re.MULTILINE)
    return found[1] if found else ""


def _number(block: str, key: str) -> int | None:
    digits = re.match(r"\d+", _value(block, key))
    return int(digits[0]) if digits else None
