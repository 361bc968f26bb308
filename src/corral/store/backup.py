"""Dumps a store into one SQLite file, also while controllers use it, and loads such a file into an empty store.

The dump is one snapshot of the database, and a SQLite file whatever the source is: a fleet may move from SQLite to
PostgreSQL with it, or back. It lacks what means nothing later: presence of controllers, join tokens, web sessions. Only
a dump with secrets has the keys of the cluster, and users and passwords in URLs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Collection
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import func, select

from corral.kit.errors import Conflict, Invalid, NotFound, Unavailable
from corral.kit.redact import redact_urls
from corral.store.copy import CopiedTable, CopyProgress, Transform, copy_store
from corral.store.engine.migrate import has_table, head_of
from corral.store.engine.sqlite import sqlite_path
from corral.store.engine.statements import Row
from corral.store.engine.transactions import StoreOptions, Transaction
from corral.store.open import open_database, open_store
from corral.store.tables import all_tables, cluster_secrets, controllers, join_tokens, settings_kv, web_sessions

OnProgress = Callable[[CopyProgress], None]

_OF_THE_MOMENT = (controllers.table.name, join_tokens.table.name, web_sessions.table.name)
_SECRET = (cluster_secrets.table.name,)
_MARK = "backup"  # key of `settings_kv`: which backup the data came from


class BackupMark(msgspec.Struct, frozen=True):
    """Written into every dump, so that the store knows later where its data came from."""

    id: str
    created_at: datetime


async def dump_store(
    url: str,
    file: Path,
    mark: BackupMark,
    *,
    with_secrets: bool,
    options: StoreOptions | None = None,
    on_progress: OnProgress | None = None,
) -> list[CopiedTable]:
    """Write the dump to `file`, which appears whole or not at all. Raises `NotFound` for a missing database and
    `Invalid` for one of another schema than this code: the dump must not migrate what a controller uses."""
    if _is_missing(url):
        raise NotFound(f"there is no database {_path_of(url)}")
    left_out = _OF_THE_MOMENT if with_secrets else (*_OF_THE_MOMENT, *_SECRET)
    aside = file.with_name(f".{file.name}.new")
    options = options or StoreOptions()
    try:
        _remove(aside)
        async with (
            open_store(url, options=options, may_migrate=False) as source,
            open_store(f"sqlite:///{aside}", options=options) as target,
        ):
            copied = await copy_store(
                source,
                target,
                tables=[table for table in all_tables() if table.name not in left_out],
                transform=None if with_secrets else _redaction(),
                on_progress=on_progress,
            )
            async with target.write() as tx:
                await settings_kv.put(tx, _MARK, mark)
        await asyncio.to_thread(_make_single_file, aside)
        os.replace(aside, file)
        return copied
    finally:
        _remove(aside)


async def load_store(
    file: Path, url: str, *, options: StoreOptions | None = None, on_progress: OnProgress | None = None
) -> list[CopiedTable]:
    """Copy a dump into the store at `url`, in one transaction. `file` is migrated to the schema of this code: give a
    copy of the dump. Raises `Conflict` if the store has rows."""
    options = options or StoreOptions()
    async with open_store(f"sqlite:///{file}", options=options) as source, open_store(url, options=options) as target:
        return await copy_store(source, target, on_progress=on_progress)


async def require_empty(url: str) -> None:
    """Raises `Conflict` if one of our tables has rows. Changes nothing, and creates no database."""
    if _is_missing(url):
        return
    async with contextlib.AsyncExitStack() as opened:
        tx = await _read_unmigrated(url, opened)
        for table in all_tables():
            if not await has_table(tx, table.name):
                continue
            row = await tx.fetch_one(select(func.count()).select_from(table))
            if row is not None and row[0]:
                raise Conflict(f"the database is not empty: {table.name} has {row[0]} row{'s' if row[0] > 1 else ''}")


async def find_mark(url: str) -> BackupMark | None:
    """The backup that the data of this store came from, if any."""
    if _is_missing(url):
        return None
    async with contextlib.AsyncExitStack() as opened:
        tx = await _read_unmigrated(url, opened)
        if not await has_table(tx, settings_kv.table.name):
            return None
        return await settings_kv.find(tx, _MARK, BackupMark)


def check_schema(schema: str) -> None:
    """Raises `Invalid` for the dump of a newer corral."""
    if schema > head_of():
        raise Invalid(f"its database has schema {schema}, newer than this corral ({head_of()}): upgrade corral first")


def _redaction() -> Transform:
    """Hide users and passwords in every text that is not part of a key."""
    keys = {table.name: {n for n, column in enumerate(table.columns) if column.primary_key} for table in all_tables()}

    def redact(table: str, row: Row) -> Row:
        return tuple(_redacted(value, n in keys[table]) for n, value in enumerate(row))

    return redact


def _redacted(value: Any, is_key: bool) -> Any:
    return redact_urls(value) if isinstance(value, str) and not is_key else value


async def _read_unmigrated(url: str, opened: contextlib.AsyncExitStack) -> Transaction:
    database = await open_database(url, StoreOptions())
    opened.push_async_callback(database.close)
    session = await opened.enter_async_context(database.transaction(write=False))
    return Transaction(session, database.compiler, writable=False)


def _is_missing(url: str) -> bool:
    return url.startswith("sqlite:") and not _path_of(url).exists()


def _path_of(url: str) -> Path:
    return sqlite_path(url.partition("://")[2])


def _make_single_file(path: Path) -> None:
    """Without a write-ahead log, so that the file can be moved alone; on the disk when this returns."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as error:
        raise Unavailable(f"the database cannot be written to {path}: {error}") from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    for each in _files_of(path):
        each.unlink(missing_ok=True)


def _files_of(path: Path) -> Collection[Path]:
    return (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm"))
