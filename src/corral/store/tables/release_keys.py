"""The public keys that have signed releases, in their order; the last one signs now. Each is signed by the one before
it. The private key is in `cluster_secrets`, unless it is kept elsewhere."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import BigInteger, Column, Table, Text, select

from corral.store.engine.schema import columns_of, insert_whole, metadata, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant


class ReleaseKey(msgspec.Struct, frozen=True):
    number: int  # from 1
    public_key: str
    proof: str  # empty: the first one
    created_at: datetime
    created_by: str = ""


table = Table(
    "release_keys",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("public_key", Text, nullable=False),
    Column("proof", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("created_by", Text, nullable=False),
)

_ALL = select(table).order_by(table.c.number)
_ADD = insert_whole(table).on_conflict_do_nothing(index_elements=[table.c.number])


async def list_(tx: Transaction) -> list[ReleaseKey]:
    return records(ReleaseKey, await tx.fetch_all(_ALL))


async def add(tx: Transaction, key: ReleaseKey) -> bool:
    """False when another controller has added one with this number."""
    return (await tx.execute(_ADD, columns_of(key))).rowcount == 1
