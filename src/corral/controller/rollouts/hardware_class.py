"""The hardware class of a node: nodes of one class are expected to behave alike with a build. Pure.

A rollout tries each class on one node first. Memory counts by powers of two, because machines of one make differ by
what the firmware takes.
"""

from __future__ import annotations

from math import log2
from typing import Protocol

from corral.contract.hardware import DEFAULT, DISABLED

_GIB = 1024**3


class Machine(Protocol):
    """What a stored node says about its hardware."""

    @property
    def capability(self) -> str: ...
    @property
    def os(self) -> str: ...
    @property
    def arch(self) -> str: ...
    @property
    def gpu_vendor(self) -> str: ...
    @property
    def gpu_compute_capability(self) -> str: ...
    @property
    def total_vram(self) -> int: ...
    @property
    def total_ram(self) -> int: ...


def hardware_of(machine: Machine) -> str:
    """Nodes with different capabilities run different builds."""
    capability = machine.capability if machine.capability not in ("", DEFAULT, DISABLED) else ""
    return hardware_class(
        vendor=capability or machine.gpu_vendor,
        generation=machine.gpu_compute_capability,
        memory_bytes=machine.total_vram or machine.total_ram,
        platform=f"{machine.os}/{machine.arch}" if machine.os else "",
    )


def hardware_class(*, vendor: str, generation: str, memory_bytes: int, platform: str) -> str:
    """`nvidia 9.0, 128 GiB, linux/amd64`; `cpu, linux/arm64` where the memory is unknown."""
    parts = [" ".join(part for part in (vendor or "cpu", generation) if part)]
    if memory_bytes >= _GIB:
        parts.append(f"{2 ** round(log2(memory_bytes / _GIB))} GiB")
    elif memory_bytes > 0:
        parts.append("less than 1 GiB")
    if platform:
        parts.append(platform)
    return ", ".join(parts)
