"""The models of a new bundle: their definitions, and the files that they turned out to be; how far its plan is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from corral.blobs.digests import PREFIX
from corral.blobs.store import BlobStore
from corral.contract.bundles import BundledFile, BundledModel
from corral.contract.installs import UPLOAD_SCHEME
from corral.contract.models import Definition
from corral.contract.sources import file_name
from corral.controller.files.fetches import Fetches
from corral.controller.files.model_files import ModelFiles
from corral.kit.errors import Invalid
from corral.store.engine.transactions import Store
from corral.store.tables import model_files
from corral.store.tables.model_files import StoredFile


@dataclass
class PlanProgress:
    """The bytes of a plan for a bundle, and why it is not ready."""

    blobs: dict[str, int] = field(default_factory=dict)  # digest and size, each once
    have_bytes: int = 0
    size_bytes: int = 0
    is_complete: bool = True  # nothing is being fetched or looked up
    jobs: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.is_complete and not self.jobs and not self.problems

    def add(self, digest: str, size_bytes: int, have_bytes: int, *, is_stored: bool) -> None:
        if not is_stored:
            self.is_complete = False
        if digest not in self.blobs:
            self.blobs[digest] = size_bytes
            self.size_bytes += size_bytes
            self.have_bytes += min(have_bytes, size_bytes)

    def wait(self) -> None:
        self.is_complete = False


class BundledModels:
    def __init__(self, store: Store, files: ModelFiles, fetches: Fetches, blobs: BlobStore) -> None:
        self._store = store
        self._files = files
        self._fetches = fetches
        self._blobs = blobs

    async def add(
        self, definition: Definition, sources: Mapping[str, str], progress: PlanProgress, *, by: str
    ) -> BundledModel:
        """Files that are not on this controller are fetched by an operation."""
        source = sources.get(definition.name, "")
        model = BundledModel(definition.name, source if "@" in source else "", dict(definition.whole))
        if definition.alias:
            return model
        if not await self._files.needs_files(definition):
            progress.notes.append(
                f"{definition.name} names no files: its engine fetches them by itself, and not from the bundle"
            )
            return model
        if not await self._files.are_here(definition):
            progress.wait()
            if job := await self._fetches.request(definition.name, by=by):
                progress.jobs.append(job)
            return model
        async with self._store.read() as tx:
            rows = await model_files.list_of(tx, definition.name)
        if any(not row.digest for row in rows):
            raise Invalid(
                f"the files of {definition.name} lie in the shared models folder: copy that folder, and make a bundle "
                "of the backends with --backend"
            )
        for row in rows:
            is_stored = self._blobs.find(row.digest) is not None
            progress.add(row.digest, row.size_bytes, row.size_bytes if is_stored else 0, is_stored=is_stored)
        return bundled_model(model, rows)


def bundled_model(model: BundledModel, rows: Sequence[StoredFile]) -> BundledModel:
    """Files of the controller's own disk become uploaded files: another machine has no such path. Raises Invalid.
    Pure."""
    local = {row.path: row for row in rows if row.uri.startswith("file:")}
    if any(row.is_list for row in local.values()):
        raise Invalid(f"the model {model.name} is unpacked from an archive of this machine: unpack it there by hand")
    files = tuple(_bundled_file(row) for row in rows)
    return BundledModel(model.name, model.source, _without_paths(model.definition, local), files)


def _bundled_file(row: StoredFile) -> BundledFile:
    is_local = row.uri.startswith("file:")
    uri, resolved = (_uploaded_uri(row),) * 2 if is_local else (row.uri, row.resolved)
    return BundledFile(row.path, uri, resolved, row.digest, row.size_bytes)


def _without_paths(definition: Mapping[str, Any], local: Mapping[str, StoredFile]) -> dict[str, Any]:
    if not local:
        return dict(definition)
    listed = [file for file in definition.get("download_files") or [] if file.get("filename") not in local]
    added = [
        {"filename": row.path, "uri": _uploaded_uri(row), "sha256": row.digest.removeprefix(PREFIX)}
        for row in local.values()
    ]
    parameters = dict(definition.get("parameters") or {})
    if str(parameters.get("model", "")).startswith("file:"):
        parameters["model"] = file_name(parameters["model"])
    changed = {**definition, "download_files": [*listed, *added]}
    if parameters:
        changed["parameters"] = parameters
    if "file:/" in repr(changed):
        raise Invalid(f"the model {definition.get('name')!r} names a file of this machine: name it in download_files")
    return changed


def _uploaded_uri(row: StoredFile) -> str:
    return f"{UPLOAD_SCHEME}{row.digest.removeprefix(PREFIX)}/{quote(row.path.rpartition('/')[2])}"
