"""The parts every machine has: RAM, processors, and the disk the models lie on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from corral.worker.hardware import cgroup
from corral.worker.hardware.host import Host


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of RAM or disk. `available_bytes` is None where it cannot be measured."""

    total_bytes: int = 0
    available_bytes: int | None = None


def host_ram() -> Space:
    memory = psutil.virtual_memory()
    return Space(int(memory.total), int(memory.available))


def read_ram(host: Host, of_machine: Callable[[], Space] = host_ram) -> Space:
    """The machine's RAM, or what our control groups leave of it."""
    try:
        ram = of_machine()
    except (OSError, RuntimeError, ValueError, psutil.Error) as error:
        host.notices.tell("ram", str(error))
        ram = Space()
    return limited(ram, cgroup.memory_limits(host))


def limited(ram: Space, limits: list[cgroup.MemoryLimit]) -> Space:
    """A limit above the machine's own RAM limits nothing."""
    binding = [limit for limit in limits if not ram.total_bytes or limit.limit_bytes < ram.total_bytes]
    if not binding:
        return ram
    total = min(limit.limit_bytes for limit in binding)
    known = [limit.available_bytes for limit in binding if limit.available_bytes is not None]
    if ram.available_bytes is not None:
        known.append(ram.available_bytes)
    return Space(total, min(total, *known) if known else None)


def read_cpus(host: Host) -> int:
    """Processors this process may use."""
    try:
        ours = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS has no such call
        ours = os.cpu_count() or 1
    limit = cgroup.cpu_limit(host)
    return ours if limit is None else min(ours, limit)


def read_disk(host: Host, folder: Path) -> Space:
    """The filesystem `folder` is on, or will be once somebody makes it."""
    for candidate in (folder.absolute(), *folder.absolute().parents):
        try:
            usage = shutil.disk_usage(candidate)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            host.notices.tell("disk", f"{candidate}: {error.strerror}")
            return Space()
        return Space(usage.total, usage.free)
    return Space()
