"""Asks Intel's kernel drivers how much memory a card has of its own: in mainline kernels sysfs does not say.

One ioctl on the card's render node, for `i915` and for `xe` (layouts: include/uapi/drm/i915_drm.h, xe_drm.h). Both tell
use only to processes with CAP_PERFMON and otherwise claim that nothing is used; that claim is taken as "not known".
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path

from corral.worker.hardware.machine import Space

Buffer = ctypes.Array[ctypes.c_char]
Ioctl = Callable[[int, int, Buffer], int]

I915_QUERY = 0xC0106479  # DRM_IOWR(DRM_COMMAND_BASE + 0x39, struct drm_i915_query)
I915_MEMORY_REGIONS = 4  # DRM_I915_QUERY_MEMORY_REGIONS
XE_DEVICE_QUERY = 0xC0286440  # DRM_IOWR(DRM_COMMAND_BASE + 0x00, struct drm_xe_device_query)
XE_MEMORY_REGIONS = 1  # DRM_XE_DEVICE_QUERY_MEM_REGIONS
DEVICE_MEMORY = 1  # I915_MEMORY_CLASS_DEVICE and DRM_XE_MEM_REGION_CLASS_VRAM
# class, instance, (reserved or page size), size, then i915: bytes unallocated, xe: bytes used
REGION = struct.Struct("<HHIQQ64x")
_HEADER_BYTES = {"i915": 16, "xe": 8}  # before the first region; the count stands first
_LONGEST_ANSWER = 64 * 1024


def local_memory(node: Path, driver: str, ioctl: Ioctl | None = None) -> Space | None:
    """The card's own memory; a total of 0 for graphics without any; None if the driver cannot be asked."""
    ask = {"i915": _ask_i915, "xe": _ask_xe}.get(driver)
    if ask is None:
        return None
    try:
        descriptor = os.open(node, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        answer = _answer(lambda data: ask(descriptor, ioctl or _kernel_ioctl, data))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if answer is None else _sum(answer, driver)


def _kernel_ioctl(descriptor: int, request: int, argument: Buffer) -> int:
    import fcntl  # here, because this module must also load where there is no such thing

    return int(fcntl.ioctl(descriptor, request, argument))


def _answer(ask: Callable[[Buffer | None], int]) -> bytes | None:
    """Asked twice, as both interfaces want it: for the length, then for the data."""
    length = ask(None)
    if not 0 < length <= _LONGEST_ANSWER:  # negative: this kernel does not know the question
        return None
    data = ctypes.create_string_buffer(length)
    return data.raw if ask(data) == length else None


def _ask_i915(descriptor: int, ioctl: Ioctl, data: Buffer | None) -> int:
    item = ctypes.create_string_buffer(struct.pack("<QiIQ", I915_MEMORY_REGIONS, _length(data), 0, _address(data)), 24)
    query = ctypes.create_string_buffer(struct.pack("<IIQ", 1, 0, _address(item)), 16)
    ioctl(descriptor, I915_QUERY, query)
    return int(struct.unpack_from("<i", item, 8)[0])


def _ask_xe(descriptor: int, ioctl: Ioctl, data: Buffer | None) -> int:
    query = ctypes.create_string_buffer(
        struct.pack("<QIIQ16x", 0, XE_MEMORY_REGIONS, _length(data), _address(data)), 40
    )
    ioctl(descriptor, XE_DEVICE_QUERY, query)
    return int(struct.unpack_from("<I", query, 12)[0])


def _length(data: Buffer | None) -> int:
    return 0 if data is None else len(data)


def _address(data: Buffer | None) -> int:
    return 0 if data is None else ctypes.addressof(data)


def _sum(answer: bytes, driver: str) -> Space | None:
    header = _HEADER_BYTES[driver]
    if len(answer) < header:
        return None
    (count,) = struct.unpack_from("<I", answer)
    end = header + count * REGION.size
    if end > len(answer):
        return None
    total = used = 0
    for kind, _instance, _, size, figure in REGION.iter_unpack(answer[header:end]):
        if kind == DEVICE_MEMORY:
            total += size
            used += size - figure if driver == "i915" else figure
    return Space(total, total - used if 0 < used <= total else None)
