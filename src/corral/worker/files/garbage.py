"""Which fetched model files are removed, and how many bytes that frees. Pure.

A file of a set and its blob are one inode; several sets may share it. Its bytes are free when its last name is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from corral.contract.messages.staging import RemovedFiles

Inode = tuple[int, int]


@dataclass(frozen=True)
class StoredSet:
    """A set of files that were fetched together."""

    name: str  # of its record
    paths: tuple[str, ...]  # below the models folder
    used_at: float  # seconds since the epoch
    inodes: Mapping[Inode, int]  # with their sizes
    in_use: bool = False

    @property
    def folder(self) -> str:
        """`model/set`, as far as all its files are in one."""
        return "/".join(self.paths[0].split("/")[:2]) if self.paths else self.name


def unneeded(sets: Iterable[StoredSet], keep: Collection[str], *, used_before: float) -> list[StoredSet]:
    """The sets that no path of which begins with one of `keep`, that are not in use and were not used just now. The
    longest unused first."""
    found = [
        each
        for each in sets
        if not each.in_use
        and each.used_at < used_before
        and not any(path.startswith(tuple(keep)) for path in each.paths)
    ]
    return sorted(found, key=lambda each: each.used_at)


def over_limit(sets: Sequence[StoredSet], limit_bytes: int, need_bytes: int = 0) -> list[StoredSet]:
    """The sets to remove so that what remains, and `need_bytes` more, fits the limit: the longest unused first. Fewer
    than that takes when the rest is in use."""
    chosen: list[StoredSet] = []
    for each in sorted((one for one in sets if not one.in_use), key=lambda one: one.used_at):
        if stored_bytes(one for one in sets if one not in chosen) + need_bytes <= limit_bytes:
            break
        chosen.append(each)
    return chosen


def stored_bytes(sets: Iterable[StoredSet]) -> int:
    """Each inode counts once."""
    found: dict[Inode, int] = {}
    for each in sets:
        found |= each.inodes
    return sum(found.values())


def describe(removed: Sequence[StoredSet], rest: Iterable[StoredSet], why: str) -> list[RemovedFiles]:
    """What removing these sets frees, one entry for each: bytes that the rest shares stay."""
    shared: set[Inode] = {inode for each in rest for inode in each.inodes}
    found = []
    for each in removed:
        freed = {inode: size for inode, size in each.inodes.items() if inode not in shared}
        shared |= freed.keys()
        found.append(RemovedFiles(name=each.folder, files=len(each.paths), size_bytes=sum(freed.values()), why=why))
    return found
