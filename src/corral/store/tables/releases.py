"""Releases of Corral: orders that the release key has signed. The counter only grows; rows are never changed."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import BigInteger, Column, Table, Text, bindparam, func, select

from corral.kit.errors import NotFound
from corral.store.engine.schema import columns_of, insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant


class Release(msgspec.Struct, frozen=True):
    counter: int
    version: str
    sha256: str  # of the wheel
    size_bytes: int
    signed: str
    created_at: datetime
    created_by: str = ""


table = Table(
    "releases",
    metadata,
    Column("counter", BigInteger, primary_key=True, autoincrement=False),
    Column("version", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("signed", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("created_by", Text, nullable=False),
)

_INSERT = insert_whole(table)
_BY_COUNTER = select(table).where(table.c.counter == bindparam("counter"))
_NEWEST = select(table).order_by(table.c.counter.desc())
_HIGHEST = select(func.max(table.c.counter))


async def insert(tx: Transaction, release: Release) -> None:
    """Raises `Conflict` when there is a release with this counter."""
    await tx.execute(_INSERT, columns_of(release))


async def get(tx: Transaction, counter: int) -> Release:
    found = record(Release, await tx.fetch_one(_BY_COUNTER, {"counter": counter}))
    if found is None:
        raise NotFound(f"there is no release {counter}: `corral fleet releases` shows them")
    return found


async def list_(tx: Transaction) -> list[Release]:
    """The newest first."""
    return records(Release, await tx.fetch_all(_NEWEST))


async def highest_counter(tx: Transaction) -> int:
    """0: there is no release."""
    row = await tx.fetch_one(_HIGHEST)
    return int(row[0] or 0) if row is not None else 0
