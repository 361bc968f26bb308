"""What a controller concludes about a node that sent no capability (docs/reference/wire/gallery.md#capability)."""

from __future__ import annotations

import pytest

from corral.contract.hardware import capability_of, fallback_capability

GIB = 1024**3


@pytest.mark.parametrize(
    ("vendor", "total_vram", "capability"),
    [
        ("", 80 * GIB, "default"),
        ("nvidia", 0, "default"),
        ("nvidia", 4 * GIB, "default"),
        ("nvidia", 4 * GIB + 1, "nvidia"),
        ("amd", 16 * GIB, "amd"),
        ("intel", 16 * GIB, "intel"),
        ("vulkan", 8 * GIB, "vulkan"),
    ],
)
def test_the_vendor_counts_with_more_than_four_gib(vendor: str, total_vram: int, capability: str) -> None:
    assert fallback_capability(vendor, total_vram) == capability


def test_what_the_node_said_wins() -> None:
    assert capability_of("nvidia-l4t-cuda-13", "nvidia", 0) == "nvidia-l4t-cuda-13"
    assert capability_of("", "nvidia", 24 * GIB) == "nvidia"
