"""One backend's folder: its versions, which one is current, switching, removing. Blocking; one caller at a time.

    <name>/versions/<id>/        the files, never changed once whole
    <name>/versions/<id>.json    its record: written last and synced, so what has one is whole
    <name>/versions/<id>.tree    what the files were when it was unpacked
    <name>/current               link to versions/<id>, replaced by a rename

Each step leaves the folder so that a crash right after it is harmless; `recover.py` tidies what such a crash leaves.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from corral.blobs.disk import remove_tree, sync_tree
from corral.blobs.folder_listing import FolderListing, read_listing, write_listing
from corral.kit.errors import NotFound
from corral.kit.files import sync_folder
from corral.worker.installer.records import (
    METADATA,
    Metadata,
    VersionRecord,
    is_version_id,
    read_record,
    version_id,
    write_record,
)

CURRENT = "current"
VERSIONS = "versions"


class BackendFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._versions = path / VERSIONS

    def exists(self) -> bool:
        return self._versions.is_dir()

    def directory(self, version: str) -> Path:
        return self._versions / version

    def records(self) -> dict[str, VersionRecord]:
        """All whole versions."""
        found: dict[str, VersionRecord] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in self._versions.iterdir():
                if path.name.endswith(".json") and (record := self.find(path.name.removesuffix(".json"))):
                    found[record.id] = record
        return found

    def find(self, version: str) -> VersionRecord | None:
        if not is_version_id(version) or not self.directory(version).is_dir():
            return None
        return read_record(self._record_path(version))

    def current(self) -> VersionRecord | None:
        """None where nothing is installed, or what was is no longer whole."""
        try:
            target = os.readlink(self.path / CURRENT)
        except OSError:
            return None
        front, _, version = target.rpartition("/")
        return self.find(version) if front == VERSIONS else None

    def previous(self) -> VersionRecord | None:
        current = self.current()
        return self.find(current.replaces) if current is not None else None

    def find_digest(self, digest: str) -> VersionRecord | None:
        """The newest version the cluster knows under that digest."""
        known = [record for record in self.records().values() if record.is_known_as(digest)]
        return max(known, key=lambda record: record.made_at, default=None)

    # Making a version

    def begin(self, content_digest: str) -> str:
        """A new empty folder for this content; the id to finish it under."""
        if self.path.is_file():
            self.path.unlink()  # a stray file at that path (docs/reference/wire/gallery.md#installation)
        self._versions.mkdir(parents=True, exist_ok=True)
        build = 1
        while True:
            version = version_id(content_digest, build)
            try:
                self.directory(version).mkdir(mode=0o755)
            except FileExistsError:
                build += 1
            else:
                return version

    def finish(self, record: VersionRecord, listing: FolderListing) -> None:
        """All files are there. From the last line on this version counts."""
        write_listing(self._tree_path(record.id), listing)
        sync_tree(self.directory(record.id))
        sync_folder(self.path)
        sync_folder(self.path.parent)
        write_record(self._record_path(record.id), record)

    def give_up(self, version: str) -> None:
        """It will never be finished."""
        if self.find(version) is None:
            self._tree_path(version).unlink(missing_ok=True)
            remove_tree(self.directory(version))
        self.tidy()

    def describe(self, record: VersionRecord, digest: str, metadata: Metadata, *, direct: bool) -> VersionRecord:
        """The same content was ordered under another digest, version or alias: those are reported from now on, or
        nobody would ever see the order as carried out."""
        known = tuple(dict.fromkeys((*record.also, record.digest)))
        described = msgspec.structs.replace(
            record,
            digest=digest or record.digest,
            also=tuple(each for each in known if each not in ("", digest or record.digest)),
            metadata=_merged(record.metadata, metadata),
            direct=record.direct or direct,
        )
        if described != record:
            write_record(self._record_path(record.id), described)
        return described

    # Switching and removing

    def switch(self, version: str, activated_at: str) -> VersionRecord:
        """Make it the current one. What was current is remembered in the new one's record first: the rename below then
        changes both at once."""
        record = self.find(version)
        if record is None:
            raise NotFound(f"{self.name} has no version {version}")
        before = self.current()
        if before is not None and before.id == version:
            return record
        replaces = before.id if before is not None else record.replaces
        record = msgspec.structs.replace(record, activated_at=activated_at, replaces=replaces)
        write_record(self._record_path(version), record)
        aside = self.path / f".{CURRENT}"
        aside.unlink(missing_ok=True)
        os.symlink(f"{VERSIONS}/{version}", aside)
        os.replace(aside, self.path / CURRENT)
        (self.path / METADATA).unlink(missing_ok=True)  # it was a meta until now
        sync_folder(self.path)
        return record

    def remove_version(self, version: str) -> None:
        """The record goes first, for good: what is left after that is rubbish, and known as such."""
        self._record_path(version).unlink(missing_ok=True)
        sync_folder(self._versions)
        self._tree_path(version).unlink(missing_ok=True)
        remove_tree(self.directory(version))

    def prune(self, in_use: Collection[Path]) -> list[str]:
        """Remove versions nobody needs: not the current one, the one before, the one fetched last and not switched to
        yet, nor one something runs from."""
        records, current = self.records(), self.current()
        if current is None:  # somebody tampered with it: nothing is removed before a person has looked
            return []
        keep = {current.id, current.replaces}
        waiting = [
            record for record in records.values() if not record.activated_at and record.made_at >= current.activated_at
        ]
        if waiting:
            keep.add(max(waiting, key=lambda record: record.made_at).id)
        gone = [version for version in records if version not in keep and not self.is_in_use(version, in_use)]
        for version in gone:
            self.remove_version(version)
        return gone

    def is_in_use(self, version: str, in_use: Collection[Path]) -> bool:
        return self.directory(version).resolve() in in_use

    def listing(self, version: str) -> FolderListing | None:
        return read_listing(self._tree_path(version))

    def tidy(self) -> None:
        """A folder without any version is no backend."""
        with contextlib.suppress(OSError):
            self._versions.rmdir()
            (self.path / CURRENT).unlink(missing_ok=True)
            self.path.rmdir()

    def _record_path(self, version: str) -> Path:
        return self._versions / f"{version}.json"

    def _tree_path(self, version: str) -> Path:
        return self._versions / f"{version}.tree"


def _merged(before: Metadata, now: Metadata) -> Metadata:
    """What is said now counts; what is left unsaid stays."""
    said = {name: value for name, value in msgspec.structs.asdict(now).items() if value}
    return msgspec.structs.replace(before, **said | {"installed_at": before.installed_at})
