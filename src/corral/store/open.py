"""Opens a store from its URL."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from corral.kit.errors import Invalid
from corral.store.engine.migrate import SCRIPTS, migrate
from corral.store.engine.postgres import PostgresDatabase
from corral.store.engine.sqlite import SqliteDatabase, create_file, sqlite_path, translated, use_wal
from corral.store.engine.transactions import Database, Store, StoreOptions
from corral.store.tables import all_tables

_DEFAULTS = StoreOptions()


@asynccontextmanager
async def open_store(
    url: str,
    *,
    options: StoreOptions = _DEFAULTS,
    may_migrate: bool = True,
    scripts: Path = SCRIPTS,
) -> AsyncIterator[Store]:
    """Open `sqlite:///relative.db`, `sqlite:////absolute.db` or `postgresql://…` (any libpq URL) and migrate it.

    Raises `Unavailable` while the database cannot be reached, `Invalid` where a retry does not help: a bad URL, a file
    that cannot be written, a schema newer than this code, or an older one that must not be migrated.
    """
    database = await open_database(url, options)
    try:
        own_tables = {table.name for table in all_tables()}
        await migrate(database, own_tables=own_tables, allowed=may_migrate, scripts=scripts)
        yield Store(database)
    finally:
        await database.close()


async def open_database(url: str, options: StoreOptions) -> Database:
    """The database as it is, without a migration."""
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


def _prepare(path: Path, options: StoreOptions) -> None:
    create_file(path)
    try:
        use_wal(path, busy_timeout_s=options.busy_timeout_s)
    except sqlite3.Error as error:
        raise translated(error, path) from error
