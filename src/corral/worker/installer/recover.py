"""After a start: clean up after a crash, finish interrupted steps, import what LocalAI installed. Blocking.

Complete versions are not touched; an incomplete version never looks complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from corral.blobs.disk import remove_tree
from corral.blobs.folder_listing import list_tree
from corral.kit.errors import CorralError
from corral.kit.files import sync_folder
from corral.kit.log import get_log
from corral.worker.installer.folder import CURRENT, VERSIONS, BackendFolder
from corral.worker.installer.names import LEFTOVERS, is_name
from corral.worker.installer.records import (
    METADATA,
    RUN_FILE,
    SEQUENCE,
    Metadata,
    VersionRecord,
    is_version_id,
    read_metadata,
    version_id,
)

log = get_log(__name__)

DELETING = ".deleting-"
IMPORTING = ".importing-"


@dataclass
class Recovered:
    imported: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)


def recover(backends: Path, in_use: Collection[Path], now: str) -> Recovered:
    """Recover every backend; an error in one does not affect the others."""
    done = Recovered()
    backends.mkdir(parents=True, exist_ok=True)
    _restore_swaps(backends, done)
    for path in sorted(backends.iterdir()):
        try:
            _recover_entry(backends, path, in_use, now, done)
        except (OSError, CorralError) as error:
            log.error("folder of a backend could not be recovered", folder=str(path), reason=str(error))
    return done


def _recover_entry(backends: Path, path: Path, in_use: Collection[Path], now: str, done: Recovered) -> None:
    name = path.name
    if name.startswith(DELETING):
        remove_tree(path)
        done.removed.append(name)
    elif name.startswith(IMPORTING):
        for imported in _finish_import(backends, name.removeprefix(IMPORTING), now):
            done.imported.append(imported)
            _recover_versions(BackendFolder(backends / imported), in_use, now, done)
    elif name.startswith(f".{SEQUENCE}."):
        path.unlink()
    elif not is_name(name) or not path.is_dir():
        return
    elif (path / VERSIONS).is_dir():
        _recover_versions(BackendFolder(path), in_use, now, done)
    elif (path / RUN_FILE).is_file():
        done.imported += import_flat(backends, name, in_use, now)
    else:
        _recover_meta(path, done)


def _recover_versions(folder: BackendFolder, in_use: Collection[Path], now: str, done: Recovered) -> None:
    (folder.path / f".{CURRENT}").unlink(missing_ok=True)
    whole = folder.records()
    for path in (folder.path / VERSIONS).iterdir():
        version = path.name.removesuffix(".json").removesuffix(".tree")
        if version in whole or (is_version_id(version) and folder.is_in_use(version, in_use)):
            continue
        remove_tree(path)
        done.removed.append(f"{folder.name}/{path.name}")
    if whole and not os.path.lexists(folder.path / CURRENT):
        # It was installed and verified; only the last step of its first install is missing.
        newest = max(whole.values(), key=lambda record: record.made_at)
        folder.switch(newest.id, now)
        done.finished.append(folder.name)
    elif whole and folder.current() is None:
        log.error("the current version is damaged; install the backend again", backend=folder.name)
    done.removed += (f"{folder.name}/{version}" for version in folder.prune(in_use))
    folder.tidy()


def _recover_meta(path: Path, done: Recovered) -> None:
    for half in path.glob(f".{METADATA}.*"):
        half.unlink()
        done.removed.append(f"{path.name}/{half.name}")
    with contextlib.suppress(OSError):
        path.rmdir()  # a meta whose only file was not written yet


# Flat folders: <name>/run.sh + metadata.json, as LocalAI lays them out


def import_flat(backends: Path, name: str, in_use: Collection[Path], now: str) -> list[str]:
    """Take such a folder in, if it is one. Moved, not copied: two renames, each of which a crash may follow."""
    flat, aside = backends / name, backends / f"{IMPORTING}{name}"
    if not (flat / RUN_FILE).is_file() or (flat / VERSIONS).is_dir() or flat.resolve() in in_use:
        return []
    version = version_id(list_tree(flat, leave_out=(METADATA,)).digest)
    (aside / VERSIONS).mkdir(parents=True, exist_ok=True)
    flat.rename(aside / VERSIONS / version)
    sync_folder(backends)
    return _finish_import(backends, name, now)


def _finish_import(backends: Path, name: str, now: str) -> list[str]:
    aside = backends / f"{IMPORTING}{name}"
    folder = BackendFolder(aside)
    moved = [path for path in (aside / VERSIONS).iterdir() if path.is_dir()] if folder.exists() else []
    if not moved:  # interrupted before the first rename: the flat folder is still where it was
        remove_tree(aside)
        return []
    version = moved[0]
    metadata = read_metadata(version) or Metadata()
    if folder.find(version.name) is None:
        listing = list_tree(version, leave_out=(METADATA,))
        record = VersionRecord(
            id=version.name,
            digest=metadata.digest,
            content_digest=listing.digest,
            tree_digest=listing.digest,
            size_bytes=listing.size_bytes,
            metadata=metadata if metadata.name else Metadata(name=name),
            direct=True,
            made_at=now,
        )
        folder.finish(record, listing)
    folder.switch(version.name, now)
    aside.rename(backends / name)
    sync_folder(backends)
    return [name]


def _restore_swaps(backends: Path, done: Recovered) -> None:
    """LocalAI was interrupted: where the folder itself is missing its backup is the only whole one; else both go."""
    for path in sorted(backends.iterdir()):
        suffix = next((suffix for suffix in LEFTOVERS if path.name.endswith(suffix)), "")
        name = path.name.removesuffix(suffix)
        if not suffix or not is_name(name) or not path.is_dir():
            continue
        with contextlib.suppress(OSError):
            if "backup" in suffix and not (backends / name).exists() and (path / RUN_FILE).is_file():
                path.rename(backends / name)
                done.finished.append(name)
            else:
                remove_tree(path)
                done.removed.append(path.name)
