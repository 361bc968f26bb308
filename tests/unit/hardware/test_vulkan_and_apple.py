"""GPUs that a program has to be asked about: `vulkaninfo` and macOS's `system_profiler`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.worker.hardware import apple, vulkan
from corral.worker.hardware.vulkan import VulkanGpu, parse_vulkaninfo
from tests.unit.hardware.fake_machine import GIB, RAM, FakeMachine

HEADING = """\
==========
VULKANINFO
==========

Vulkan Instance Version: 1.3.280

Presentable Surfaces:
=====================
GPU id : 0 (V3D 7.1.7) [VK_KHR_xcb_surface]:
	Surface type = VK_KHR_xcb_surface

Device Properties and Extensions:
=================================
"""


def gpu_block(index: int, kind: str, name: str, heaps: str) -> str:
    return f"""\
GPU{index}:
VkPhysicalDeviceProperties:
---------------------------
	apiVersion        = 1.3.280 (4206872)
	vendorID          = 0x14e4
	deviceType        = {kind}
	deviceName        = {name}

VkPhysicalDeviceLimits:
-----------------------
	maxImageDimension1D                             = 4096

VkPhysicalDeviceMemoryProperties:
=================================
{heaps}
memoryTypes: count = 2
	memoryTypes[0]:
		heapIndex     = 0
		propertyFlags = 0x000f: count = 4
			MEMORY_PROPERTY_DEVICE_LOCAL_BIT

"""


BOARD_HEAP = """\
memoryHeaps: count = 1
	memoryHeaps[0]:
		size   = 8589934592 (0x200000000) (8.00 GiB)
		budget = 7516192768 (0x1c0000000) (7.00 GiB)
		usage  = 0 (0x00000000) (0.00 B)
		flags: count = 1
			MEMORY_HEAP_DEVICE_LOCAL_BIT"""
CARD_HEAPS = """\
memoryHeaps: count = 2
	memoryHeaps[0]:
		size   = 17179869184 (0x400000000) (16.00 GiB)
		budget = 16106127360 (0x3c0000000) (15.00 GiB)
		usage  = 0 (0x00000000) (0.00 B)
		flags: count = 1
			MEMORY_HEAP_DEVICE_LOCAL_BIT
	memoryHeaps[1]:
		size   = 34359738368 (0x800000000) (32.00 GiB)
		budget = 34359738368 (0x800000000) (32.00 GiB)
		usage  = 0 (0x00000000) (0.00 B)
		flags:
			None"""
BOARD = gpu_block(0, "PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU", "V3D 7.1.7", BOARD_HEAP)
CARD = gpu_block(1, "PHYSICAL_DEVICE_TYPE_DISCRETE_GPU", "MTT S80", CARD_HEAPS)
SOFTWARE = gpu_block(2, "PHYSICAL_DEVICE_TYPE_CPU", "llvmpipe (LLVM 17.0.6, 256 bits)", BOARD_HEAP)


def test_heaps_on_the_device_are_summed_and_software_is_no_gpu() -> None:
    assert parse_vulkaninfo(HEADING + BOARD + CARD + SOFTWARE) == [
        VulkanGpu(0, "V3D 7.1.7", True, 8 * GIB, 7 * GIB),
        VulkanGpu(1, "MTT S80", False, 16 * GIB, 15 * GIB),
    ]


def test_without_a_budget_what_is_free_is_unknown() -> None:
    unbudgeted = CARD.replace("budget = 16106127360 (0x3c0000000) (15.00 GiB)", "budget = 0 (0x00000000) (0.00 B)")
    (gpu,) = parse_vulkaninfo(unbudgeted)
    assert (gpu.total_bytes, gpu.free_bytes) == (16 * GIB, None)


@pytest.mark.parametrize("text", ["", "ERROR: [Loader Message] Code 0", "GPU0:\n", "GPU0:\nGPU1:\n", HEADING])
def test_text_without_a_gpu_has_none(text: str) -> None:
    assert parse_vulkaninfo(text) == []


@settings(deadline=None)  # the machine may be busy
@given(st.text() | st.lists(st.sampled_from((HEADING + BOARD + CARD).splitlines(keepends=True))).map("".join))
def test_any_text_is_survived(text: str) -> None:
    for gpu in parse_vulkaninfo(text):
        assert gpu.total_bytes > 0
        assert gpu.free_bytes is None or 0 < gpu.free_bytes <= gpu.total_bytes


def test_a_board_shares_its_ram(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.write("out", HEADING + BOARD + CARD)
    machine.command("vulkaninfo", f"exec /bin/cat {tmp_path}/out")
    board, card = vulkan.devices(machine.host(), RAM)
    assert (board.vendor, board.unified, board.total_bytes, board.free_bytes) == ("vulkan", True, 8 * GIB, 7 * GIB)
    assert (card.unified, card.total_bytes, card.free_bytes) == (False, 16 * GIB, 15 * GIB)


PROFILE = {
    "SPDisplaysDataType": [
        {
            "_name": "Apple M2 Max",
            "spdisplays_ndrvs": [{"_name": "Studio Display", "spdisplays_main": "spdisplays_yes"}],
            "spdisplays_vendor": "sppci_vendor_Apple",
            "sppci_bus": "spdisplays_builtin",
            "sppci_cores": "38",
            "sppci_device_type": "spdisplays_gpu",
            "sppci_model": "Apple M2 Max",
        },
        {"_name": "Radeon", "spdisplays_vendor": "AMD (0x1002)", "sppci_device_type": "spdisplays_gpu"},
    ]
}


@pytest.mark.parametrize(
    ("profile", "names"),
    [
        (json.dumps(PROFILE), ["Apple M2 Max"]),
        ("", []),
        ("{}", []),
        ("[]", []),
        ('{"SPDisplaysDataType": [null]}', []),
        ('{"SPDisplaysDataType": null}', []),
        ("not json", []),
    ],
)
def test_apples_gpus_are_read_from_the_profile(profile: str, names: list[str]) -> None:
    assert apple.gpu_names(profile) == names


def test_apple_silicon_works_in_the_machines_ram(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, system="Darwin", machine="arm64")
    machine.write("profile.json", json.dumps(PROFILE))
    machine.command(
        "system_profiler", f'[ "$*" = "SPDisplaysDataType -json" ] && exec /bin/cat {tmp_path}/profile.json'
    )
    (device,) = apple.devices(machine.host(), RAM)
    assert (device.vendor, device.name) == ("apple", "Apple M2 Max")
    assert (device.total_bytes, device.free_bytes, device.unified) == (64 * GIB, 48 * GIB, True)


def test_apple_silicon_has_a_gpu_even_if_the_profiler_is_silent(tmp_path: Path) -> None:
    (device,) = apple.devices(FakeMachine(tmp_path, system="Darwin", machine="arm64").host(), RAM)
    assert device.name == "Apple GPU"


@pytest.mark.parametrize(("system", "arch"), [("Darwin", "x86_64"), ("Linux", "aarch64")])
def test_elsewhere_there_is_no_apple_gpu(tmp_path: Path, system: str, arch: str) -> None:
    assert apple.devices(FakeMachine(tmp_path, system=system, machine=arch).host(), RAM) == []
