"""API keys of people, programs and gateways. Only the hash of a secret is here."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import Column, Table, Text, bindparam, update

from corral.contract.view import KeyLimits
from corral.store.engine.schema import metadata
from corral.store.engine.secret_rows import SecretRows
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

_rows = SecretRows(table, ApiKey, "API key")
insert, get, find, find_by_hash = _rows.insert, _rows.get, _rows.find, _rows.find_by_hash
list_, revoke = _rows.list_, _rows.revoke
_NOTE_USE = update(table).where(table.c.id == bindparam("key_id")).values(last_used_at=now())


async def note_use(tx: Transaction, key_id: str) -> None:
    """Callers do this at most once a minute per key: it is a write."""
    await tx.execute(_NOTE_USE, {"key_id": key_id})
