"""The watched folder: YAML files in it define models, and removing a file removes its models.

The folder is polled: it may be on a network, and the next pass makes up for a missed one. A change counts when two
passes saw it, so that no half-written file is read. While a file changes, models whose files disappeared are kept for a
few passes: it may be their file under another name. A file that changes without end delays only itself. A file that is
not valid YAML keeps the models it had, and so does an unusable entry: a typing error ends no running model, also not
after a restart, when only the store knows the models. Each folder has an id, stored in it, and its controller changes
only models of its files: another controller's folder is another folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from corral.contract.models import Definition, read_definition
from corral.controller.models.edits import ModelOrigin
from corral.controller.models.service import COUNTER, Models
from corral.controller.runtime.change_feed import ChangeFeed
from corral.gallery.models.documents import MAX_DEFINITION_BYTES, read_document
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Invalid
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store
from corral.store.tables import models, revisions

log = get_log(__name__)

ID_FILE = ".corral-folder"
MAX_MOVING_PASSES = 5
_COMPANIONS = ("mmproj", "draft_model", "lora_adapter", "lora_base")

Fingerprint = tuple[int, int, int]  # inode, size, mtime: what differs when a file was changed


@dataclass(frozen=True, slots=True)
class FolderListing:
    """The YAML files of the folder."""

    id: str
    fingerprints: Mapping[str, Fingerprint]


@dataclass
class _File:
    """One file as it was last read."""

    fingerprint: Fingerprint
    definitions: tuple[Definition, ...] = ()
    problems: tuple[str, ...] = field(default=())
    unusable: frozenset[str] | None = frozenset()  # models with unusable entries; None: unknown which

    def may_define(self, model: str) -> bool:
        return self.unusable is None or model in self.unusable


class ModelsFolder:
    name = "models folder"

    def __init__(
        self, folder: Path, service: Models, store: Store, changes: ChangeFeed, clock: Clock, *, interval_s: float
    ) -> None:
        self._folder = folder
        self._service = service
        self._store = store
        self._changes = changes
        self._clock = clock
        self._interval_s = interval_s
        self._before: FolderListing | None = None
        self._files: dict[str, _File] = {}
        self._moving_for = 0  # consecutive passes in which some file changed
        self._has_unwritten = False  # files were read that are not stored yet
        self._seen = -1  # the counter of models when the folder and the store last agreed

    async def run(self) -> None:
        await run_every("models folder", self._interval_s, self.run_once, clock=self._clock)

    @property
    def problems(self) -> dict[str, tuple[str, ...]]:
        """By file: its unusable entries."""
        return {name: file.problems for name, file in sorted(self._files.items()) if file.problems}

    async def run_once(self) -> None:
        """A new, changed or removed file counts from the second pass that sees it."""
        seen = await asyncio.to_thread(list_folder, self._folder)
        before, self._before = self._before, seen
        if seen is None or before is None or before.id != seen.id:
            return
        steady = {name: mark for name, mark in seen.fingerprints.items() if before.fingerprints.get(name) == mark}
        moving = seen.fingerprints.keys() - steady.keys()
        gone = {name for name in self._files if name not in seen.fingerprints and name not in before.fingerprints}
        changed = {
            name for name, mark in steady.items() if name not in self._files or self._files[name].fingerprint != mark
        }
        for name in changed:
            self._files[name] = await asyncio.to_thread(
                _read_file, self._folder / name, steady[name], self._files.get(name)
            )
            self._has_unwritten = True
            for problem in self._files[name].problems:
                log.warning("model in a file cannot be used", file=name, problem=problem)
        for name in gone:
            del self._files[name]
            self._has_unwritten = True
        self._moving_for = self._moving_for + 1 if moving else 0
        gone_for_good = not moving or self._moving_for > MAX_MOVING_PASSES
        await self._apply(seen.id, moving if gone_for_good else None)

    async def _apply(self, folder_id: str, moving: Collection[str] | None) -> None:
        """Also what somebody else changed meanwhile: what files say holds. `moving`: files whose models are kept though
        they may not have been read yet; None: no model goes."""
        async with self._store.read() as tx:
            counter = (await revisions.read_all(tx)).get(COUNTER, 0)
        if not self._has_unwritten and counter == self._seen:
            return
        written, removed = await self._write(models_in(folder_id, self._files), folder_id, moving)
        self._has_unwritten = moving is None
        async with self._store.read() as tx:
            self._seen = (await revisions.read_all(tx)).get(COUNTER, 0)
        for name in (*written, *removed):
            log.info("model of a file", model=name, change="removed" if name in removed else "written")
            self._changes.notify(COUNTER, name)

    async def _write(
        self, wanted: Mapping[str, tuple[Definition, str]], folder_id: str, moving: Collection[str] | None
    ) -> tuple[list[str], list[str]]:
        written, removed = [], []
        async with self._store.write() as tx:
            await revisions.hold(tx, COUNTER)
            ours = [
                row
                for row in await models.list_of_origin(tx, ModelOrigin.FILE)
                if row.source.startswith(f"{folder_id}/")
            ]
            for row in ours:
                if row.id not in wanted and not self._may_still_exist(row, moving):
                    await models.delete(tx, row.id)
                    removed.append(row.id)
            for name, (definition, source) in wanted.items():
                try:
                    if await self._service.put_of_file(tx, definition, source):
                        written.append(name)
                except Invalid as error:
                    log.warning("model in a file cannot be used", file=source, model=name, problem=error.message)
            if written or removed:
                await revisions.bump(tx, COUNTER)
        return written, removed

    def _may_still_exist(self, row: models.StoredModel, moving: Collection[str] | None) -> bool:
        """Whether its file may still define it."""
        name = row.source.partition("/")[2]
        return moving is None or name in moving or (name in self._files and self._files[name].may_define(row.id))


def models_in(folder_id: str, files: Mapping[str, _File]) -> dict[str, tuple[Definition, str]]:
    """Every model of every file; of two of one name the file that comes first by its own name counts."""
    found: dict[str, tuple[Definition, str]] = {}
    for name in sorted(files):
        for definition in files[name].definitions:
            found.setdefault(definition.name, (definition, f"{folder_id}/{name}"))
    return found


def list_folder(folder: Path) -> FolderListing | None:
    """None for a missing folder: one that is not mounted keeps its models."""
    try:
        fingerprints = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.name.endswith((".yaml", ".yml")) or not entry.is_file():
                    continue
                stat = entry.stat()
                fingerprints[entry.name] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        return FolderListing(folder_id(folder), fingerprints)
    except FileNotFoundError:
        return None


def folder_id(folder: Path) -> str:
    """Stored in the folder; derived from host and path where it cannot be written."""
    mark = folder / ID_FILE
    try:
        if known := mark.read_text(encoding="ascii").strip()[:64]:
            return known
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError):
        return _derived_id(folder)
    try:
        with open(mark, "x", encoding="ascii") as file:
            file.write(made := secrets.token_hex(8))
        return made
    except FileExistsError:  # another process was faster; the next pass reads it
        return _derived_id(folder)
    except OSError:
        return _derived_id(folder)


def _derived_id(folder: Path) -> str:
    return hashlib.sha256(f"{socket.gethostname()}:{folder.resolve()}".encode()).hexdigest()[:16]


def _read_file(path: Path, mark: Fingerprint, before: _File | None) -> _File:
    """A file that is not valid YAML keeps its definitions."""
    kept = before.definitions if before is not None else ()
    try:
        if mark[1] > MAX_DEFINITION_BYTES:
            raise Invalid(f"has more than {MAX_DEFINITION_BYTES} bytes")
        text = path.read_bytes()
        if not text.strip():  # as a full disk leaves it, or a slip of the hand; nothing at all is not what `[]` says
            raise Invalid("is empty, and what it said before holds: to end its models, delete it or write [] into it")
        document = read_document(text)
        definitions = tuple(with_local_files(definition, path.parent) for definition in document.definitions)
    except (CorralError, OSError) as error:
        return _File(mark, kept, (error.message if isinstance(error, CorralError) else str(error),), unusable=None)
    about = frozenset(problem.name for problem in document.problems)
    problems = tuple(str(problem) for problem in document.problems)
    return _File(mark, definitions, problems, unusable=None if "" in about else about)


def with_local_files(definition: Definition, folder: Path) -> Definition:
    """Weights that lie beside the file are its files too, though it need not say so: everybody else must be able to
    fetch them."""
    parameters = definition.whole.get("parameters")
    named = [parameters.get("model") if isinstance(parameters, Mapping) else None]
    named += [definition.whole.get(key) for key in _COMPANIONS]
    listed = {file.path for file in definition.files}
    found = [
        {"filename": name, "uri": (folder / name).absolute().as_uri(), "size": (folder / name).stat().st_size}
        for name in dict.fromkeys(name for name in named if isinstance(name, str))
        if name and "://" not in name and name not in listed and (folder / name).is_file()
    ]
    if not found:
        return definition
    there = definition.whole.get("download_files")
    files = [*(there if isinstance(there, list) else []), *found]
    return read_definition({**msgspec.to_builtins(definition.whole), "download_files": files})
