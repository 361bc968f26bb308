"""Files that are written atomically, and files that only their owner may read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """A reader sees the old or the new content, also after a power cut."""

    def write(file: IO[bytes]) -> None:
        os.fchmod(file.fileno(), mode)
        file.write(data)

    replace_file(path, write)


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a temporary file that only its owner may read, sync, rename."""
    import tempfile  # here: commands that only read a file start faster without it

    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
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
    """A folder that the user chose: made private when it is new or empty. A folder with files may be /etc or /tmp, and
    its mode is kept."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077 and not any(path.iterdir()):
        path.chmod(0o700)


def make_private_folder(path: Path) -> None:
    """A folder that Corral chose, such as `secrets`: always made private."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def read_text(path: Path) -> str | None:
    """The stripped text, or None where the file does not exist."""
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
