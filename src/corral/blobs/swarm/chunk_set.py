"""A set of chunks of one blob, as a bitmap: in memory an integer, on the wire and on the disk bytes. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from corral.kit.errors import Invalid

ALL = "all"
MAX_CHUNKS = 1 << 20  # 4 TiB in chunks of 4 MiB


@dataclass(frozen=True, slots=True)
class ChunkSet:
    count: int  # of chunks of the blob, not of this set
    bits: int = 0  # bit i: chunk i is in the set

    @staticmethod
    def complete(count: int) -> ChunkSet:
        return ChunkSet(count, (1 << count) - 1)

    @staticmethod
    def of(count: int, indexes: Iterable[int]) -> ChunkSet:
        """Raises Invalid for an index that the blob does not have."""
        bits = 0
        for index in indexes:
            if not 0 <= index < count:
                raise Invalid(f"there is no chunk {index} in a blob of {count} chunks")
            bits |= 1 << index
        return ChunkSet(count, bits)

    def __contains__(self, index: int) -> bool:
        return bool(self.bits >> index & 1)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __iter__(self) -> Iterator[int]:
        rest = self.bits
        while rest:
            lowest = rest & -rest
            yield lowest.bit_length() - 1
            rest ^= lowest

    def pick(self, chance: Random) -> int:
        """A random chunk, without listing the set: one behind a gap is more likely. The set must not be empty."""
        start = chance.randrange(self.count)
        rest = self.bits >> start
        return start + (rest & -rest).bit_length() - 1 if rest else (self.bits & -self.bits).bit_length() - 1

    @property
    def is_complete(self) -> bool:
        return len(self) == self.count

    def add(self, index: int) -> ChunkSet:
        return ChunkSet(self.count, self.bits | 1 << index)

    def minus(self, other: ChunkSet) -> ChunkSet:
        return ChunkSet(self.count, self.bits & ~other.bits)

    def union(self, other: ChunkSet) -> ChunkSet:
        return ChunkSet(self.count, self.bits | other.bits)

    def to_bytes(self) -> bytes:
        return self.bits.to_bytes(-(-self.count // 8), "little")

    def encode(self) -> str:
        """For messages and headers: `all`, or base64 of the bitmap."""
        return ALL if self.is_complete else base64.b64encode(self.to_bytes()).decode()


def from_bytes(data: bytes, count: int) -> ChunkSet:
    """Raises Invalid for a bitmap of another length, or with bits behind the last chunk."""
    bits = int.from_bytes(data, "little")
    if len(data) != -(-count // 8) or bits >> count:
        raise Invalid(f"the bitmap does not fit a blob of {count} chunks")
    return ChunkSet(count, bits)


def decode_chunks(text: str, count: int) -> ChunkSet:
    """The opposite of `encode`. Raises Invalid."""
    if not 0 <= count <= MAX_CHUNKS:
        raise Invalid(f"a blob cannot have {count} chunks")
    if text == ALL:
        return ChunkSet.complete(count)
    if len(text) > MAX_CHUNKS:
        raise Invalid("the bitmap is too long")
    try:
        return from_bytes(base64.b64decode(text, validate=True), count)
    except (binascii.Error, ValueError) as error:
        raise Invalid("the bitmap is not base64") from error
