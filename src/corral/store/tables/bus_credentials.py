"""Users of the bus: whose credentials were issued, and which have ended before their time.

A user's key is the same each time its credentials are renewed, so there is one row per user and `expires_at` is the end
of the longest-lived credential it may hold. Once that has passed, the row has nothing left to say.
"""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import Column, Table, Text, bindparam, case, select, update
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, now


class BusCredential(msgspec.Struct, frozen=True):
    user_key: str  # public nkey
    node_id: str  # empty for users that are no nodes
    kind: str  # node, gateway, controller
    issued_at: datetime  # of the latest
    expires_at: datetime
    revoked_at: datetime | None = None  # what was issued before that moment is worth nothing


class Revoked(msgspec.Struct, frozen=True):
    user_key: str
    node_id: str
    revoked_at: datetime


table = Table(
    "bus_credentials",
    metadata,
    Column("user_key", Text, primary_key=True),
    Column("node_id", Text, nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("issued_at", Instant, nullable=False),
    Column("expires_at", Instant, nullable=False, index=True),
    Column("revoked_at", Instant),
)

_INSERT = insert_whole(table).values(issued_at=now())
_new = _INSERT.excluded
_LATEST = case((table.c.expires_at > _new.expires_at, table.c.expires_at), else_=_new.expires_at)
_ISSUED = _INSERT.values(revoked_at=None).on_conflict_do_update(
    index_elements=[table.c.user_key],
    set_={"node_id": _new.node_id, "kind": _new.kind, "issued_at": _new.issued_at, "expires_at": _LATEST},
)
_REVOKE = _INSERT.values(revoked_at=now()).on_conflict_do_update(
    index_elements=[table.c.user_key], set_={"revoked_at": _new.revoked_at, "expires_at": _LATEST}
)
_REVOKE_NODE = (
    update(table).where(table.c.node_id == bindparam("of_node"), table.c.expires_at > now()).values(revoked_at=now())
)
_BY_KEY = select(table).where(table.c.user_key == bindparam("user_key"))
_REVOKED = (
    select(table.c.user_key, table.c.node_id, table.c.revoked_at)
    .where(table.c.revoked_at.is_not(None), table.c.expires_at > now())
    .order_by(table.c.user_key)
)
_PRUNE = delete_from(table).where(table.c.expires_at <= now())


async def issued(tx: Transaction, user_key: str, node_id: str, *, kind: str, expires_at: datetime) -> None:
    """A credential was handed out. A revocation of earlier ones stays in force."""
    await tx.execute(_ISSUED, {"user_key": user_key, "node_id": node_id, "kind": kind, "expires_at": expires_at})


async def revoke(tx: Transaction, user_key: str, node_id: str, *, expires_at: datetime, kind: str = "node") -> None:
    """Everything issued to this user so far ends now. Works for users whose issuing was not recorded, so
    `expires_at` is to be late enough for anything they may hold."""
    await tx.execute(_REVOKE, {"user_key": user_key, "node_id": node_id, "kind": kind, "expires_at": expires_at})


async def revoke_node(tx: Transaction, node_id: str) -> int:
    """All recorded users of that node which have not expired; how many there were."""
    return (await tx.execute(_REVOKE_NODE, {"of_node": node_id})).rowcount


async def find(tx: Transaction, user_key: str) -> BusCredential | None:
    return record(BusCredential, await tx.lock_one(_BY_KEY, {"user_key": user_key}))


async def list_revoked(tx: Transaction) -> list[Revoked]:
    """What the bus must know: revoked, and not yet expired by itself."""
    return records(Revoked, await tx.fetch_all(_REVOKED))


async def prune_expired(tx: Transaction) -> int:
    return (await tx.execute(_PRUNE)).rowcount
