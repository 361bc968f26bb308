"""What the control groups leave of the machine: a container must not report its host's RAM and processors.

Both versions are read, and every level from our own group up to the one we see as the root, because any of them may be
the tight one. Backends are started inside the same groups, so their limits are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from corral.worker.hardware.host import Host

_MOUNT = Path("sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    limit_bytes: int
    available_bytes: int | None


def memory_limits(host: Host) -> list[MemoryLimit]:
    """One per level that has a limit; the caller ignores those above what the machine has."""
    found = []
    for version, level in _levels(host, "memory"):
        limit = host.number(level / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if limit is not None and limit > 0:  # "max" is no number
            found.append(MemoryLimit(limit, _free_below(host, limit, version, level)))
    return found


def _free_below(host: Host, limit: int, version: int, level: Path) -> int | None:
    used = host.number(level / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
    if used is None:
        return None
    # Cached files count as used, but the kernel gives them up before it refuses memory.
    cached = _stat(host, level, "inactive_file" if version == 2 else "total_inactive_file")
    return max(0, limit - max(0, used - cached))


def _stat(host: Host, level: Path, wanted: str) -> int:
    for line in (host.text(level / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == wanted and value.strip().isdigit():
            return int(value)
    return 0


def cpu_limit(host: Host) -> int | None:
    """Whole processors' worth of time we may use, at least one; None where nothing limits us."""
    shares = []
    for version, level in _levels(host, "cpu"):
        if version == 2:
            quota, _, period = (host.text(level / "cpu.max") or "").partition(" ")
        else:
            quota = host.text(level / "cpu.cfs_quota_us") or ""
            period = host.text(level / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period) > 0:  # "max" and -1 mean no limit
            shares.append(max(1, math.ceil(int(quota) / int(period))))
    return min(shares, default=None)


def _levels(host: Host, controller: str) -> list[tuple[int, Path]]:
    """(version, folder) of every group that `controller` may be limited in, innermost first."""
    levels: list[tuple[int, Path]] = []
    for line in (host.text("proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if hierarchy == "0" and not controllers:
            for mount in (_MOUNT, _MOUNT / "unified"):  # the second where both versions are mounted
                levels += [(2, folder) for folder in _upwards(mount, group)]
        elif controller in controllers.split(","):
            # Under version 1 a container sees its own group at the mount and its host's path in /proc: walking up
            # from the path, whose folders are not there, ends at the right place.
            for mount in dict.fromkeys((_MOUNT / controllers, _MOUNT / controller)):
                levels += [(1, folder) for folder in _upwards(mount, group)]
    return levels


def _upwards(mount: Path, group: str) -> list[Path]:
    # Seen from inside a namespace a group may be /../../x; what lies above our own view cannot be read.
    parts = [part for part in group.split("/") if part not in ("", ".", "..")]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
