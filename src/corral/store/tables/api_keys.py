"""API keys of people, programs and gateways. Only the hash of a secret is here."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import Column, Table, Text, bindparam, select, update

from corral.contract.view import KeyLimits
from corral.kit.errors import NotFound
from corral.store.engine.schema import columns_of, insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json, now


class ApiKey(msgspec.Struct, frozen=True):
    id: str
    name: str
    secret_hash: str
    role: str  # admin, viewer, inference, gateway
    created_at: datetime
    models: tuple[str, ...] | None = None  # None = every model
    limits: KeyLimits | None = None
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


table = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("secret_hash", Text, nullable=False, unique=True),
    Column("role", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("models", Json[tuple[str, ...]](tuple[str, ...])),
    Column("limits", Json[KeyLimits](KeyLimits)),
    Column("expires_at", Instant),
    Column("revoked_at", Instant),
    Column("last_used_at", Instant),
)

_INSERT = insert_whole(table)
_BY_ID = select(table).where(table.c.id == bindparam("id"))
_BY_HASH = select(table).where(table.c.secret_hash == bindparam("secret_hash"))
_ALL = select(table).order_by(table.c.created_at, table.c.id)
_REVOKE = update(table).where(table.c.id == bindparam("key_id"), table.c.revoked_at.is_(None)).values(revoked_at=now())
_NOTE_USE = update(table).where(table.c.id == bindparam("key_id")).values(last_used_at=now())


async def insert(tx: Transaction, key: ApiKey) -> None:
    """Raises `Conflict` when this very secret is there already."""
    await tx.execute(_INSERT, columns_of(key))


async def get(tx: Transaction, key_id: str) -> ApiKey:
    key = await find(tx, key_id)
    if key is None:
        raise NotFound(f"there is no API key {key_id}")
    return key


async def find(tx: Transaction, key_id: str) -> ApiKey | None:
    return record(ApiKey, await tx.lock_one(_BY_ID, {"id": key_id}))


async def find_by_hash(tx: Transaction, secret_hash: str) -> ApiKey | None:
    return record(ApiKey, await tx.lock_one(_BY_HASH, {"secret_hash": secret_hash}))


async def list_(tx: Transaction) -> list[ApiKey]:
    """All of them, ended ones too, the oldest first."""
    return records(ApiKey, await tx.fetch_all(_ALL))


async def revoke(tx: Transaction, key_id: str) -> bool:
    """False when it already was, or is unknown."""
    return (await tx.execute(_REVOKE, {"key_id": key_id})).rowcount == 1


async def note_use(tx: Transaction, key_id: str) -> None:
    """Callers do this at most once a minute per key: it is a write."""
    await tx.execute(_NOTE_USE, {"key_id": key_id})
