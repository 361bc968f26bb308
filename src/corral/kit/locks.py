"""File locks that end with the process that holds them, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def holder_of(path: Path) -> int | None:
    """The pid that holds the lock, 0 if it cannot be told which, None if no process does."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = pid_in(descriptor)
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)
    return None


def pid_in(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip() or "unknown"
