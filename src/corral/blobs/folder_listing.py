"""The listing of a folder: every file in it, and one digest over all of them. Two listings tell whether two folders are
equal, or what changed in one folder. Blocking: call it in a thread."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from corral.blobs.digests import BLOCK_BYTES, digest_of_parts
from corral.blobs.errors import BadArchive, from_os
from corral.kit.files import write_atomically
from corral.kit.threads import StopToken

FILE, FOLDER, LINK = "f", "d", "l"


class ListingRow(msgspec.Struct, frozen=True, array_like=True):
    path: str  # relative, with /
    kind: str  # f, d, l
    executable: bool = False
    size: int = 0
    content: str = ""  # of a file: its sha256; of a link: what it points to


@dataclass(frozen=True)
class FolderListing:
    """Sorted by path. Times, owners and permissions other than `executable` are left out: a copy does not keep them."""

    rows: tuple[ListingRow, ...]

    @property
    def size_bytes(self) -> int:
        return sum(row.size for row in self.rows)

    @property
    def digest(self) -> str:
        return digest_of_parts(*(part for row in self.rows for part in _parts(row)))


@dataclass(frozen=True)
class Difference:
    """What changed in a folder since it was listed. Added files are no damage: programs write files beside themselves
    (`__pycache__`, logs)."""

    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        return not self.missing and not self.changed


def list_tree(
    folder: Path,
    stop: StopToken | None = None,
    *,
    on_bytes: Callable[[int], None] | None = None,
    leave_out: Iterable[str] = (),
) -> FolderListing:
    """Read the whole folder. `leave_out`: names at the top. Raises BadArchive for special files such as devices."""
    try:
        return FolderListing(
            tuple(_walk(folder, stop or StopToken(), on_bytes or (lambda _size: None), frozenset(leave_out)))
        )
    except OSError as error:
        raise from_os(error, f"reading {folder}") from error


def compare_listings(before: FolderListing, now: FolderListing) -> Difference:
    old, new = ({row.path: row for row in listing.rows} for listing in (before, now))
    return Difference(
        missing=tuple(path for path in old if path not in new),
        changed=tuple(path for path in old if path in new and old[path] != new[path]),
        added=tuple(path for path in new if path not in old),
    )


def write_listing(path: Path, listing: FolderListing) -> None:
    write_atomically(path, msgspec.json.encode(listing.rows))


def read_listing(path: Path) -> FolderListing | None:
    """None if there is no listing, or none that can be read."""
    try:
        return FolderListing(msgspec.json.decode(path.read_bytes(), type=tuple[ListingRow, ...]))
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _parts(row: ListingRow) -> Sequence[str]:
    return row.path, row.kind, "x" if row.executable else "-", str(row.size), row.content


def _walk(top: Path, stop: StopToken, on_bytes: Callable[[int], None], leave_out: frozenset[str]) -> list[ListingRow]:
    rows: list[ListingRow] = []
    waiting = [(str(top), "")]
    while waiting:
        folder, front = waiting.pop()
        with os.scandir(folder) as found:
            for entry in found:
                stop.check()
                if not front and entry.name in leave_out:
                    continue
                path = front + entry.name
                status = entry.stat(follow_symlinks=False)
                rows.append(_row(entry, path, status, stop, on_bytes))
                if stat.S_ISDIR(status.st_mode):
                    waiting.append((entry.path, f"{path}/"))
    return sorted(rows, key=lambda row: row.path)


def _row(
    entry: os.DirEntry[str], path: str, status: os.stat_result, stop: StopToken, on_bytes: Callable[[int], None]
) -> ListingRow:
    # A name that is not UTF-8 cannot be written as JSON; the escaped form is still unique.
    shown = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if stat.S_ISDIR(status.st_mode):
        return ListingRow(shown, FOLDER)
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(entry.path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        return ListingRow(shown, LINK, content=target)
    if not stat.S_ISREG(status.st_mode):
        raise BadArchive(f"{entry.path} is neither a file, a folder nor a link: a backend may contain nothing else")
    size, digest = _hash(entry.path, stop, on_bytes)
    return ListingRow(shown, FILE, bool(status.st_mode & 0o100), size, digest)


def _hash(path: str, stop: StopToken, on_bytes: Callable[[int], None]) -> tuple[int, str]:
    whole, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while block := os.read(descriptor, BLOCK_BYTES):
            stop.check()
            whole.update(block)
            size += len(block)
            on_bytes(len(block))
    finally:
        os.close(descriptor)
    return size, whole.hexdigest()
