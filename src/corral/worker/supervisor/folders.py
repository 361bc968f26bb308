"""One folder for each process: create, close, clean up. `shim.py` explains the files in it.

<process_id>/  spec.json  state.json  ready.json  exit.json  lock  socket  log/00000001 …
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from corral.contract.codec import encode
from corral.kit.errors import Conflict, Invalid
from corral.kit.files import make_private_folder, write_atomically
from corral.worker.supervisor.process import Exit
from corral.worker.supervisor.spec import Record

_READY = "ready.json"
_PROCESS_ID = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


def check_process_id(process_id: str) -> None:
    if not _PROCESS_ID.match(process_id):
        raise Invalid(f"{process_id[:130]!r} cannot name a process: give letters, digits, - and _, at most 128")


def make_folder(root: Path, process_id: str, record: Record) -> Path:
    """Raises Conflict: an id is never used for a second process."""
    folder = root / process_id
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise Conflict(f"a process {process_id} existed before") from None
    record.write(folder)
    return folder


def mark_ready(folder: Path, ready_at: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk the process cannot be adopted later, but runs
        write_atomically(folder / _READY, encode({"ready_at": ready_at}), mode=0o600)


def ready_at(folder: Path) -> str | None:
    try:
        return str((folder / _READY).read_text().split('"')[3])
    except (OSError, IndexError):
        return None


def list_folders(root: Path) -> list[Path]:
    """Folders of this user that no other user can enter; links are ignored."""
    make_private_folder(root)
    return sorted(path for path in root.iterdir() if _is_ours(path))


def _is_ours(path: Path) -> bool:
    about = path.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077


@contextlib.contextmanager
def locked_if_ended(folder: Path) -> Iterator[bool]:
    """True when no shim uses the folder, and none can start while the block runs; False when one does."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def give_up(folder: Path) -> Exit:
    """Record that the process has ended, unless that is recorded: a shim that starts late sees it and exits. Needs the
    folder's lock."""
    how = Exit.read(folder)
    if how is None:
        how = Exit(lost=True)
        write_atomically(folder / "exit.json", encode(how), mode=0o600)
    return how


def sweep(root: Path, keep: int) -> None:
    """Remove the folders of ended processes, except the last few of each key, whose logs tell why they ended."""
    ended: dict[str, list[tuple[float, Path]]] = {}
    for folder in list_folders(root):
        try:
            at = (folder / "exit.json").stat().st_mtime
        except FileNotFoundError:
            continue
        record = Record.read(folder)
        ended.setdefault(record.process.key if record else "", []).append((at, folder))
    for folders in ended.values():
        for _, folder in sorted(folders, reverse=True)[keep:]:
            shutil.rmtree(folder, ignore_errors=True)
