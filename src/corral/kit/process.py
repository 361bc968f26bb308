"""A process and its machine: the default data folder, the holder of a lock file, and the garbage collector."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

HOME_DATA = Path("~/.local/share/corral")  # with the tilde: a folder that the user gives has none
ROOT_DATA = Path("/var/lib/corral")
_STARTED_S = 3.0  # by then everything that is loaded late at the start (lazy imports, first views) is there


def resolve_data(data: Path) -> Path:
    """The data folder as an absolute path; the default is below the user's home, for root below `ROOT_DATA`.

    Root's home is closed to all other users, and backends run as another user where the worker is root (ADR 0019): they
    could not reach their own files there. Root keeps the folder below its home where that folder is in use already,
    where HOME was set, or where `ROOT_DATA` belongs to another user (the service's).
    """
    at_home = data.expanduser().absolute()
    is_default = data == HOME_DATA or HOME_DATA in data.parents
    if not is_default or os.geteuid() != 0 or at_home.exists() or _is_home_chosen() or not _is_free_for_root(ROOT_DATA):
        return at_home
    return ROOT_DATA / data.relative_to(HOME_DATA)


def _is_home_chosen() -> bool:
    return Path.home() != Path(pwd.getpwuid(0).pw_dir)


def _is_free_for_root(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == 0
    except FileNotFoundError:
        return True


def lock_holder(path: Path) -> int | None:
    """The pid of the process that holds the lock file, 0 if the pid is unknown, None if no process holds it. The lock
    ends with its process, however that ends."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = read_lock_pid(descriptor)
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)
    return None


def read_lock_pid(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip() or "unknown"


def freeze_gc_after_start(loop: asyncio.AbstractEventLoop, after_s: float = _STARTED_S) -> None:
    """Exclude the objects of the start from garbage collections, once per process.

    A full collection walks every object. Most of ours are code and configuration that live as long as the process: with
    a hundred megabytes of them each collection delayed every request by a tenth of a second.
    """
    loop.call_later(after_s, freeze_gc)


def freeze_gc() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Until `freeze_gc`, or the end of the block: what a role imports and builds at its start stays, and looking
    through it again and again for garbage takes a tenth of the start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
