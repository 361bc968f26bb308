"""What loaded bundles say about the files of a model: its files count as fetched before, with these digests. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from corral.contract.artifacts import HubSnapshot
from corral.contract.bundles import BundledFile
from corral.contract.models import ModelFile
from corral.controller.files.archives import list_path
from corral.controller.files.snapshots import row_path, uri_of
from corral.store.tables.model_files import StoredFile

FileKey = tuple[str, str]  # path and URI


def keys_of(files: Iterable[ModelFile], snapshots: Iterable[HubSnapshot]) -> set[FileKey]:
    """The rows that a model has once it was fetched, as far as its definition tells."""
    found: set[FileKey] = set()
    for file in files:
        found |= {(file.path, file.uri), (list_path(file), file.uri)}
    return found | {(row_path(each), uri_of(each)) for each in snapshots}


def bundled_rows(
    model: str,
    wanted: Collection[FileKey],
    stored: Mapping[str, StoredFile],
    bundled: Iterable[Sequence[BundledFile]],
) -> list[StoredFile]:
    """Rows to store for this model. A bundled model with one of the wanted files gives all of its rows, because the
    files inside an archive or a repository are known only from its list."""
    missing = {key for key in wanted if key not in {(row.path, row.uri) for row in stored.values()}}
    found: dict[str, StoredFile] = {}
    for files in bundled:
        keys = {(file.path, file.uri) for file in files}
        if not missing & keys:
            continue
        missing -= keys
        for file in files:
            row = stored.get(file.path)
            if row is None or row.uri != file.uri:
                found.setdefault(
                    file.path,
                    StoredFile(
                        model=model,
                        path=file.path,
                        uri=file.uri,
                        resolved=file.resolved,
                        digest=file.digest,
                        size_bytes=file.size_bytes,
                    ),
                )
    return list(found.values())
