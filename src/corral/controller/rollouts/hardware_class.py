"""The hardware class of a node: nodes of one class are expected to behave alike with a build. Pure.

A rollout tries each class on one node first. Memory counts by powers of two, because machines of one make differ by
what the firmware takes.
"""

from __future__ import annotations

from math import log2

_GIB = 1024**3


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
