"""Join tokens, with which new machines register. One conditional update claims a use, so the last use is given once."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import BigInteger, Boolean, Column, Table, Text, bindparam, case, update

from corral.store.engine.schema import metadata
from corral.store.engine.secret_rows import SecretRows
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

_rows = SecretRows(table, JoinToken, "join token")
insert, get, find_by_hash = _rows.insert, _rows.get, _rows.find_by_hash
list_, revoke = _rows.list_, _rows.revoke
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


async def claim_use(tx: Transaction, token_id: str) -> bool:
    """Spend one use. False when it is used up, expired, revoked or unknown."""
    return (await tx.execute(_CLAIM_USE, {"token_id": token_id})).rowcount == 1
