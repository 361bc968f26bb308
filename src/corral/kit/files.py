"""Files that must be whole or absent, and files nobody else may read."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write aside, sync, rename: a reader sees the old content or the new, also after a power cut."""
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    sync_folder(path.parent)


def write_secret(path: Path, text: str) -> None:
    """A file only its owner can read; a folder made for it only its owner can list."""
    make_folder(path.parent)
    write_atomically(path, text.encode(), mode=0o600)


def make_folder(path: Path) -> None:
    """A folder somebody named to us: private when we make it or find it empty. One with files in it may be /etc or
    /tmp, and is nobody's to close."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077 and not any(path.iterdir()):
        path.chmod(0o700)


def make_private_folder(path: Path) -> None:
    """A folder of our own naming, such as `secrets`: private, also when somebody opened it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def read_text(path: Path) -> str | None:
    """The stripped text, or None where there is no such file."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None


def sync_folder(path: Path) -> None:
    """Make a rename inside the folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
