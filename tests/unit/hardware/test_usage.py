"""What each process holds of each accelerator: by NVML, and by what graphics drivers write of open files."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.contract.messages.replicas import ReplicaDevice
from corral.worker.hardware.probe import HardwareProbe
from corral.worker.hardware.usage import DeviceGauge
from tests.unit.hardware.fake_machine import GIB, FakeGpu, FakeMachine, FakeNvml

FIRST, SECOND = ReplicaDevice("nvidia", 0, "GPU-a"), ReplicaDevice("nvidia", 1, "GPU-b")
AMD = ReplicaDevice("amd", 0)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def gauge_of(probe: HardwareProbe) -> DeviceGauge:
    report = probe.refresh(probe.full())
    return probe.gauge(lambda: report.devices)


def with_gpus(machine: FakeMachine, first: dict[int, int | None], second: dict[int, int | None]) -> DeviceGauge:
    gpus = [FakeGpu(uuid="GPU-a", processes=first), FakeGpu(uuid="GPU-b", processes=second)]
    machine.nvml = FakeNvml(gpus)
    return gauge_of(machine.probe())


def test_by_process_and_device(machine: FakeMachine) -> None:
    gauge = with_gpus(machine, {10: 3 * GIB, 11: GIB, 99: 7 * GIB}, {11: 2 * GIB})
    assert gauge.held({10, 11}, [FIRST, SECOND]) == (4 * GIB, 2 * GIB)
    assert gauge.held({99}, [SECOND, FIRST]) == (0, 7 * GIB)
    assert gauge.held({12}, [FIRST]) == (0,)


def test_what_the_driver_does_not_tell_is_not_measured(machine: FakeMachine) -> None:
    assert with_gpus(machine, {10: None}, {}).held({10}, [FIRST]) == (0,)


def test_a_process_whose_number_is_the_hosts_is_ours_when_it_can_be_no_other(machine: FakeMachine) -> None:
    gauge = with_gpus(machine, {4711: 5 * GIB}, {4711: GIB, 4712: GIB})
    assert gauge.held({10}, [FIRST, SECOND], alone=[FIRST, SECOND]) == (5 * GIB, 0), "of two nobody knows which"
    assert gauge.held({10}, [FIRST], alone=[]) == (0,), "another of ours is there too"
    machine.write("proc/4711/status", "Name: somebody else")
    assert gauge.held({10}, [FIRST], alone=[FIRST]) == (0,), "that one is known here, and not ours"


def test_without_a_driver_nothing_is_held(machine: FakeMachine) -> None:
    assert gauge_of(machine.probe()).held({10}, [FIRST]) == (0,)


def test_open_files_of_a_card_count_once_for_each_client(machine: FakeMachine) -> None:
    files = {"mem_info_vram_total": 24 * GIB, "mem_info_vram_used": GIB}
    machine.card(0, "0000:03:00.0", vendor="0x1002", driver="amdgpu", files=files)
    gauge = gauge_of(machine.probe())
    told = "pos:\t0\ndrm-driver:\tamdgpu\ndrm-pdev:\t0000:03:00.0\ndrm-client-id:\t{}\n{}"
    machine.write("proc/10/fdinfo/5", told.format(7, "drm-memory-vram:\t2097152 KiB\ndrm-memory-gtt:\t99 KiB"))
    machine.write("proc/10/fdinfo/6", told.format(7, "drm-memory-vram:\t2097152 KiB"))
    machine.write("proc/10/fdinfo/8", told.format(8, "drm-resident-vram0:\t1024 MiB\ndrm-memory-vram:\t1 KiB"))
    machine.write("proc/10/fdinfo/9", "pos:\t0\nflags:\t02\n")
    machine.write("proc/11/fdinfo/5", told.format(9, "drm-resident-vram0:\tmany KiB").replace("03:00", "04:00"))
    assert gauge.held({10, 11}, [AMD]) == (3 * GIB,)
    assert gauge.held({11}, [AMD]) == (0,)
