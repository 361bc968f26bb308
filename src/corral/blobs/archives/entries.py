"""The entries of an archive, independent of its format and not yet trusted; and the limits for unpacking. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from corral.blobs.errors import TooLarge
from corral.kit.humanize import format_bytes


class EntryKind(Enum):
    FILE = "file"
    FOLDER = "folder"
    SYMLINK = "symbolic link"
    HARD_LINK = "hard link"  # another name of an earlier file


@dataclass(slots=True)
class Entry:
    name: str
    kind: EntryKind
    size: int = 0
    mode: int = 0o644
    modified_s: float = 0.0  # 0: unknown
    target: str = ""  # of a link: its target, or the other name
    data: Iterable[bytes | memoryview] = ()  # must be read before the next entry is requested, or not at all


MAX_PATH_PARTS = 128  # nested folders
MAX_NAME_BYTES = 4096


@dataclass(frozen=True)
class Bounds:
    max_bytes: int = 128 << 30
    max_entries: int = 1_000_000
    # gzip packs zeros 1,000 : 1, real software about 3 : 1. The ratio of small archives is not limited.
    max_ratio: int = 100
    ratio_floor_bytes: int = 256 << 20


class UnpackCounter:
    """Counts unpacked bytes and entries over all layers of one source, and refuses more than the limits."""

    def __init__(self, bounds: Bounds, packed_bytes: int) -> None:
        self._bounds = bounds
        by_ratio = max(bounds.ratio_floor_bytes, packed_bytes * bounds.max_ratio)
        self._most_bytes = min(bounds.max_bytes, by_ratio)
        self._packed_bytes = packed_bytes
        self.bytes = 0
        self.entries = 0

    def entry(self, size_bytes: int) -> None:
        """Count an entry and its declared size."""
        self.entries += 1
        if self.entries > self._bounds.max_entries:
            raise TooLarge(f"more than {self._bounds.max_entries} files and folders in one archive")
        self.grow(size_bytes)

    def grow(self, size_bytes: int) -> None:
        self.bytes += size_bytes
        if self.bytes > self._most_bytes:
            raise TooLarge(
                f"an archive of {format_bytes(self._packed_bytes)} would unpack to more than "
                f"{format_bytes(self._most_bytes)}: it looks like a decompression bomb"
            )
