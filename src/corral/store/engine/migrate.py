"""Brings a database's schema to the revision of this code, once, also when several controllers start together.

Migrations are Alembic scripts in `migrations/versions/`, numbered without a gap: `0007_create_model_files.py` has
revision "0007". A change that the last release would not survive comes as a pair (the field says "expand and
contract"), and the first word of a script's docstring says which half it is. *Before* adds tables and columns and ships
with the code that uses them; the last release keeps running on the new schema. *After* ships one release later and
drops the tables and columns that no running release uses. So while controllers are replaced one by one, the old ones
and the new ones share one schema.

All pending migrations run in one transaction, under a lock for which other starting controllers wait. A database that
is up to date costs one query, and Alembic is not imported. A database that is newer than the code is refused, unless it
says that this code may still use it (`schema_floor.py`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import msgspec

from corral.kit.errors import Invalid
from corral.store.engine.postgres import PostgresDatabase, server_settings, translate_errors
from corral.store.engine.postgres import translated as postgres_translated
from corral.store.engine.schema_floor import KEY as FLOOR
from corral.store.engine.schema_floor import SchemaFloor, Step, decode_floor, floor_after, read_floor, refuse_newer
from corral.store.engine.sqlite import SqliteDatabase, connect
from corral.store.engine.sqlite import translated as sqlite_translated
from corral.store.engine.transactions import Database, Transaction
from corral.store.engine.types import now

if TYPE_CHECKING:
    from sqlalchemy import Connection

VERSION_TABLE = "corral_schema"
SCRIPTS = Path(__file__).parent / "migrations"
_NAME = re.compile(r"(\d{4})_\w+\.py")
_LOCK = 0x636F7272616C  # "corral": any number that no other program locks
_TABLE_EXISTS = {
    "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = '{table}'",
    "postgresql": "SELECT 1 WHERE to_regclass('{table}') IS NOT NULL",
}


def head_of(scripts: Path = SCRIPTS) -> str:
    """The revision of this code."""
    return max(found[1] for file in (scripts / "versions").iterdir() if (found := _NAME.fullmatch(file.name)))


async def has_table(tx: Transaction, table: str) -> bool:
    return await tx.fetch_one(_TABLE_EXISTS[tx.kind].format(table=table)) is not None


async def revision_of(tx: Transaction) -> str | None:
    """The revision of the database; None without a version table."""
    if not await has_table(tx, VERSION_TABLE):
        return None
    row = await tx.fetch_one(f"SELECT version_num FROM {VERSION_TABLE}")
    return None if row is None else str(row[0])


async def migrate(
    database: Database, *, own_tables: Collection[str], allowed: bool = True, scripts: Path = SCRIPTS
) -> None:
    """Bring the schema to `head_of(scripts)`.

    Raises `Invalid` when the schema is too new, when it is too old and migrating is not `allowed`, or when a database
    without our version table already has one of `own_tables`: another program uses it.
    """
    wanted = head_of(scripts)
    async with database.transaction(write=False) as session:
        tx = Transaction(session, database.compiler, writable=False)
        found = await revision_of(tx)
        floor = await read_floor(tx) if found is not None and found > wanted else None
    if found == wanted:
        return
    refuse_newer(found, wanted, floor)
    if found is not None and found > wanted:
        return  # only *before* migrations lie between, which leave this version running
    if not allowed:
        raise Invalid(
            f"the database has schema {found or 'none'}, this corral needs {wanted}: "
            "start one controller that may migrate it"
        )
    match database:
        case SqliteDatabase():
            await asyncio.to_thread(_upgrade_sqlite, database, scripts, own_tables)
        case PostgresDatabase():
            await _upgrade_postgresql(database, scripts, own_tables)
        case _:
            raise TypeError(f"a database of kind {database.kind} cannot be migrated")


def _upgrade_sqlite(database: SqliteDatabase, scripts: Path, own_tables: Collection[str]) -> None:
    import sqlite3

    from sqlalchemy import create_engine, event, exc
    from sqlalchemy.pool import NullPool

    def opened() -> sqlite3.Connection:
        # Foreign keys are off while tables are rebuilt, and cannot be turned off inside the transaction.
        return connect(database.path, busy_timeout_s=database.options.migration_wait_s, foreign_keys=False)

    engine = create_engine("sqlite://", creator=opened, poolclass=NullPool)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN EXCLUSIVE"))
    try:
        with engine.begin() as connection:
            _run_steps(connection, scripts, own_tables)
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchone()
            if broken is not None:
                raise RuntimeError(f"a migration left a row of {broken[0]} whose foreign key refers to no row")
    except exc.DBAPIError as error:
        if isinstance(error.orig, sqlite3.Error):
            raise sqlite_translated(error.orig, database.path) from error
        raise


async def _upgrade_postgresql(database: PostgresDatabase, scripts: Path, own_tables: Collection[str]) -> None:
    """Alembic needs an SQLAlchemy connection, so SQLAlchemy's async engine is used here."""
    from sqlalchemy import exc, text
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    limits = server_settings(database.options)
    limits |= {"statement_timeout": "0", "lock_timeout": f"{round(database.options.migration_wait_s * 1000)}"}

    async def opened() -> object:
        timeout_s = database.options.connect_timeout_s
        return await translate_errors(
            database.place, asyncpg.connect, database.url, timeout=timeout_s, server_settings=limits
        )

    engine = create_async_engine("postgresql+asyncpg://", async_creator=opened, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
            await connection.run_sync(_run_steps, scripts, own_tables)
    except exc.DBAPIError as error:
        raise postgres_translated(_driver_error(error), database.place) from error
    finally:
        await engine.dispose()


def _driver_error(error: Exception) -> BaseException:
    """asyncpg's own, which SQLAlchemy wraps twice."""
    found: BaseException = error
    while not isinstance(found, asyncpg.PostgresError | OSError) and found.__cause__ is not None:
        found = found.__cause__
    return found


def _run_steps(connection: Connection, scripts: Path, own_tables: Collection[str]) -> None:
    """Run inside the lock. Another controller may have migrated meanwhile, perhaps to a newer revision."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from sqlalchemy import inspect, text

    tables = set(inspect(connection).get_table_names())
    found = None
    if VERSION_TABLE in tables:
        found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
        if found is not None and found >= head_of(scripts):
            value = connection.execute(text(f"SELECT value FROM settings_kv WHERE key = '{FLOOR}'")).scalar()
            refuse_newer(found, head_of(scripts), decode_floor(value))
            return
    else:
        _refuse_foreign(tables.intersection(own_tables))
    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    if found is not None:  # no older version has ever used a new database
        steps = [
            Step(each.revision, (each.doc or "").strip(), getattr(each.module, "oldest_schema", ""))
            for each in ScriptDirectory.from_config(config).walk_revisions()
            if each.revision > found
        ]
        _record_floor(connection, floor_after(found, steps))


def _record_floor(connection: Connection, floor: SchemaFloor) -> None:
    from sqlalchemy import column, delete, insert, table

    places = table("settings_kv", column("key"), column("value"), column("updated_at"))
    connection.execute(delete(places).where(places.c.key == FLOOR))
    value = msgspec.json.encode(floor).decode()
    connection.execute(insert(places).values(key=FLOOR, value=value, updated_at=now()))


def _refuse_foreign(taken: set[str]) -> None:
    if taken:
        names = ", ".join(sorted(taken))
        raise Invalid(f"the database holds another program's tables ({names}): give corral a database of its own")
