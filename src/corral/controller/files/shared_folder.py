"""The models folder that the controller shares with all nodes (`--shared-models`).

Files are used where they lie. Nothing is fetched, copied, linked or removed: an order names paths below the folder and
no digests, so no worker writes into it. `ModelFiles` asks here instead of its blobs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition
from corral.contract.sources import is_safe_path
from corral.controller.files.required_files import (
    files_inside,
    is_archive,
    is_named,
    required_files,
    required_snapshots,
    weights_first,
)
from corral.controller.files.snapshots import uri_of
from corral.kit.errors import NotFound, Unavailable
from corral.store.tables.model_files import StoredFile

MAX_FILES = 400  # in an order; of more, the folders are named


class SharedFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, path: str) -> Path | None:
        """A file or folder of an order. Blocking."""
        found = self._folder / path
        return found if is_safe_path(path) and found.exists() else None

    def rows(self, definition: Definition) -> list[StoredFile]:
        """What the model consists of, to be stored: the sizes decide about placement. Blocking. Raises NotFound with
        the names of missing files, Unavailable if the folder is not there."""
        if not self._folder.is_dir():
            raise Unavailable(f"the shared models folder {self._folder} is not there: mount it on the controller too")
        found, missing = [], []
        for path, uri in _wanted(definition, self._folder):
            try:
                size_bytes = os.stat(self._folder / path).st_size
            except OSError:
                missing.append(path)
                continue
            found.append(
                StoredFile(model=definition.name, path=path, uri=uri, resolved=uri, digest="", size_bytes=size_bytes)
            )
        if missing:
            raise NotFound(
                f"{', '.join(missing[:5])} {'is' if len(missing) == 1 else 'are'} not in the shared models folder "
                f"{self._folder}: with --shared-models nothing is fetched, so put the files there"
            )
        return found


def ordered_files(definition: Definition, rows: list[StoredFile]) -> tuple[ReplicaFile, ...]:
    """As an order names them, the weights first. Pure."""
    files = [ReplicaFile(row.path, "", row.size_bytes) for row in rows]
    if len(files) > MAX_FILES:  # a worker that receives a list by digest would store it in the folder
        files = [ReplicaFile(folder) for folder in dict.fromkeys(_folder_of(file.path) for file in files)]
    return tuple(weights_first(definition, files))


def _wanted(definition: Definition, folder: Path) -> Iterator[tuple[str, str]]:
    """Paths and URIs. A repository is the folder with its name; of an archive, the files inside count, which lie
    beside it."""
    for file in required_files(definition, folder):
        if not is_archive(definition, file) or is_named(definition, file):
            yield file.path, file.uri
    for snapshot in required_snapshots(definition, folder):
        inside = list(files_inside(folder / snapshot.folder, folder))
        yield from ((file.path, file.uri) for file in inside)
        if not inside:
            yield snapshot.folder, uri_of(snapshot)


def _folder_of(path: str) -> str:
    """The first two parts: repositories lie under owner/name."""
    return "/".join(path.split("/")[:-1][:2]) or path
