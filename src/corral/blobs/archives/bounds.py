"""How much an archive may unpack to. Counted as it goes, and refused before the bytes are written. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from corral.blobs.errors import TooLarge
from corral.kit.humanize import format_bytes

MOST_PARTS = 128  # folders in folders
MOST_NAME_BYTES = 4096


@dataclass(frozen=True)
class Bounds:
    max_bytes: int = 128 << 30
    max_entries: int = 1_000_000
    # gzip packs zeros 1,000 : 1, real software about 3 : 1. Small archives may do as they like.
    max_ratio: int = 100
    ratio_floor_bytes: int = 256 << 20


class Count:
    """What has been unpacked so far, over all layers of one thing."""

    def __init__(self, bounds: Bounds, packed_bytes: int) -> None:
        self._bounds = bounds
        by_ratio = max(bounds.ratio_floor_bytes, packed_bytes * bounds.max_ratio)
        self._most_bytes = min(bounds.max_bytes, by_ratio)
        self._packed_bytes = packed_bytes
        self.bytes = 0
        self.entries = 0

    def entry(self, size_bytes: int) -> None:
        """One more entry that says it has so many bytes. Its word is enough to refuse it."""
        self.entries += 1
        if self.entries > self._bounds.max_entries:
            raise TooLarge(f"more than {self._bounds.max_entries} files and folders in one archive")
        self.grow(size_bytes)

    def grow(self, size_bytes: int) -> None:
        self.bytes += size_bytes
        if self.bytes > self._most_bytes:
            raise TooLarge(
                f"an archive of {format_bytes(self._packed_bytes)} wants to unpack to more than "
                f"{format_bytes(self._most_bytes)}: this looks like a bomb"
            )
