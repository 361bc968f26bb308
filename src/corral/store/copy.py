"""Copies one store to another, usually SQLite to PostgreSQL, and verifies the copy.

The target is written in one transaction, which is committed only after every table was read back and is equal: a
failure at any point leaves the target empty. The source is read as one snapshot; the caller makes sure that no
controller writes to it, since later writes are not copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Column, MetaData, Table, bindparam, func, select, tuple_
from sqlalchemy.types import TypeDecorator, TypeEngine

from corral.kit.errors import Conflict, Failed, NotFound
from corral.store.engine.schema import insert_whole
from corral.store.engine.sqlite import sqlite_path
from corral.store.engine.statements import Row
from corral.store.engine.transactions import Store, StoreOptions, Transaction
from corral.store.engine.types import Real
from corral.store.open import open_store
from corral.store.tables import all_tables

_BATCH = 500
_WHOLE = 2**256
Transform = Callable[[str, Row], Row]  # table, row → the row that is written


@dataclass(frozen=True)
class CopyProgress:
    table: str
    copied: int
    total: int


@dataclass(frozen=True)
class CopiedTable:
    table: str
    rows: int
    digest: str  # the same for the same rows in any order


async def migrate_store(
    source_url: str,
    target_url: str,
    *,
    options: StoreOptions | None = None,
    on_progress: Callable[[CopyProgress], None] | None = None,
) -> list[CopiedTable]:
    """Open both and copy. Raises `NotFound` for a missing source: it must not be created, empty, and copied."""
    if source_url.startswith("sqlite:"):
        path = sqlite_path(source_url.partition("://")[2])
        if not path.exists():
            raise NotFound(f"there is no database {path}")
    options = options or StoreOptions()
    async with open_store(source_url, options=options) as source, open_store(target_url, options=options) as target:
        return await copy_store(source, target, on_progress=on_progress)


async def copy_store(
    source: Store,
    target: Store,
    *,
    batch_rows: int = _BATCH,
    on_progress: Callable[[CopyProgress], None] | None = None,
    tables: Sequence[Table] | None = None,
    transform: Transform | None = None,
) -> list[CopiedTable]:
    """Raises `Conflict` if the target has rows, `Failed` if the copy differs from the source as `transform` left it. A
    row keeps its key."""
    chosen = [_as_stored(table) for table in (all_tables() if tables is None else tables)]
    async with source.read() as reading, target.write() as writing:
        for table in chosen:
            await _refuse_if_not_empty(writing, table)
        sent = [await _copy(reading, writing, table, batch_rows, on_progress, transform) for table in chosen]
        for table, expected in zip(chosen, sent, strict=True):
            found = await _summed(table, _batches(writing, table, batch_rows))
            if found != expected:
                counts = f"{expected.rows} rows sent, {found.rows} found"
                raise Failed(f"{table.name} differs after copying ({counts}): the copy was rolled back")
            await _reset_sequence(writing, table)
        return sent


def _as_stored(table: Table) -> Table:
    """The table with plain column types: values are copied unchanged, also values that this code cannot decode."""
    return Table(
        table.name,
        MetaData(),
        *(Column(column.name, _plain(column.type), primary_key=column.primary_key) for column in table.columns),
    )


def _plain(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    return kind.impl_instance if isinstance(kind, TypeDecorator) and not isinstance(kind, Real) else kind


async def _refuse_if_not_empty(tx: Transaction, table: Table) -> None:
    row = await tx.fetch_one(select(func.count()).select_from(table))
    assert row is not None
    if row[0]:
        raise Conflict(f"the target is not empty: {table.name} has {row[0]} rows; give an empty database")


async def _copy(
    reading: Transaction,
    writing: Transaction,
    table: Table,
    batch_rows: int,
    on_progress: Callable[[CopyProgress], None] | None,
    transform: Transform | None,
) -> CopiedTable:
    counted = await reading.fetch_one(select(func.count()).select_from(table))
    total = counted[0] if counted else 0
    names = [column.name for column in table.columns]
    statement = insert_whole(table)
    copied = 0

    async def copy_batches() -> AsyncIterator[list[Row]]:
        nonlocal copied
        async for read in _batches(reading, table, batch_rows):
            rows = read if transform is None else [transform(table.name, row) for row in read]
            await writing.execute_many(statement, [dict(zip(names, row, strict=True)) for row in rows])
            copied += len(rows)
            if on_progress is not None:
                on_progress(CopyProgress(table.name, copied, total))
            yield rows

    return await _summed(table, copy_batches())


async def _batches(tx: Transaction, table: Table, batch_rows: int) -> AsyncIterator[list[Row]]:
    """Read by key, so that memory holds only one batch."""
    keys = list(table.primary_key.columns)
    after = tuple_(*keys) > tuple_(*(bindparam(f"after_{key.name}", type_=key.type) for key in keys))
    first = select(table).order_by(*keys).limit(batch_rows)
    following = first.where(after)
    rows = await tx.fetch_all(first)
    while rows:
        yield rows
        last = dict(zip((column.name for column in table.columns), rows[-1], strict=True))
        rows = await tx.fetch_all(following, {f"after_{key.name}": last[key.name] for key in keys})


async def _summed(table: Table, batches: AsyncIterator[list[Row]]) -> CopiedTable:
    """Sum the hashes of the rows: the two databases may sort text differently."""
    rows, total = 0, 0
    async for batch in batches:
        rows += len(batch)
        for row in batch:
            total += int.from_bytes(hashlib.sha256(msgspec.msgpack.encode(row)).digest())
    return CopiedTable(table.name, rows, f"{total % _WHOLE:064x}")


async def _reset_sequence(tx: Transaction, table: Table) -> None:
    """Set a PostgreSQL sequence after rows with explicit numbers."""
    column = table.autoincrement_column
    if column is None or tx.kind != "postgresql":
        return
    await tx.fetch_one(
        f"""SELECT setval(pg_get_serial_sequence('"{table.name}"', '{column.name}'),
                          GREATEST(COALESCE(MAX("{column.name}"), 1), 1), MAX("{column.name}") IS NOT NULL)
            FROM "{table.name}" """
    )
