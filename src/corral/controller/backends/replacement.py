"""How the processes of a backend are replaced when its version changes (docs/explanation/design.md#upgrades). Pure.

If the memory holds both, the new process starts beside the old one and requests are not interrupted. Otherwise the old
process ends first. A process needs the memory that was reserved for it; without a reservation it counts as needing
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from corral.contract.messages.backends import NodeBackend
from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.inventory.installed import concrete_name
from corral.kit.humanize import format_bytes


def processes_of(
    processes: Iterable[ReplicaProcess], rows: Sequence[NodeBackend], backend: str
) -> list[ReplicaProcess]:
    """The processes of a backend, under any of its names on the node: its own, its alias, its meta entries."""
    build = concrete_name(rows, backend)
    metas = {row.name for row in rows if row.is_meta and row.meta_backend_for == build}
    aliases = {row.alias for row in rows if row.name == build and row.alias}
    names = {backend, build} | metas | aliases
    return [process for process in processes if process.backend in names]


class MemoryNeed(NamedTuple):
    """What the successors of all processes need, and what is free. Bytes."""

    needs_vram: int
    free_vram: int
    needs_ram: int
    free_ram: int

    @property
    def fits(self) -> bool:
        return self.needs_vram <= self.free_vram and self.needs_ram <= self.free_ram

    @property
    def words(self) -> str:
        """Of the memory that does not suffice, else of each that is needed; empty: no process has a reservation."""
        both = (
            ("GPU memory", self.needs_vram, self.free_vram),
            ("RAM", self.needs_ram, self.free_ram),
        )
        shown = [each for each in both if each[1] > each[2]] or [each for each in both if each[1]]
        return ", ".join(
            f"needs {format_bytes(needs)} of {name}, {format_bytes(free)} free" for name, needs, free in shown
        )


def memory_beside(processes: Iterable[ReplicaProcess], *, free_vram: int, free_ram: int) -> MemoryNeed:
    """For a successor of each process beside all of them: a worker starts all before it ends the first."""
    vram = ram = 0
    for process in processes:
        if process.devices:
            vram += process.memory_bytes
        else:
            ram += process.memory_bytes
    return MemoryNeed(vram, free_vram, ram, free_ram)


def start_took_s(process: ReplicaProcess) -> float | None:
    """How long the process took from its start until it was ready: the estimate for its successor."""
    try:
        began, served = datetime.fromisoformat(process.started_at), datetime.fromisoformat(process.ready_at)
    except ValueError:
        return None
    return max(0.0, (served - began).total_seconds())
