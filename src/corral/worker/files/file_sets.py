"""Records which files were fetched together, and when they were last used. Blocking.

A set is one small file that lists paths; its modification time is the time of the last use. A file that is in no set
was not fetched by this worker and is never removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.worker.files.garbage import Inode, StoredSet

log = get_log(__name__)


@dataclass(frozen=True)
class FileSet:
    record: Path
    paths: tuple[str, ...]  # below the models folder
    used_at: float  # seconds since the epoch


class FileSets:
    def __init__(self, folder: Path, models: Path) -> None:
        """`folder` holds the records."""
        self._folder = folder
        self._models = models

    def use(self, paths: Iterable[str]) -> None:
        """Record that these paths are used now."""
        listed = sorted(paths)
        name = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:24]
        self._folder.mkdir(parents=True, exist_ok=True)
        record = self._folder / f"{name}.json"
        try:
            os.utime(record)
        except FileNotFoundError:
            write_atomically(record, msgspec.json.encode(listed))

    def unused(self, in_use: Collection[Path], *, before: float | None = None) -> list[FileSet]:
        """The sets without a file in use, the longest unused first; with `before`, only those last used before that
        time. A folder in `in_use` stands for all files in it."""
        busy = _real_paths(in_use)
        found = [each for each in self._all() if not self._is_any(each, busy)]
        return sorted(
            (each for each in found if before is None or each.used_at < before), key=lambda each: each.used_at
        )

    def list_stored(self, in_use: Collection[Path]) -> list[StoredSet]:
        """All sets, with the disk space of their files."""
        busy = _real_paths(in_use)
        return [
            StoredSet(
                name=each.record.stem,
                paths=each.paths,
                used_at=each.used_at,
                inodes=self._inodes_of(each),
                in_use=self._is_any(each, busy),
            )
            for each in self._all()
        ]

    def find(self, name: str) -> FileSet | None:
        """The set of that record."""
        return next((each for each in self._all() if each.record.stem == name), None)

    def is_used(self, chosen: FileSet, in_use: Collection[Path]) -> bool:
        """Whether a file of the set is in use, or the set was used since its record was read."""
        try:
            used_at = chosen.record.stat().st_mtime
        except FileNotFoundError:
            return False
        return used_at > chosen.used_at or self._is_any(chosen, _real_paths(in_use))

    def inodes(self) -> set[tuple[int, int]]:
        """The inodes of all existing files of sets. The record of a set without any existing file is removed: its
        model was deleted."""
        found: set[tuple[int, int]] = set()
        for each in self._all():
            there = {inode for path in each.paths if (inode := inode_of(self._models / path)) is not None}
            if not there:
                each.record.unlink(missing_ok=True)
            found |= there
        return found

    def remove(self, gone: FileSet) -> None:
        """Remove the files of the set that belong to no other set, and the folders that are empty afterwards."""
        others = {path for each in self._all() if each.record != gone.record for path in each.paths}
        for path in gone.paths:
            file = self._models / path
            # A user may have put a link in the place of a folder: what is behind it was not fetched by this worker.
            if path not in others and file.parent.resolve().is_relative_to(self._models.resolve()):
                file.unlink(missing_ok=True)
                self._prune(file.parent)
        gone.record.unlink(missing_ok=True)
        log.info("unused model files were removed", files=len(gone.paths), first=next(iter(gone.paths), ""))

    def _inodes_of(self, each: FileSet) -> dict[Inode, int]:
        found: dict[Inode, int] = {}
        for path in each.paths:
            with contextlib.suppress(OSError):
                status = (self._models / path).stat()
                found[status.st_dev, status.st_ino] = status.st_size
        return found

    def _is_any(self, each: FileSet, busy: Collection[str]) -> bool:
        return any(_is_in(busy, self._real(path)) for path in each.paths)

    def _prune(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # a folder that is not empty ends the loop
            while folder != self._models and folder.is_relative_to(self._models):
                folder.rmdir()
                folder = folder.parent

    def _real(self, path: str) -> str:
        return os.path.realpath(self._models / path)

    def _all(self) -> list[FileSet]:
        found = []
        for record in self._folder.glob("*.json"):
            try:
                paths = msgspec.json.decode(record.read_bytes(), type=tuple[str, ...])
                found.append(FileSet(record, paths, record.stat().st_mtime))
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("a list of model files cannot be read", file=record.name, reason=str(error))
        return found


def _real_paths(paths: Collection[Path]) -> frozenset[str]:
    return frozenset(os.path.realpath(path) for path in paths)


def _is_in(busy: Collection[str], path: str) -> bool:
    """Whether the path or a folder above it is in `busy`."""
    return path in busy or any(str(folder) in busy for folder in Path(path).parents)


def inode_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
