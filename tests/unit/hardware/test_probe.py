"""The whole probe on whole machines, from a box without a GPU to one whose driver never comes back."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import msgspec
import pynvml
import pytest
from structlog.testing import capture_logs

from corral.contract.hardware import HardwareReport
from corral.worker.hardware import sysfs
from corral.worker.hardware.machine import Space
from corral.worker.hardware.probe import HardwareProbe
from tests.unit.hardware.fake_machine import GIB, FakeGpu, FakeMachine, FakeNvml


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def test_a_box_without_a_gpu_tells_its_ram_and_no_vram(machine: FakeMachine) -> None:
    report = machine.probe().full()
    assert (report.platform, report.gpu_vendor, report.capability) == ("linux/amd64", "", "default")
    assert (report.total_vram, report.available_vram, report.devices) == (0, None, ())
    assert (report.total_ram, report.available_ram) == (64 * GIB, 48 * GIB)
    assert report.cpus >= 1
    assert report.total_disk > 0
    assert report.available_disk is not None
    assert report.available_disk <= report.total_disk
    assert "available_vram" not in json.loads(msgspec.json.encode(report))


def test_two_nvidia_cards(machine: FakeMachine) -> None:
    machine.nvml = FakeNvml([FakeGpu(), FakeGpu(uuid="GPU-2", capability=(12, 0), used=0)])
    machine.card(0, "0000:65:00.0", vendor="0x10de", driver="nvidia")
    (machine.root / "usr/local/cuda-12").mkdir(parents=True)
    probe = machine.probe()
    report = probe.full()
    assert (report.gpu_vendor, report.capability, report.gpu_compute_capability) == ("nvidia", "nvidia-cuda-12", "12.0")
    assert (report.total_vram, report.available_vram) == (48 * GIB, 44 * GIB)
    machine.nvml.gpus[1].used = 10 * GIB
    machine.ram = Space(64 * GIB, 7 * GIB)
    again = probe.refresh(report)
    assert (again.available_vram, again.available_ram) == (34 * GIB, 7 * GIB)
    assert again.total_vram == 48 * GIB
    assert [device.free_bytes for device in again.devices] == [20 * GIB, 14 * GIB]
    assert msgspec.json.decode(msgspec.json.encode(again), type=HardwareReport) == again


def test_what_can_no_longer_be_measured_is_left_out_of_the_heartbeat(machine: FakeMachine) -> None:
    machine.nvml = FakeNvml([FakeGpu(), FakeGpu(uuid="GPU-2")])
    probe = machine.probe()
    report = probe.full()
    machine.nvml.gpus[1].memory_error = pynvml.NVMLError_GpuIsLost()
    again = probe.refresh(report)
    assert (again.total_vram, again.available_vram) == (48 * GIB, None)
    assert [device.free_bytes for device in again.devices] == [20 * GIB, None]


def test_a_gb10_reports_its_ram(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, machine="aarch64")
    machine.nvml = FakeNvml(
        [FakeGpu("NVIDIA GB10", "GPU-gb10", capability=(12, 1), memory_error=pynvml.NVMLError_NotSupported())]
    )
    (machine.root / "usr/local/cuda-13").mkdir(parents=True)
    probe = machine.probe()
    report = probe.full()
    assert (report.platform, report.capability) == ("linux/arm64", "nvidia-l4t-cuda-13")
    assert (report.total_vram, report.available_vram, report.gpu_compute_capability) == (64 * GIB, 48 * GIB, "12.1")
    machine.ram = Space(64 * GIB, 3 * GIB)
    assert probe.refresh(report).available_vram == 3 * GIB


def test_a_jetson_without_nvml_reports_its_ram(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, machine="aarch64")
    machine.write("sys/devices/soc0/family", "Tegra")
    machine.write("sys/devices/soc0/machine", "Jetson AGX Orin")
    probe = machine.probe()
    report = probe.full()
    assert (report.gpu_vendor, report.capability) == ("nvidia", "nvidia-l4t")
    assert [(d.name, d.unified) for d in report.devices] == [("Jetson AGX Orin", True)]
    assert (report.total_vram, report.available_vram) == (64 * GIB, 48 * GIB)
    machine.ram = Space(64 * GIB, 5 * GIB)
    assert probe.refresh(report).available_vram == 5 * GIB


def test_an_amd_card_beside_graphics_in_the_processor(machine: FakeMachine) -> None:
    card = machine.card(
        1,
        "0000:03:00.0",
        vendor="0x1002",
        driver="amdgpu",
        files={"mem_info_vram_total": 16 * GIB, "mem_info_vram_used": GIB},
    )
    machine.card(
        0,
        "0000:0c:00.0",
        vendor="0x1002",
        driver="amdgpu",
        files={"mem_info_vram_total": 512 * 1024**2, "mem_info_vram_used": 5, "gpu_metrics": bytes([8, 0, 2, 1])},
    )
    probe = machine.probe()
    report = probe.full()
    assert (report.gpu_vendor, report.capability, len(report.devices)) == ("amd", "amd", 2)
    assert (report.total_vram, report.available_vram) == (16 * GIB, 15 * GIB)
    machine.write(card / "mem_info_vram_used", 16 * GIB)
    assert probe.refresh(report).available_vram == 0


def test_a_laptop_with_intel_graphics_is_a_cpu_box(machine: FakeMachine) -> None:
    machine.card(0, "0000:00:02.0", vendor="0x8086", driver="i915")
    probe = machine.probe()
    report = probe.full()
    assert (report.gpu_vendor, report.capability) == ("intel", "default")
    assert (report.total_vram, report.available_vram) == (0, None)
    assert probe.refresh(report).available_vram is None


def test_vulkan_is_asked_only_when_nobody_else_knows(machine: FakeMachine, tmp_path: Path) -> None:
    machine.write(
        "out",
        "GPU0:\n\tdeviceType = PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU\n\tdeviceName = Mali-G610\nmemoryHeaps: count = 1\n"
        f"\tmemoryHeaps[0]:\n\t\tsize = {16 * GIB}\n\t\tflags: count = 1\n\t\t\tMEMORY_HEAP_DEVICE_LOCAL_BIT\n",
    )
    machine.command("vulkaninfo", f"echo asked >> {tmp_path}/asked; exec /bin/cat {tmp_path}/out")
    probe = machine.probe()
    report = probe.full()
    assert (report.gpu_vendor, report.capability, report.total_vram) == ("vulkan", "vulkan", 16 * GIB)
    assert probe.refresh(report).available_vram == 48 * GIB
    machine.card(0, "0000:00:02.0", vendor="0x8086", driver="i915")
    assert machine.probe().full().gpu_vendor == "intel"
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_a_mac(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, system="Darwin", machine="arm64")
    probe = machine.probe()
    report = probe.full()
    assert (report.platform, report.gpu_vendor, report.capability) == ("darwin/arm64", "apple", "metal")
    assert (report.total_vram, report.available_vram) == (64 * GIB, 48 * GIB)
    machine.ram = Space(64 * GIB, GIB)
    assert probe.refresh(report).available_vram == GIB


def test_an_image_may_force_the_capability(machine: FakeMachine) -> None:
    machine.nvml = FakeNvml([FakeGpu()])
    machine.write("run/localai/capability", "nvidia-cuda-13")
    assert machine.probe().full().capability == "nvidia-cuda-13"
    machine.write("run/corral/capability", "nvidia-cuda-12")
    assert machine.probe().full().capability == "nvidia-cuda-12"
    machine.env["LOCALAI_FORCE_META_BACKEND_CAPABILITY"] = "vulkan"
    assert machine.probe().full().capability == "vulkan"
    machine.env["CORRAL_FORCE_META_BACKEND_CAPABILITY"] = "disable"
    assert machine.probe().full().capability == "disable"


def test_the_models_folder_need_not_exist_yet(machine: FakeMachine) -> None:
    there = machine.probe().full()
    probe = HardwareProbe(machine.root / "not/yet/there", env={}, host=machine.host(), nvml=lambda: machine.nvml)
    assert probe.full().total_disk == there.total_disk


def test_a_disk_that_cannot_be_read_is_left_out(machine: FakeMachine) -> None:
    loop = machine.root / "loop"
    loop.symlink_to(loop)
    probe = HardwareProbe(loop, env={}, host=machine.host(), nvml=lambda: machine.nvml, ram=lambda: machine.ram)
    report = probe.full()
    assert (report.total_disk, report.available_disk) == (0, None)


def test_a_surprise_in_one_source_costs_only_that_source(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.nvml = FakeNvml([FakeGpu()])

    def surprise(*_: object) -> None:
        raise RuntimeError("sysfs from another planet")

    monkeypatch.setattr(sysfs, "devices", surprise)
    probe = machine.probe()
    with capture_logs() as logs:
        assert probe.full().total_vram == 24 * GIB
        assert probe.full().total_vram == 24 * GIB
    assert [(entry["source"], entry["detail"]) for entry in logs] == [("sysfs", "sysfs from another planet")]


def test_a_driver_that_never_comes_back_holds_up_nobody_else(machine: FakeMachine) -> None:
    machine.nvml = FakeNvml([FakeGpu()])
    probe = machine.probe(patience_s=0.05)
    report = probe.full()
    entered, let_go = threading.Event(), threading.Event()

    class Hanging(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu) -> object:
            entered.set()
            let_go.wait(30)
            return super().nvmlDeviceGetMemoryInfo(handle)

    machine.nvml.__class__ = Hanging
    stuck = threading.Thread(target=probe.refresh, args=(report,))
    stuck.start()
    try:
        assert entered.wait(10)
        again = probe.refresh(report)
        assert (again.total_vram, again.available_vram, again.available_ram) == (24 * GIB, None, 48 * GIB)
        whole = probe.full()
        assert (whole.total_vram, whole.available_vram, whole.capability) == (24 * GIB, None, report.capability)
    finally:
        let_go.set()
        stuck.join(10)
    assert probe.refresh(report).available_vram == 20 * GIB


def test_closing_lets_go_of_the_library_and_a_full_look_takes_it_again(machine: FakeMachine) -> None:
    machine.nvml = FakeNvml([FakeGpu()])
    probe = machine.probe()
    report = probe.full()
    probe.close()
    assert machine.nvml.opened == 0
    assert probe.refresh(report).available_vram is None
    assert probe.full().available_vram == 20 * GIB


def test_the_machine_this_runs_on_can_be_probed() -> None:
    probe = HardwareProbe(Path.cwd() / "models", env=os.environ)
    report = probe.full()
    again = probe.refresh(report)
    probe.close()
    assert report.os in ("linux", "darwin")
    assert report.total_ram >= (report.available_ram or 0) > 0
    assert report.total_disk > 0
    assert (again.total_vram, again.capability) == (report.total_vram, report.capability)
    assert report.capability
