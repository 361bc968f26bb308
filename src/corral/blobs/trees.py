"""A folder as a list of what is in it, and one digest for all of that. Tells whether two folders are the same, and what
has changed in one since it was listed. Reading runs in a thread."""

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


class Row(msgspec.Struct, frozen=True, array_like=True):
    path: str  # relative, with /
    kind: str  # f, d, l
    executable: bool = False
    size: int = 0
    content: str = ""  # of a file: its sha256; of a link: what it points to


@dataclass(frozen=True)
class Listing:
    """Sorted by path. Times, owners and the finer permissions are not part of it: they do not survive a copy."""

    rows: tuple[Row, ...]

    @property
    def size_bytes(self) -> int:
        return sum(row.size for row in self.rows)

    @property
    def digest(self) -> str:
        return digest_of_parts(*(part for row in self.rows for part in _parts(row)))


@dataclass(frozen=True)
class Difference:
    """What happened to a folder since it was listed. What came in addition is no damage: programs write beside
    themselves (`__pycache__`, logs)."""

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
    each: Callable[[int], None] | None = None,
    leave_out: Iterable[str] = (),
) -> Listing:
    """Read all of it. `leave_out` are names at the top. Raises BadArchive for what is neither file, folder nor link."""
    try:
        return Listing(tuple(_walk(folder, stop or StopToken(), each or (lambda _size: None), frozenset(leave_out))))
    except OSError as error:
        raise from_os(error, f"reading {folder}") from error


def compare(before: Listing, now: Listing) -> Difference:
    old, new = ({row.path: row for row in listing.rows} for listing in (before, now))
    return Difference(
        missing=tuple(path for path in old if path not in new),
        changed=tuple(path for path in old if path in new and old[path] != new[path]),
        added=tuple(path for path in new if path not in old),
    )


def write_listing(path: Path, listing: Listing) -> None:
    write_atomically(path, msgspec.json.encode(listing.rows))


def read_listing(path: Path) -> Listing | None:
    """None where there is none, or none that can be read."""
    try:
        return Listing(msgspec.json.decode(path.read_bytes(), type=tuple[Row, ...]))
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _parts(row: Row) -> Sequence[str]:
    return row.path, row.kind, "x" if row.executable else "-", str(row.size), row.content


def _walk(top: Path, stop: StopToken, each: Callable[[int], None], leave_out: frozenset[str]) -> list[Row]:
    rows: list[Row] = []
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
                rows.append(_row(entry, path, status, stop, each))
                if stat.S_ISDIR(status.st_mode):
                    waiting.append((entry.path, f"{path}/"))
    return sorted(rows, key=lambda row: row.path)


def _row(
    entry: os.DirEntry[str], path: str, status: os.stat_result, stop: StopToken, each: Callable[[int], None]
) -> Row:
    # A name that is not UTF-8 cannot be written as JSON; escaped it still tells one from another.
    shown = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if stat.S_ISDIR(status.st_mode):
        return Row(shown, FOLDER)
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(entry.path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        return Row(shown, LINK, content=target)
    if not stat.S_ISREG(status.st_mode):
        raise BadArchive(f"{entry.path} is neither file, folder nor link; a backend brings nothing else")
    size, digest = _hash(entry.path, stop, each)
    return Row(shown, FILE, bool(status.st_mode & 0o100), size, digest)


def _hash(path: str, stop: StopToken, each: Callable[[int], None]) -> tuple[int, str]:
    whole, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while block := os.read(descriptor, BLOCK_BYTES):
            stop.check()
            whole.update(block)
            size += len(block)
            each(len(block))
    finally:
        os.close(descriptor)
    return size, whole.hexdigest()
