"""Opens a store from its URL."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from corral.kit.errors import Invalid
from corral.store.api import Database, Store
from corral.store.migrate import SCRIPTS, migrate
from corral.store.options import StoreOptions
from corral.store.postgres import PostgresDatabase
from corral.store.sqlite import SqliteDatabase, create_file, translated, use_wal

_DEFAULTS = StoreOptions()


@asynccontextmanager
async def open_store(
    url: str,
    *,
    options: StoreOptions = _DEFAULTS,
    may_migrate: bool = True,
    scripts: Path = SCRIPTS,
) -> AsyncIterator[Store]:
    """`sqlite:///relative.db`, `sqlite:////absolute.db` or `postgresql://…` (everything libpq's URLs know).

    Raises `Unavailable` while the database cannot be reached, `Invalid` when it never will do: a bad URL, a file that
    cannot be written, a schema newer than this code, one that is older and not to be migrated.
    """
    database = await _open_database(url, options)
    try:
        await migrate(database, allowed=may_migrate, scripts=scripts)
        yield Store(database)
    finally:
        await database.close()


async def _open_database(url: str, options: StoreOptions) -> Database:
    scheme, separator, rest = url.partition("://")
    scheme = scheme.partition("+")[0]  # postgresql+asyncpg://, as SQLAlchemy's users write it
    if scheme == "sqlite" and separator:
        path = sqlite_path(rest)
        await asyncio.to_thread(_prepare, path, options)
        return SqliteDatabase(path, options)
    if scheme in ("postgresql", "postgres") and separator:
        database = PostgresDatabase(f"postgresql://{rest}", options)
        await database.open()
        return database
    raise Invalid("the database URL must start with sqlite:/// or postgresql://")  # it may hold a password: not shown


def sqlite_path(rest: str) -> Path:
    """What follows `sqlite://`: a slash, then the path as it is (an absolute one begins with two), as in SQLAlchemy.
    Escapes are not decoded: people and our own settings put a plain path behind `sqlite:///`."""
    path = rest.removeprefix("/")
    if not rest.startswith("/") or path in ("", ":memory:") or "?" in path:
        raise Invalid("a SQLite database is a file: write sqlite:///relative.db or sqlite:////absolute/path.db")
    return Path(path).expanduser().absolute()


def _prepare(path: Path, options: StoreOptions) -> None:
    create_file(path)
    try:
        use_wal(path, busy_timeout_s=options.busy_timeout_s)
    except sqlite3.Error as error:
        raise translated(error, path) from error
