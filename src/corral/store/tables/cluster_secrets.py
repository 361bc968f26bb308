"""Secrets that all controllers share, such as the signing key. The first controller creates them."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Column, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import insert_whole, metadata
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, now

table = Table(
    "cluster_secrets",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
)

_VALUE = select(table.c.value).where(table.c.name == bindparam("name"))
_CLAIM = insert_whole(table).values(created_at=now()).on_conflict_do_nothing(index_elements=[table.c.name])
_DELETE = delete_from(table).where(table.c.name == bindparam("name"))


async def find(tx: Transaction, name: str) -> str | None:
    row = await tx.fetch_one(_VALUE, {"name": name})
    return None if row is None else str(row[0])


async def get_or_create(tx: Transaction, name: str, make: Callable[[], str]) -> str:
    """The stored secret; without one, store the result of `make`, unless another controller stores its own first."""
    if (found := await find(tx, name)) is not None:
        return found
    # Waits for a concurrent insert, and then keeps that row.
    await tx.execute(_CLAIM, {"name": name, "value": make()})
    stored = await find(tx, name)
    assert stored is not None
    return stored


async def delete(tx: Transaction, name: str) -> bool:
    return (await tx.execute(_DELETE, {"name": name})).rowcount == 1
