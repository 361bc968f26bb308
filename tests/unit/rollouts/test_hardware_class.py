"""Nodes that are expected to behave alike with a build."""

from __future__ import annotations

import pytest

from corral.controller.rollouts.hardware_class import hardware_class

GIB = 1024**3


@pytest.mark.parametrize(
    ("vendor", "generation", "memory_bytes", "platform", "name"),
    [
        ("nvidia", "9.0", 139 * GIB, "linux/amd64", "nvidia 9.0, 128 GiB, linux/amd64"),
        ("nvidia", "8.9", 24 * GIB, "linux/amd64", "nvidia 8.9, 32 GiB, linux/amd64"),
        ("", "", int(15.4 * GIB), "linux/arm64", "cpu, 16 GiB, linux/arm64"),
        ("", "", GIB // 2, "", "cpu, less than 1 GiB"),
        ("", "", 0, "", "cpu"),
    ],
)
def test_the_name_of_a_class(vendor: str, generation: str, memory_bytes: int, platform: str, name: str) -> None:
    found = hardware_class(vendor=vendor, generation=generation, memory_bytes=memory_bytes, platform=platform)
    assert found == name


def test_what_firmware_takes_makes_no_class_of_its_own() -> None:
    sizes = (62.7, 63.9, 64.0)
    names = {hardware_class(vendor="", generation="", memory_bytes=int(size * GIB), platform="") for size in sizes}
    assert names == {"cpu, 64 GiB"}
