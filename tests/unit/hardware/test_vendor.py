"""Whose GPU a node reports, and the sums that follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.contract.hardware import Device
from corral.worker.hardware.machine import Space
from corral.worker.hardware.vendor import choose_vendor, first_sighting, highest_compute_capability, memory_of
from tests.unit.hardware.fake_machine import GIB, FakeMachine


def device(vendor: str, total_gib: int, free_gib: int | None = None, *, unified: bool = False) -> Device:
    free = None if free_gib is None else free_gib * GIB
    return Device(index=0, vendor=vendor, total_bytes=total_gib * GIB, free_bytes=free, unified=unified)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def test_nothing_seen_is_no_vendor(machine: FakeMachine) -> None:
    assert first_sighting(machine.host()) == ""


@pytest.mark.parametrize(
    ("vendors", "first"),
    [
        (["0x8086"], "intel"),
        (["0x8086", "0x1002"], "amd"),
        (["0x8086", "0x1002", "0x10de"], "nvidia"),
        (["0x1a03"], ""),
    ],
)
def test_on_the_bus_nvidia_comes_before_amd_before_intel(machine: FakeMachine, vendors: list[str], first: str) -> None:
    for number, vendor in enumerate(vendors):
        machine.card(number, f"0000:0{number}:00.0", vendor=vendor)
    assert first_sighting(machine.host()) == first


def test_cards_without_a_display_class_are_seen_by_their_driver(machine: FakeMachine) -> None:
    folder = machine.card(0, "0000:03:00.0", vendor="0x1002")
    machine.write(folder / "class", "0x120000")
    assert first_sighting(machine.host()) == "amd"


@pytest.mark.parametrize(
    ("tools", "first"),
    [
        (["nvidia-smi", "rocm-smi"], "nvidia"),
        (["rocm-smi"], "amd"),
        (["xpu-smi"], "intel"),
        (["intel_gpu_top"], "intel"),
        (["vulkaninfo"], ""),
    ],
)
def test_then_the_makers_tools_on_the_path(machine: FakeMachine, tools: list[str], first: str) -> None:
    for tool in tools:
        machine.command(tool, "exit 1")
    assert first_sighting(machine.host()) == first


def test_a_tool_counts_only_after_what_the_kernel_shows(machine: FakeMachine) -> None:
    machine.command("nvidia-smi", "exit 1")
    machine.card(0, "0000:00:02.0", vendor="0x8086")
    assert first_sighting(machine.host()) == "intel"


def test_then_nvidias_chips(machine: FakeMachine) -> None:
    machine.write("sys/devices/soc0/family", "Tegra")
    assert first_sighting(machine.host()) == "nvidia"


@pytest.mark.parametrize(
    ("devices", "seen", "vendor"),
    [
        ([], "", ""),
        ([], "intel", "intel"),
        ([device("intel", 0, unified=True)], "intel", "intel"),
        ([device("nvidia", 24)], "nvidia", "nvidia"),
        # A display chip of a more honoured maker does not hide the card that does the work.
        ([device("amd", 0, unified=True), device("intel", 16)], "amd", "intel"),
        ([device("nvidia", 2), device("amd", 16)], "nvidia", "amd"),
        ([device("nvidia", 24), device("amd", 24)], "nvidia", "nvidia"),
        # Behind WSL no card is on the bus, yet the library knows one.
        ([device("nvidia", 8)], "", "nvidia"),
        ([device("nvidia", 2)], "", "nvidia"),
    ],
)
def test_memory_worth_using_decides_and_then_the_order(devices: Sequence[Device], seen: str, vendor: str) -> None:
    assert choose_vendor(devices, lambda: seen) == vendor


def test_cards_are_summed_and_one_unknown_makes_the_sum_unknown() -> None:
    assert memory_of([device("amd", 24, 20), device("amd", 16, 1)], "amd") == Space(40 * GIB, 21 * GIB)
    assert memory_of([device("amd", 24, 20), device("amd", 16, None)], "amd") == Space(40 * GIB, None)


def test_another_makers_cards_are_not_counted() -> None:
    assert memory_of([device("nvidia", 24, 20), device("amd", 16, 16)], "nvidia") == Space(24 * GIB, 20 * GIB)
    assert memory_of([device("nvidia", 24, 20)], "") == Space(0, None)


def test_the_ram_is_counted_once_and_not_beside_cards() -> None:
    ram = device("nvidia", 64, 48, unified=True)
    assert memory_of([ram, ram], "nvidia") == Space(64 * GIB, 48 * GIB)
    assert memory_of([ram, device("nvidia", 48, 40)], "nvidia") == Space(48 * GIB, 40 * GIB)


def test_a_card_of_unknown_size_spoils_no_sum() -> None:
    assert memory_of([device("intel", 0), device("intel", 16, 10)], "intel") == Space(16 * GIB, 10 * GIB)


def test_the_newest_compute_capability_is_told_and_compared_by_number() -> None:
    def card(capability: str, vendor: str = "nvidia") -> Device:
        return Device(index=0, vendor=vendor, compute_capability=capability)

    assert highest_compute_capability([card("9.0"), card("12.1"), card("")]) == "12.1"
    assert highest_compute_capability([card("gfx1100", "amd")]) == ""
    assert highest_compute_capability([]) == ""


DEVICES = st.builds(
    Device,
    index=st.integers(0, 7),
    vendor=st.sampled_from(["nvidia", "amd", "intel", "vulkan", "apple"]),
    total_bytes=st.integers(0, 2**40),
    free_bytes=st.none() | st.integers(0, 2**40),
    unified=st.booleans(),
)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(DEVICES, max_size=6), st.sampled_from(["", "nvidia", "amd", "intel"]))
def test_a_vendor_is_chosen_if_anything_was_seen_and_unknown_is_never_made_up(devices: list[Device], seen: str) -> None:
    vendor = choose_vendor(devices, lambda: seen)
    assert bool(vendor) == bool(devices or seen)
    memory = memory_of(devices, vendor)
    counted = [d for d in devices if d.vendor == vendor and d.total_bytes]
    assert memory.total_bytes <= sum(d.total_bytes for d in counted)
    if all(d.free_bytes is None for d in counted):
        assert memory.available_bytes is None
