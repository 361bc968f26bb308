"""Puts a backup in its place, in a folder and a database that are empty.

First everything is checked, and nothing changed: the whole file, versions, what is there already, free space. Then the
members are unpacked beside their places, a mark is written, the files are moved, and the database is loaded last, in
one transaction. A restore that was interrupted begins again: the mark lists the files that it moved, and the database
names the backup that it was loaded from.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from packaging.version import InvalidVersion, Version

from corral import __version__
from corral.cli.backup.archive import BackupFile, BackupHeader, Contents
from corral.cli.backup.output_file import explain_os_errors
from corral.cli.backup.parts import STORE, is_kept, is_known, is_of_worker, machine_id, place_of
from corral.cli.common.data_folder import DataFolder, block_start
from corral.cli.common.output import OnTableProgress
from corral.cli.common.roles import check_schema, find_backup_id, load_store, require_empty_store
from corral.kit.errors import Conflict, Failed, Invalid
from corral.kit.files import make_folder, sync_folder, write_atomically
from corral.kit.humanize import format_bytes

_STAGING = ".restore"
_SPARE_BYTES = 64 << 20
_PRIVATE = ("secrets", "secrets/bus", "controller", "worker")


@dataclass(frozen=True)
class RestorePlan:
    """What a restore does. `skipped`: files of the backup that do not belong here, or are here already."""

    header: BackupHeader
    contents: Contents
    placed: tuple[str, ...]
    skipped: tuple[str, ...]
    is_loaded: bool  # an interrupted restore of this backup has loaded the database


class RestoreMark(msgspec.Struct, frozen=True):
    """In the data folder while a restore is not complete: the backup, and the files that were not there before."""

    id: str
    placed: tuple[str, ...]


def plan_restore(backup: BackupFile, passphrase: str | None, folder: DataFolder, store_url: str) -> RestorePlan:
    """Check everything; change nothing. Raises with what is in the way."""
    header = backup.header
    check_version(header)
    earlier = read_mark(folder)
    contents = backup.verify(passphrase, is_known)
    places = {place_of(member.name): member for member in contents.members if member.name != STORE}
    if STORE not in {member.name for member in contents.members}:
        raise Invalid("the backup has no database: use another one")
    placed, skipped, taken = [], [], []
    for place, member in places.items():
        path = folder.root / place
        if is_of_worker(place) and header.machine != machine_id():
            skipped.append(place)
        elif not os.path.lexists(path) or (earlier and place in earlier.placed):
            placed.append(place)
        elif is_kept(place) or _digest(path) == member.sha256:
            skipped.append(place)
        else:
            taken.append(place)
    is_loaded = asyncio.run(_is_loaded(store_url, header, earlier, taken, folder))
    _check_space(folder, contents)
    return RestorePlan(header, contents, tuple(placed), tuple(skipped), is_loaded)


def check_version(header: BackupHeader) -> None:
    """Raises `Invalid` for a backup of a newer corral: its data may mean what this one does not know."""
    with contextlib.suppress(InvalidVersion):
        if Version(header.corral) > Version(__version__):
            raise Invalid(
                f"the backup was made by Corral {header.corral}, and this is {__version__}: upgrade corral first"
            )
    check_schema(header.schema)


def restore(
    backup: BackupFile,
    passphrase: str | None,
    folder: DataFolder,
    store_url: str,
    *,
    on_progress: OnTableProgress,
) -> tuple[RestorePlan, Mapping[str, int]]:
    """Restore, and return the rows by table (none if an interrupted restore has loaded them)."""
    with explain_os_errors(folder.root):
        if not folder.root.is_dir():  # the lock needs the folder, and a backup that cannot be used must not create it
            plan_restore(backup, passphrase, folder, store_url)
            make_folder(folder.root)
        with block_start(folder):
            plan = plan_restore(backup, passphrase, folder, store_url)
            staging = folder.root / _STAGING
            shutil.rmtree(staging, ignore_errors=True)  # of an interrupted restore
            try:
                staging.mkdir(mode=0o700)
                backup.extract(passphrase, is_known, staging)
                _place_files(folder, staging, plan)
                rows: Mapping[str, int] = {}
                if not plan.is_loaded:
                    _make_private(folder)
                    rows = asyncio.run(load_store(staging / STORE, store_url, on_progress))
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            folder.restore_mark.unlink()
            sync_folder(folder.root)
            return plan, rows


def _place_files(folder: DataFolder, staging: Path, plan: RestorePlan) -> None:
    """Move the files out of `staging`. The mark is there before the first one, and stays until all is done."""
    earlier = read_mark(folder)
    leftovers = set(earlier.placed if earlier else ()) - set(plan.placed)  # of another backup
    mark = RestoreMark(plan.header.id, (*plan.placed, *sorted(leftovers)))
    write_atomically(folder.restore_mark, msgspec.json.encode(mark), mode=0o600)
    for place in leftovers:
        (folder.root / place).unlink(missing_ok=True)
    _make_private(folder)
    for place in plan.placed:
        target = folder.root / place
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / "data" / place, target)
    for each in {(folder.root / place).parent for place in plan.placed}:
        sync_folder(each)


def _make_private(folder: DataFolder) -> None:
    for each in _PRIVATE:
        (folder.root / each).mkdir(mode=0o700, exist_ok=True)


def read_mark(folder: DataFolder) -> RestoreMark | None:
    try:
        return msgspec.json.decode(folder.restore_mark.read_bytes(), type=RestoreMark)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise Invalid(f"{folder.restore_mark} is damaged: remove the folder and restore again") from error


async def _is_loaded(
    store_url: str, header: BackupHeader, earlier: RestoreMark | None, taken: list[str], folder: DataFolder
) -> bool:
    if earlier is not None and earlier.id == header.id == await find_backup_id(store_url):
        return True
    found = []
    try:
        await require_empty_store(store_url)
    except Conflict as error:
        found.append(error.message)
    if taken:
        found.append(f"other files are in their places: {', '.join(taken)}")
    if found:
        raise Conflict(
            f"there is data already ({'; '.join(found)}): "
            f"stop the fleet and move it away (`mv {folder.root} {folder.root}.old`), "
            "or give another folder with --data or an empty database with --store"
        )
    return False


def _digest(path: Path) -> str:
    import hashlib

    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (IsADirectoryError, FileNotFoundError):
        return ""


def _check_space(folder: DataFolder, contents: Contents) -> None:
    """The database is there twice for a while: unpacked, and loaded."""
    root = folder.root
    while not root.exists():
        root = root.parent
    need = 2 * sum(member.size_bytes for member in contents.members) + _SPARE_BYTES
    free = shutil.disk_usage(root).free
    if free < need:
        raise Failed(
            f"{root} has {format_bytes(free)} of free space, and {format_bytes(need)} are needed: "
            "free some space, or choose another folder with --data"
        )
