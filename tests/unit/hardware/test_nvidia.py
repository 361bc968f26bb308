"""NVIDIA: ordinary cards, MIG, chips that work in RAM, and drivers that will not talk."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest
from structlog.testing import capture_logs

from corral.contract.hardware import Device
from corral.worker.hardware.machine import Space
from corral.worker.hardware.nvidia import Nvml, is_nvidia_soc, soc_device
from tests.unit.hardware.fake_machine import GIB, RAM, FakeGpu, FakeMachine, FakeNvml


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def nvml_of(machine: FakeMachine, *gpus: FakeGpu) -> tuple[Nvml, FakeNvml]:
    library = FakeNvml(list(gpus))
    return Nvml(machine.host(), lambda: library), library


def test_the_fake_has_only_names_that_the_real_library_has() -> None:
    names = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 15
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_without_the_drivers_library_there_are_no_devices(machine: FakeMachine) -> None:
    def no_driver() -> FakeNvml:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    assert Nvml(machine.host(), no_driver).devices(RAM) == []


def test_a_card_is_told_with_all_its_numbers(machine: FakeMachine) -> None:
    nvml, _ = nvml_of(machine, FakeGpu(bus_id=b"00000000:0F:00.0"))
    assert nvml.devices(RAM) == [
        Device(
            index=0,
            vendor="nvidia",
            name="NVIDIA GeForce RTX 4090",
            uuid="GPU-4090",
            pci="0000:0f:00.0",
            total_bytes=24 * GIB,
            free_bytes=20 * GIB,
            compute_capability="8.9",
            driver="580.159.04",
            temperature_c=44,
            utilisation=0.37,
            power_w=286,
        )
    ]


def test_a_refresh_asks_only_for_the_numbers_of_now(machine: FakeMachine) -> None:
    nvml, library = nvml_of(machine, FakeGpu())
    (device,) = nvml.devices(RAM)
    library.gpus[0].used = 23 * GIB
    library.gpus[0].name = "renamed"
    again = nvml.refreshed(device, RAM)
    assert (again.name, again.free_bytes, again.total_bytes) == ("NVIDIA GeForce RTX 4090", GIB, 24 * GIB)
    assert library.opened == 1


def test_two_looks_open_the_library_once(machine: FakeMachine) -> None:
    nvml, library = nvml_of(machine, FakeGpu())
    assert nvml.devices(RAM) == nvml.devices(RAM)
    assert library.opened == 1
    nvml.close()
    nvml.close()
    assert library.opened == 0


def test_mig_instances_stand_in_for_their_card(machine: FakeMachine) -> None:
    split = FakeGpu(
        name="NVIDIA H200",
        uuid="GPU-h200",
        total=141 * GIB,
        capability=(9, 0),
        mig=[
            FakeGpu("NVIDIA H200 MIG 3g.71gb", "MIG-a", 70 * GIB, GIB, (0, 0), ""),
            None,
            FakeGpu("", "MIG-b", 17 * GIB, 0, (0, 0), ""),
        ],
    )
    nvml, library = nvml_of(machine, FakeGpu(), split)
    whole, first, second = nvml.devices(RAM)
    assert whole.uuid == "GPU-4090"
    assert (first.index, first.mig, first.uuid, first.name) == (1, 0, "MIG-a", "NVIDIA H200 MIG 3g.71gb")
    assert (second.index, second.mig, second.uuid, second.name) == (1, 2, "MIG-b", "NVIDIA H200 MIG 2")
    assert (first.total_bytes, first.free_bytes) == (70 * GIB, 69 * GIB)
    assert first.compute_capability == second.compute_capability == "9.0"
    assert first.pci == "0000:65:00.0"
    assert first.utilisation is None
    instance = library.gpus[1].mig
    assert instance is not None
    assert instance[2] is not None
    instance[2].used = 10 * GIB
    assert nvml.refreshed(second, RAM).free_bytes == 7 * GIB
    assert nvml.refreshed(first, RAM).free_bytes == 69 * GIB


def test_a_card_with_mig_on_but_no_instance_cannot_be_used(machine: FakeMachine) -> None:
    nvml, _ = nvml_of(machine, FakeGpu(mig=[None, None]))
    with capture_logs() as logs:
        assert nvml.devices(RAM) == []
    assert "MIG enabled but no instance" in logs[0]["why"]


@pytest.mark.parametrize("name", ["NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)"])
@pytest.mark.parametrize("answer", [pynvml.NVMLError_NotSupported(), None])
def test_integrated_gpus_have_the_machines_ram(machine: FakeMachine, name: str, answer: Exception | None) -> None:
    nvml, _ = nvml_of(machine, FakeGpu(name, total=7, used=0, memory_error=answer))
    (device,) = nvml.devices(RAM)
    assert (device.total_bytes, device.free_bytes, device.unified) == (64 * GIB, 48 * GIB, True)
    assert nvml.refreshed(device, Space(64 * GIB, 5)).free_bytes == 5


def test_an_unknown_chip_on_arm_without_memory_of_its_own_has_the_ram(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, machine="aarch64")
    nvml, _ = nvml_of(machine, FakeGpu("NVIDIA N9", memory_error=pynvml.NVMLError_NotSupported()))
    (device,) = nvml.devices(RAM)
    assert (device.total_bytes, device.unified) == (64 * GIB, True)


@pytest.mark.parametrize("error", [pynvml.NVMLError_NotSupported(), pynvml.NVMLError_GpuIsLost()])
def test_a_pcs_card_that_will_not_tell_does_not_pass_for_its_ram(machine: FakeMachine, error: Exception) -> None:
    nvml, _ = nvml_of(machine, FakeGpu(memory_error=error))
    (device,) = nvml.devices(RAM)
    assert (device.total_bytes, device.free_bytes, device.unified) == (0, None, False)


def test_a_card_on_a_grace_server_has_its_own_memory(tmp_path: Path) -> None:
    nvml, _ = nvml_of(FakeMachine(tmp_path, machine="aarch64"), FakeGpu("NVIDIA GH200 480GB", total=96 * GIB))
    (device,) = nvml.devices(RAM)
    assert (device.total_bytes, device.unified) == (96 * GIB, False)


def test_no_library_is_ordinary(machine: FakeMachine) -> None:
    nvml = Nvml(machine.host(), lambda: FakeNvml(installed=False))
    with capture_logs() as logs:
        assert nvml.devices(RAM) == []
        assert nvml.devices(RAM) == []
    assert [entry["log_level"] for entry in logs] == ["debug"]


def test_no_library_beside_an_nvidia_card_is_worth_a_warning(machine: FakeMachine) -> None:
    machine.card(0, "0000:65:00.0", vendor="0x10de")
    nvml = Nvml(machine.host(), lambda: FakeNvml(init_error=pynvml.NVMLError_DriverNotLoaded()))
    with capture_logs() as logs:
        assert nvml.devices(RAM) == []
    assert [(entry["log_level"], entry["why"]) for entry in logs] == [("warning", "Driver Not Loaded")]


def test_a_driver_exchanged_under_the_kernel_is_told_once(machine: FakeMachine) -> None:
    nvml = Nvml(machine.host(), lambda: FakeNvml(init_error=pynvml.NVMLError_LibRmVersionMismatch()))
    with capture_logs() as logs:
        assert nvml.devices(RAM) == []
        assert nvml.devices(RAM) == []
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "mismatch" in logs[0]["why"]


def test_no_module_is_survived(machine: FakeMachine) -> None:
    def missing() -> FakeNvml:
        raise ImportError("No module named 'pynvml'")

    assert Nvml(machine.host(), missing).devices(RAM) == []


def test_when_the_driver_goes_away_numbers_become_unknown_and_a_full_look_opens_it_again(
    machine: FakeMachine,
) -> None:
    nvml, library = nvml_of(machine, FakeGpu())
    (device,) = nvml.devices(RAM)
    library.opened = 0
    gone = nvml.refreshed(device, RAM)
    assert (gone.total_bytes, gone.free_bytes, gone.temperature_c, gone.utilisation) == (24 * GIB, None, None, None)
    assert gone.power_w is None
    assert nvml.devices(RAM) == [device]
    assert library.opened == 1


def test_a_device_nobody_looked_at_has_no_numbers(machine: FakeMachine) -> None:
    nvml, _ = nvml_of(machine, FakeGpu())
    assert nvml.refreshed(Device(index=0, vendor="nvidia", uuid="GPU-x", free_bytes=5), RAM).free_bytes is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"sys/devices/soc0/family": "Tegra"}, True),
        ({"sys/devices/soc0/soc_id": "jep106:0426:8901"}, True),
        ({"sys/devices/soc0/soc_id": "jep106:0426:8195"}, False),
        ({"sys/devices/soc0/soc_id": "jep106:0426:8999", "proc/driver/nvidia/version": "NVRM"}, True),
        ({"sys/devices/soc0/soc_id": "jep106:0070:7180", "proc/driver/nvidia/version": "NVRM"}, False),
    ],
)
def test_nvidias_chips_are_known_and_mediateks_are_not_mistaken(
    machine: FakeMachine, files: dict[str, str], expected: bool
) -> None:
    for path, content in files.items():
        machine.write(path, content)
    assert is_nvidia_soc(machine.host()) is expected


def test_a_jetson_without_the_library_is_named_by_its_board(machine: FakeMachine) -> None:
    machine.write("proc/device-tree/model", b"NVIDIA Jetson AGX Orin Developer Kit\0")
    device = soc_device(machine.host(), RAM)
    assert device.name == "NVIDIA Jetson AGX Orin Developer Kit"
    assert (device.total_bytes, device.free_bytes, device.unified) == (64 * GIB, 48 * GIB, True)
