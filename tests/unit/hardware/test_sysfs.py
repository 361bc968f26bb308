"""AMD and Intel GPUs from a tree of files laid out as the kernel lays it out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from corral.contract.hardware import Device
from corral.worker.hardware import sysfs
from corral.worker.hardware.machine import Space
from tests.unit.hardware.fake_machine import GIB, RAM, FakeMachine

MIB = 1024**2
DISCRETE = bytes([0x78, 0x00, 1, 3])  # gpu_metrics v1.3
INSIDE_PROCESSOR = bytes([0x88, 0x00, 3, 0])  # gpu_metrics v3.0


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def radeon(machine: FakeMachine, number: int = 0, pci: str = "0000:03:00.0") -> Path:
    return machine.card(
        number,
        pci,
        vendor="0x1002",
        device="0x744c",
        driver="amdgpu",
        files={
            "mem_info_vram_total": 24 * GIB,
            "mem_info_vram_used": 2 * GIB,
            "unique_id": "72f1aab8e4d2b5c1",
            "gpu_metrics": DISCRETE,
            "gpu_busy_percent": 12,
            "hwmon/hwmon4/temp1_input": 54321,
            "hwmon/hwmon4/power1_average": 92_700_000,
            "power/runtime_status": "active",
        },
    )


def apu(machine: FakeMachine, *, gfx_version: int, vram: int, gtt: int) -> Path:
    machine.write(
        "sys/class/kfd/kfd/topology/nodes/1/properties",
        f"cpu_cores_count 0\nsimd_count 80\ngfx_target_version {gfx_version}\ndrm_render_minor 128",
    )
    return machine.card(
        0,
        "0000:c4:00.0",
        vendor="0x1002",
        device="0x1586",
        driver="amdgpu",
        files={
            "mem_info_vram_total": vram,
            "mem_info_vram_used": 100 * MIB,
            "mem_info_gtt_total": gtt,
            "mem_info_gtt_used": GIB,
            "gpu_metrics": INSIDE_PROCESSOR,
        },
    )


def test_an_amd_card_is_told_with_all_its_numbers(machine: FakeMachine) -> None:
    radeon(machine)
    assert sysfs.devices(machine.host(), RAM) == [
        Device(
            index=0,
            vendor="amd",
            name="AMD GPU",
            uuid="GPU-72f1aab8e4d2b5c1",
            pci="0000:03:00.0",
            total_bytes=24 * GIB,
            free_bytes=22 * GIB,
            driver="amdgpu",
            temperature_c=54,
            utilisation=0.12,
            power_w=93,
        )
    ]


def test_names_come_from_the_product_or_the_list_of_pci_ids(machine: FakeMachine) -> None:
    folder = radeon(machine)
    machine.write(
        "usr/share/misc/pci.ids",
        "# comment\n1001  Someone\n\t744c  Wrong\n1002  Advanced Micro Devices, Inc. [AMD/ATI]\n"
        "\t1586  Strix Halo\n\t744c  Navi 31 [Radeon RX 7900 XTX]\n\t\t1002 0e3b  A board\n1003  Other",
    )
    (device,) = sysfs.devices(machine.host(), RAM)
    assert device.name == "Advanced Micro Devices, Inc. [AMD/ATI] Navi 31 [Radeon RX 7900 XTX]"
    machine.write(folder / "product_name", "AMD Instinct MI210")
    (device,) = sysfs.devices(machine.host(), RAM)
    assert device.name == "AMD Instinct MI210"


def test_several_cards_are_numbered_in_bus_order(machine: FakeMachine) -> None:
    radeon(machine, 2, "0000:03:00.0")
    radeon(machine, 0, "0000:83:00.0")
    assert [(d.index, d.pci) for d in sysfs.devices(machine.host(), RAM)] == [(0, "0000:03:00.0"), (1, "0000:83:00.0")]


def test_a_refresh_reads_what_is_free_now(machine: FakeMachine) -> None:
    folder = radeon(machine)
    (device,) = sysfs.devices(machine.host(), RAM)
    machine.write(folder / "mem_info_vram_used", 23 * GIB)
    assert sysfs.refreshed(machine.host(), device, RAM).free_bytes == GIB


def test_a_card_that_vanished_has_no_numbers(machine: FakeMachine) -> None:
    radeon(machine)
    (device,) = sysfs.devices(machine.host(), RAM)
    elsewhere = msgspec.structs.replace(device, pci="0000:99:00.0")
    gone = sysfs.refreshed(machine.host(), elsewhere, RAM)
    assert (gone.total_bytes, gone.free_bytes, gone.temperature_c) == (24 * GIB, None, None)


def test_use_that_cannot_be_read_is_unknown_not_zero(machine: FakeMachine) -> None:
    folder = radeon(machine)
    (folder / "mem_info_vram_used").unlink()
    (device,) = sysfs.devices(machine.host(), RAM)
    assert (device.total_bytes, device.free_bytes) == (24 * GIB, None)


def test_a_sleeping_card_is_not_woken_by_reading_its_sensors(machine: FakeMachine) -> None:
    folder = radeon(machine)
    machine.write(folder / "power/runtime_status", "suspended")
    (device,) = sysfs.devices(machine.host(), RAM)
    assert (device.temperature_c, device.utilisation, device.power_w) == (None, None, None)
    assert device.free_bytes == 22 * GIB


def test_a_newer_card_has_only_the_power_of_the_moment(machine: FakeMachine) -> None:
    folder = radeon(machine)
    (folder / "hwmon/hwmon4/power1_average").unlink()
    machine.write(folder / "hwmon/hwmon4/power1_input", 15_400_000)
    (device,) = sysfs.devices(machine.host(), RAM)
    assert device.power_w == 15


def test_ordinary_graphics_in_the_processor_are_no_place_for_models(machine: FakeMachine) -> None:
    apu(machine, gfx_version=110003, vram=512 * MIB, gtt=32 * GIB)
    (device,) = sysfs.devices(machine.host(), RAM)
    assert (device.total_bytes, device.free_bytes, device.unified) == (0, None, True)
    assert sysfs.refreshed(machine.host(), device, RAM).free_bytes is None


def test_a_large_share_cut_off_by_the_firmware_is_memory_of_its_own(machine: FakeMachine) -> None:
    apu(machine, gfx_version=110003, vram=16 * GIB, gtt=8 * GIB)
    (device,) = sysfs.devices(machine.host(), RAM)
    assert (device.total_bytes, device.free_bytes, device.unified) == (16 * GIB, 16 * GIB - 100 * MIB, False)


def test_a_chip_made_for_models_may_use_what_the_driver_lets_it_take_of_the_ram(machine: FakeMachine) -> None:
    folder = apu(machine, gfx_version=110501, vram=512 * MIB, gtt=60 * GIB)
    (device,) = sysfs.devices(machine.host(), RAM)
    assert (device.total_bytes, device.free_bytes, device.unified) == (60 * GIB, 48 * GIB, True)
    machine.write(folder / "mem_info_gtt_used", 50 * GIB)
    assert sysfs.refreshed(machine.host(), device, RAM).free_bytes == 10 * GIB
    assert sysfs.refreshed(machine.host(), device, Space(64 * GIB, GIB)).free_bytes == GIB


def test_such_a_chip_with_most_memory_cut_off_uses_that(machine: FakeMachine) -> None:
    apu(machine, gfx_version=110501, vram=96 * GIB, gtt=16 * GIB)
    (device,) = sysfs.devices(machine.host(), RAM)
    assert (device.total_bytes, device.unified) == (96 * GIB, False)


def test_intels_own_packages_tell_a_cards_memory_in_files(machine: FakeMachine) -> None:
    folder = machine.card(0, "0000:03:00.0", vendor="0x8086", device="0x56a0", driver="i915")
    machine.write(folder / "drm/card0/lmem_total_bytes", 16 * GIB)
    machine.write(folder / "drm/card0/lmem_avail_bytes", 10 * GIB)
    (device,) = sysfs.devices(machine.host(), RAM)
    assert (device.vendor, device.total_bytes, device.free_bytes) == ("intel", 16 * GIB, 10 * GIB)
    assert (device.unified, device.driver) == (False, "i915")
    machine.write(folder / "drm/card0/lmem_avail_bytes", GIB)
    assert sysfs.refreshed(machine.host(), device, RAM).free_bytes == GIB


@pytest.mark.parametrize("inside", ["", "memory/"])
def test_tiles_of_an_intel_card_are_summed_and_their_use_is_unknown(machine: FakeMachine, inside: str) -> None:
    files: dict[str, str | bytes | int] = {
        f"tile0/{inside}physical_vram_size_bytes": 12 * GIB,
        f"tile1/{inside}physical_vram_size_bytes": 12 * GIB,
    }
    machine.card(0, "0000:03:00.0", vendor="0x8086", driver="xe", files=files)
    (device,) = sysfs.devices(machine.host(), RAM)
    assert (device.total_bytes, device.free_bytes, device.unified) == (24 * GIB, None, False)


def test_intel_graphics_in_the_processor_have_no_memory_of_their_own(machine: FakeMachine) -> None:
    machine.card(0, "0000:00:02.0", vendor="0x8086", driver="i915")
    with capture_logs() as logs:
        (device,) = sysfs.devices(machine.host(), RAM)
    assert (device.total_bytes, device.free_bytes, device.unified) == (0, None, True)
    assert logs == []


def test_an_intel_card_that_keeps_its_memory_secret_is_listed_and_told_once(machine: FakeMachine) -> None:
    machine.card(0, "0000:03:00.0", vendor="0x8086", driver="xe")
    host = machine.host()
    with capture_logs() as logs:
        (device,) = sysfs.devices(host, RAM)
        sysfs.devices(host, RAM)
    assert (device.total_bytes, device.free_bytes, device.unified) == (0, None, False)
    assert [entry["source"] for entry in logs] == ["0000:03:00.0"]


def test_display_chips_and_connectors_are_not_gpus(machine: FakeMachine) -> None:
    machine.card(0, "0000:02:00.0", vendor="0x1a03", driver="ast")
    machine.write("sys/class/drm/version", "drm 1.1.0")
    assert sysfs.devices(machine.host(), RAM) == []
    assert sysfs.pci_vendors(machine.host()) == set()


def test_vendors_on_the_bus_are_those_of_display_devices(machine: FakeMachine) -> None:
    radeon(machine)
    machine.write("sys/bus/pci/devices/0000:00:1f.3/class", "0x040300")
    machine.write("sys/bus/pci/devices/0000:00:1f.3/vendor", "0x8086")
    machine.write("sys/bus/pci/devices/0000:06:00.0/class", "0x030200")
    machine.write("sys/bus/pci/devices/0000:06:00.0/vendor", "0x10de")
    assert sysfs.pci_vendors(machine.host()) == {"amd", "nvidia"}


def test_unreadable_files_are_absent_files(machine: FakeMachine) -> None:
    machine.card(
        0,
        "0000:03:00.0",
        vendor="0x1002",
        files={"mem_info_vram_total": b"\xff\xfe", "mem_info_vram_used": "lots", "gpu_metrics": b"\x01"},
    )
    (device,) = sysfs.devices(machine.host(), RAM)
    assert (device.total_bytes, device.free_bytes) == (0, None)
