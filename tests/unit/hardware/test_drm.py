"""The two ioctls that tell an Intel card's memory, against a kernel that answers as the headers say."""

from __future__ import annotations

import ctypes
import errno
import struct
from pathlib import Path

import pytest

from corral.worker.hardware.drm import REGION, Buffer, local_memory
from corral.worker.hardware.machine import Space

GIB = 1024**3
SYSTEM, DEVICE = 0, 1


def region(kind: int, size: int, figure: int) -> bytes:
    return struct.pack("<HHIQQ", kind, 0, 0, size, figure) + bytes(64)


class FakeKernel:
    """Answers DRM_IOCTL_I915_QUERY and DRM_IOCTL_XE_DEVICE_QUERY out of process memory, as the kernel would."""

    def __init__(self, *regions: bytes, announced: int | None = None) -> None:
        self.regions = regions
        self.announced = len(regions) if announced is None else announced

    def ioctl(self, descriptor: int, request: int, argument: Buffer) -> int:
        if request == 0xC0106479:
            self._i915(argument)
        elif request == 0xC0286440:
            self._xe(argument)
        else:
            raise OSError(errno.ENOTTY, "not a DRM device")
        return 0

    def _i915(self, query: Buffer) -> None:
        assert len(query) == 16
        items, flags, item_address = struct.unpack("<IIQ", query)
        assert (items, flags) == (1, 0)
        item = (ctypes.c_char * 24).from_address(item_address)
        query_id, length, _, data_address = struct.unpack("<QiIQ", item)
        assert query_id == 4
        answer = struct.pack("<IIII", self.announced, 0, 0, 0) + b"".join(self.regions)
        struct.pack_into("<i", item, 8, self._put(answer, length, data_address))

    def _xe(self, query: Buffer) -> None:
        assert len(query) == 40
        extensions, kind, length, data_address = struct.unpack_from("<QIIQ", query)
        assert (extensions, kind) == (0, 1)
        answer = struct.pack("<II", self.announced, 0) + b"".join(self.regions)
        struct.pack_into("<I", query, 12, self._put(answer, length, data_address))

    def _put(self, answer: bytes, length: int, address: int) -> int:
        if length:
            assert length == len(answer)
            ctypes.memmove(address, answer, length)
        return len(answer)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    path = tmp_path / "renderD128"
    path.touch()
    return path


def test_a_region_is_as_long_as_the_kernels() -> None:
    assert REGION.size == 88


def test_i915_tells_size_and_what_is_unallocated(node: Path) -> None:
    kernel = FakeKernel(region(SYSTEM, 64 * GIB, 64 * GIB), region(DEVICE, 16 * GIB, 10 * GIB))
    assert local_memory(node, "i915", kernel.ioctl) == Space(16 * GIB, 10 * GIB)


def test_xe_tells_size_and_use_of_each_tile(node: Path) -> None:
    kernel = FakeKernel(region(SYSTEM, 64 * GIB, GIB), region(DEVICE, 12 * GIB, GIB), region(DEVICE, 12 * GIB, 0))
    assert local_memory(node, "xe", kernel.ioctl) == Space(24 * GIB, 23 * GIB)


@pytest.mark.parametrize(("driver", "untold"), [("i915", 16 * GIB), ("xe", 0)])
def test_without_the_right_to_know_nothing_seems_used_and_that_is_not_believed(
    node: Path, driver: str, untold: int
) -> None:
    kernel = FakeKernel(region(DEVICE, 16 * GIB, untold))
    assert local_memory(node, driver, kernel.ioctl) == Space(16 * GIB, None)


@pytest.mark.parametrize("driver", ["i915", "xe"])
def test_graphics_without_memory_of_their_own_say_so(node: Path, driver: str) -> None:
    assert local_memory(node, driver, FakeKernel(region(SYSTEM, 64 * GIB, 0)).ioctl) == Space(0, None)


@pytest.mark.parametrize("driver", ["i915", "xe"])
def test_an_answer_shorter_than_it_claims_is_no_answer(node: Path, driver: str) -> None:
    assert local_memory(node, driver, FakeKernel(region(DEVICE, GIB, 0), announced=3).ioctl) is None


@pytest.mark.parametrize("driver", ["i915", "xe", "amdgpu", ""])
def test_a_file_that_is_no_render_node_is_no_answer(node: Path, driver: str) -> None:
    assert local_memory(node, driver) is None


def test_a_node_we_may_not_open_is_no_answer(tmp_path: Path) -> None:
    assert local_memory(tmp_path / "absent", "xe") is None
