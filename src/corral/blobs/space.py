"""Room on the disk, asked before anything is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from corral.blobs.errors import NoSpace
from corral.kit.humanize import format_bytes

RESERVE_BYTES = 512 << 20  # a disk filled to the last byte takes the whole machine down, not only us


def free_bytes(folder: Path) -> int:
    """What an ordinary user may still write where `folder` is, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@dataclass(frozen=True)
class Room:
    """Free disk, less a reserve that stays free."""

    reserve_bytes: int = RESERVE_BYTES
    look: Callable[[Path], int] = field(default=free_bytes, repr=False)

    def require(self, folder: Path, need_bytes: int, what: str) -> None:
        free = self.look(folder)
        if free - self.reserve_bytes < need_bytes:
            raise NoSpace(
                f"not enough disk for {what}: it needs {format_bytes(need_bytes)} and "
                f"{format_bytes(self.reserve_bytes)} stay free, but {folder} has {format_bytes(free)}"
            )
