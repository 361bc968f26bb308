"""Sessions of the web page, each opened with an API key and gone with it."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import Column, Integer, Table, Text, bindparam, select, update
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import columns_of, insert_whole, metadata, record
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, now


class WebSession(msgspec.Struct, frozen=True):
    id_hash: str  # of the secret in the cookie
    key_id: str
    csrf: str
    created_at: datetime
    expires_at: datetime
    last_seen_at: datetime


table = Table(
    "web_sessions",
    metadata,
    Column("id_hash", Text, primary_key=True),
    Column("key_id", Text, nullable=False, index=True),
    Column("csrf", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("expires_at", Instant, nullable=False, index=True),
    Column("last_seen_at", Instant, nullable=False),
)

_INSERT = insert_whole(table)
_BY_ID = select(table).where(table.c.id_hash == bindparam("id_hash"))
_EXTEND = (
    update(table)
    .where(table.c.id_hash == bindparam("session"))
    .values(expires_at=bindparam("until", type_=Instant()), last_seen_at=now())
)
_DELETE = delete_from(table).where(table.c.id_hash == bindparam("id_hash"))
_DELETE_OF_KEY = delete_from(table).where(table.c.key_id == bindparam("key_id"))
_NEWEST_OF_KEY = (
    select(table.c.id_hash)
    .where(table.c.key_id == bindparam("key_id"))
    .order_by(table.c.created_at.desc(), table.c.id_hash)
    .limit(bindparam("keep", type_=Integer))
)
_DELETE_OLDEST = delete_from(table).where(
    table.c.key_id == bindparam("key_id"), table.c.id_hash.not_in(_NEWEST_OF_KEY.scalar_subquery())
)
_OPEN = select(table.c.id_hash, table.c.key_id).where(table.c.expires_at > now()).order_by(table.c.id_hash)
_PRUNE = delete_from(table).where(table.c.expires_at <= bindparam("moment", type_=Instant()))


async def insert(tx: Transaction, session: WebSession) -> None:
    await tx.execute(_INSERT, columns_of(session))


async def find(tx: Transaction, id_hash: str) -> WebSession | None:
    """Also an expired session: the caller compares the time."""
    return record(WebSession, await tx.lock_one(_BY_ID, {"id_hash": id_hash}))


async def extend(tx: Transaction, id_hash: str, expires_at: datetime) -> bool:
    return (await tx.execute(_EXTEND, {"session": id_hash, "until": expires_at})).rowcount == 1


async def delete(tx: Transaction, id_hash: str) -> bool:
    return (await tx.execute(_DELETE, {"id_hash": id_hash})).rowcount == 1


async def delete_of_key(tx: Transaction, key_id: str) -> int:
    return (await tx.execute(_DELETE_OF_KEY, {"key_id": key_id})).rowcount


async def delete_oldest(tx: Transaction, key_id: str, *, keep: int) -> int:
    """All sessions of the key but the newest."""
    return (await tx.execute(_DELETE_OLDEST, {"key_id": key_id, "keep": keep})).rowcount


async def list_open(tx: Transaction) -> list[tuple[str, str]]:
    """Those that have not expired: the hash of the id, and the key."""
    return [(row[0], row[1]) for row in await tx.fetch_all(_OPEN)]


async def prune_expired(tx: Transaction, moment: datetime) -> int:
    """Those that had expired at that moment."""
    return (await tx.execute(_PRUNE, {"moment": moment})).rowcount
