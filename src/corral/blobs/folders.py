"""Whole folders: copy, remove, and make sure they are on the disk. Runs in a thread."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from corral.blobs.archives.bounds import Bounds, Count
from corral.blobs.errors import BadArchive, from_os
from corral.kit.threads import StopToken

FICLONE = 0x40049409  # linux/fs.h: share the blocks until one side changes


def copy_tree(
    source: Path,
    target: Path,
    bounds: Bounds,
    *,
    stop: StopToken | None = None,
    each: Callable[[int], None] | None = None,
) -> None:
    """Everything in `source` into the empty folder `target`. Blocks are shared where the file system can do that
    safely; hard links to the source would not be: who edits it later would edit the copy."""
    stop = stop or StopToken()
    count = Count(bounds, bounds.max_bytes)
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
                    elif each is not None:
                        each(size)
    except OSError as error:
        raise from_os(error, f"copying {source}") from error


def remove_tree(folder: Path) -> None:
    """Gone, whatever the permissions in it. Links are removed, never followed."""
    try:
        _remove(folder)
    except PermissionError:
        for path, folders, _files in os.walk(folder):
            for name in folders:
                if not os.path.islink(os.path.join(path, name)):
                    os.chmod(os.path.join(path, name), 0o700)
        _remove(folder)


def sync_tree(folder: Path) -> None:
    """All of it survives a power cut from here on. One call for the whole file system: a backend has tens of thousands
    of files, and syncing each costs minutes."""
    if sys.platform.startswith("linux"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                raise OSError(ctypes.get_errno(), "syncfs failed", str(folder))
        finally:
            os.close(descriptor)
    else:
        os.sync()


def _copy_entry(entry: os.DirEntry[str], path: str, count: Count) -> int | None:
    """Its size; None for a folder, whose content is still to come."""
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
        raise BadArchive(f"{entry.path} is neither file, folder nor link; a backend brings nothing else")
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
