"""Join tokens: what a new machine shows. A use is claimed by one conditional update, so the last one goes once."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import BigInteger, Boolean, Column, Table, Text, bindparam, case, select, update

from corral.kit.errors import NotFound
from corral.store.engine.schema import columns_of, insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, now


class JoinToken(msgspec.Struct, frozen=True):
    id: str
    name: str
    secret_hash: str
    created_at: datetime
    created_by: str = ""
    uses_left: int | None = 1  # None = unlimited
    uses: int = 0
    pre_approved: bool = False
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


table = Table(
    "join_tokens",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("secret_hash", Text, nullable=False, unique=True),
    Column("created_at", Instant, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("uses_left", BigInteger),
    Column("uses", BigInteger, nullable=False),
    Column("pre_approved", Boolean, nullable=False),
    Column("expires_at", Instant),
    Column("revoked_at", Instant),
    Column("last_used_at", Instant),
)

_INSERT = insert_whole(table)
_BY_ID = select(table).where(table.c.id == bindparam("id"))
_BY_HASH = select(table).where(table.c.secret_hash == bindparam("secret_hash"))
_ALL = select(table).order_by(table.c.created_at, table.c.id)
_CLAIM_USE = (
    update(table)
    .where(
        table.c.id == bindparam("token_id"),
        table.c.uses_left.is_(None) | (table.c.uses_left > 0),
        table.c.revoked_at.is_(None),
        table.c.expires_at.is_(None) | (table.c.expires_at > now()),
    )
    .values(
        uses=table.c.uses + 1,
        uses_left=case((table.c.uses_left.is_(None), None), else_=table.c.uses_left - 1),
        last_used_at=now(),
    )
)
_REVOKE = (
    update(table).where(table.c.id == bindparam("token_id"), table.c.revoked_at.is_(None)).values(revoked_at=now())
)


async def insert(tx: Transaction, token: JoinToken) -> None:
    await tx.execute(_INSERT, columns_of(token))


async def get(tx: Transaction, token_id: str) -> JoinToken:
    token = await find(tx, token_id)
    if token is None:
        raise NotFound(f"there is no join token {token_id}")
    return token


async def find(tx: Transaction, token_id: str) -> JoinToken | None:
    return record(JoinToken, await tx.lock_one(_BY_ID, {"id": token_id}))


async def find_by_hash(tx: Transaction, secret_hash: str) -> JoinToken | None:
    return record(JoinToken, await tx.lock_one(_BY_HASH, {"secret_hash": secret_hash}))


async def list_(tx: Transaction) -> list[JoinToken]:
    """All of them, ended ones too, the oldest first."""
    return records(JoinToken, await tx.fetch_all(_ALL))


async def claim_use(tx: Transaction, token_id: str) -> bool:
    """Spend one use. False when it is used up, expired, revoked or unknown."""
    return (await tx.execute(_CLAIM_USE, {"token_id": token_id})).rowcount == 1


async def revoke(tx: Transaction, token_id: str) -> bool:
    """False when it already was, or is unknown."""
    return (await tx.execute(_REVOKE, {"token_id": token_id})).rowcount == 1
