"""Small values that the controllers share, such as the state of an automation guard: key → JSON."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from sqlalchemy import Column, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import insert_whole, metadata
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json, now

T = TypeVar("T")

table = Table(
    "settings_kv",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Json[Any](Any), nullable=False),
    Column("updated_at", Instant, nullable=False),
)

_INSERT = insert_whole(table).values(updated_at=now())
_PUT = _INSERT.on_conflict_do_update(
    index_elements=[table.c.key],
    set_={"value": _INSERT.excluded.value, "updated_at": _INSERT.excluded.updated_at},
)
_VALUE = select(table.c.value).where(table.c.key == bindparam("key"))
_DELETE = delete_from(table).where(table.c.key == bindparam("key"))


async def find(tx: Transaction, key: str, kind: type[T]) -> T | None:
    """In a write transaction the row is locked until its end. Raises msgspec.ValidationError for another type."""
    row = await tx.lock_one(_VALUE, {"key": key})
    return None if row is None else msgspec.convert(row[0], kind)


async def put(tx: Transaction, key: str, value: object) -> None:
    """Store any value that msgspec can encode, except None; see `delete`."""
    if value is None:
        raise ValueError(f"None cannot be stored under {key!r}; delete the key instead")
    await tx.execute(_PUT, {"key": key, "value": value})


async def delete(tx: Transaction, key: str) -> bool:
    return (await tx.execute(_DELETE, {"key": key})).rowcount == 1
