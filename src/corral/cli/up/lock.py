"""One `up` per data folder: an flock that ends with the process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from corral.kit.errors import Conflict
from corral.kit.locks import pid_in


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """`Conflict` when somebody else holds it. The file stays: removing it would let two hold different files."""
    with _opened(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"already running, pid {pid_in(descriptor)}, on {path.parent}: "
                "stop it first, or give this one its own folder with --data and other ports"
            ) from None
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
