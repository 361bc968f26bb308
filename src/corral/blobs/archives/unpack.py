"""Writes entries to the disk, each where `tree.py` decided. Blocking: call it in a thread.

Every entry is created as a new file (`O_EXCL`, `mkdir` and `symlink` fail if the name exists), so the disk is equal to
the model, even on a file system that takes `A` and `a` for one name. No other process may write into the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from corral.blobs.archives.entries import Entry, EntryKind, UnpackCounter
from corral.blobs.archives.tree import Placed, Removed, Tree
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import UnsafeArchive, from_os
from corral.kit.threads import StopToken

SPACE_CHECK_BYTES = 64 << 20
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
LATEST_S = 1 << 33  # a time beyond the year 2242 is a mistake, and some file systems refuse it


class Unpacker:
    """Unpacks one or more layers into one folder. The result is safe only after `finish()`."""

    def __init__(
        self,
        folder: Path,
        count: UnpackCounter,
        *,
        rootfs: bool = False,
        space: DiskSpace | None = None,
    ) -> None:
        self._folder = folder
        self._front = f"{folder}{os.sep}"
        self._count = count
        self._tree = Tree(rootfs=rootfs)
        self._space = space or DiskSpace()
        self._stop = StopToken()
        self._unchecked_bytes = 0

    def add(self, entries: Iterable[Entry], stop: StopToken | None = None) -> None:
        """Unpack one layer. Raises UnsafeArchive, BadArchive, TooLarge, NoSpace; the folder must not be used then."""
        self._stop = stop or StopToken()
        self._tree.next_layer()
        for entry in entries:
            self._stop.check()
            self._count.entry(entry.size)
            self._require_space(entry.size)
            try:
                self._put(entry)
            except FileExistsError as error:
                raise UnsafeArchive(
                    f"{entry.name[:200]!r} exists already under a name that this file system treats as equal"
                ) from error
            except OSError as error:
                raise from_os(error, f"unpacking {entry.name[:200]!r}") from error

    def finish(self) -> None:
        self._tree.check_links()

    def _put(self, entry: Entry) -> None:
        match self._tree.put(entry):
            case Removed(paths):
                for path in paths:
                    self._remove(path)
            case Placed() as placed:
                self._place(entry, placed)

    def _place(self, entry: Entry, placed: Placed) -> None:
        for folder in placed.folders:
            self._count.entry(0)
            os.mkdir(self._front + folder, 0o755)
        if placed.keep:
            return
        if placed.remove:
            self._remove(placed.path)
        path = self._front + placed.path
        match entry.kind:
            case EntryKind.FILE:
                self._write(path, entry)
            case EntryKind.FOLDER:
                os.mkdir(path, 0o755)
            case EntryKind.SYMLINK:
                os.symlink(placed.target, path)
            case EntryKind.HARD_LINK:
                self._link(self._front + placed.target, path)

    def _write(self, path: str, entry: Entry) -> None:
        # Only the owner may write, and setuid bits are dropped; executable files stay executable.
        descriptor = os.open(path, NEW_FILE, 0o755 if entry.mode & 0o111 else 0o644)
        try:
            for piece in entry.data:
                self._stop.check()
                _write_all(descriptor, piece)
            if 0 < entry.modified_s < LATEST_S:  # Python compares a source's time with that of its bytecode
                os.utime(descriptor, (entry.modified_s, entry.modified_s))
        finally:
            os.close(descriptor)

    def _link(self, source: str, path: str) -> None:
        try:
            os.link(source, path, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EXDEV):
                raise
            self._count.grow(os.lstat(source).st_size)
            with open(source, "rb") as old, open(os.open(path, NEW_FILE, 0o600), "wb") as new:
                shutil.copyfileobj(old, new)
            shutil.copystat(source, path)

    def _remove(self, path: str) -> None:
        full = self._front + path
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(full) and not os.path.islink(full):
                shutil.rmtree(full)
            else:
                os.unlink(full)

    def _require_space(self, size_bytes: int) -> None:
        """Check the free space before large files and periodically: `ENOSPC` would come too late for other programs."""
        self._unchecked_bytes += size_bytes
        if self._unchecked_bytes >= SPACE_CHECK_BYTES:
            self._unchecked_bytes = 0
            self._space.require(self._folder, size_bytes, "unpacking")


def _write_all(descriptor: int, piece: bytes | memoryview) -> None:
    while len(piece):
        piece = piece[os.write(descriptor, piece) :]
