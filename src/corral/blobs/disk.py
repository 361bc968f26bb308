"""The local disk: free space, checked before anything is written; whole folders copied, removed and synced.
Blocking."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from corral.blobs.archives.entries import Bounds, UnpackCounter
from corral.blobs.errors import BadArchive, NoSpace, from_os
from corral.kit.humanize import format_bytes
from corral.kit.threads import StopToken

RESERVE_BYTES = 512 << 20  # a full disk would take down the whole machine, not only Corral


def free_bytes(folder: Path) -> int:
    """Bytes an ordinary user may still write on the file system of `folder`, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@dataclass(frozen=True)
class DiskSpace:
    """Free disk space, less a reserve that stays free."""

    reserve_bytes: int = RESERVE_BYTES
    measure: Callable[[Path], int] = field(default=free_bytes, repr=False)

    def require(self, folder: Path, need_bytes: int, what: str) -> None:
        free = self.measure(folder)
        if free - self.reserve_bytes < need_bytes:
            raise NoSpace(
                f"not enough disk for {what}: it needs {format_bytes(need_bytes)} and "
                f"{format_bytes(self.reserve_bytes)} stay free, but {folder} has {format_bytes(free)}"
            )


FICLONE = 0x40049409  # linux/fs.h: share the blocks until one side changes


def copy_tree(
    source: Path,
    target: Path,
    bounds: Bounds,
    *,
    stop: StopToken | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Copy everything in `source` into the empty folder `target`. Blocks are shared (reflink) where the file system
    can do that. Hard links are not used: a later change of the source would change the copy."""
    stop = stop or StopToken()
    count = UnpackCounter(bounds, bounds.max_bytes)
    waiting = [(str(source), str(target))]
    try:
        while waiting:
            old, new = waiting.pop()
            with os.scandir(old) as found:
                for entry in found:
                    stop.check()
                    path = os.path.join(new, entry.name)
                    size = _copy_entry(entry, path, count)
                    if size is None:
                        waiting.append((entry.path, path))
                    elif on_bytes is not None:
                        on_bytes(size)
    except OSError as error:
        raise from_os(error, f"copying {source}") from error


def remove_tree(folder: Path) -> None:
    """Remove the folder, whatever the permissions in it. Links are removed, never followed."""
    try:
        _remove(folder)
    except PermissionError:
        for path, folders, _files in os.walk(folder):
            for name in folders:
                if not os.path.islink(os.path.join(path, name)):
                    os.chmod(os.path.join(path, name), 0o700)
        _remove(folder)


def sync_tree(folder: Path) -> None:
    """Make the folder survive a power cut. One call syncs the whole file system: a backend has tens of thousands of
    files, and syncing each of them takes minutes."""
    if sys.platform.startswith("linux"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                raise OSError(ctypes.get_errno(), "syncfs failed", str(folder))
        finally:
            os.close(descriptor)
    else:
        os.sync()


def _copy_entry(entry: os.DirEntry[str], path: str, count: UnpackCounter) -> int | None:
    """Returns the size of the copied entry; None for a folder, whose content is copied later."""
    status = entry.stat(follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        count.entry(0)
        os.mkdir(path, 0o755)
        return None
    if stat.S_ISLNK(status.st_mode):
        count.entry(0)
        os.symlink(os.readlink(entry.path), path)
        return 0
    if not stat.S_ISREG(status.st_mode):
        raise BadArchive(f"{entry.path} is neither a file, a folder nor a link: a backend may contain nothing else")
    count.entry(status.st_size)
    _copy_file(entry.path, path)
    os.chmod(path, 0o755 if status.st_mode & 0o111 else 0o644)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    return status.st_size


def _copy_file(old: str, new: str) -> None:
    if sys.platform.startswith("linux"):
        with open(old, "rb") as source, open(new, "xb") as target, contextlib.suppress(OSError):
            fcntl.ioctl(target.fileno(), FICLONE, source.fileno())
            return
        os.unlink(new)
    shutil.copyfile(old, new, follow_symlinks=False)


def _remove(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink()
