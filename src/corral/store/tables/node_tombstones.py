"""Deleted nodes, kept for a while so that the controller can tell their workers to stop."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import Column, Table, Text, bindparam, delete, select

from corral.store.engine.schema import NameText, insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, now, now_plus, span_us


class NodeTombstone(msgspec.Struct, frozen=True):
    node_id: str
    name: str
    token_hash: str
    enrolment_hash: str
    deleted_at: datetime


table = Table(
    "node_tombstones",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("name", NameText, nullable=False, index=True),  # a name may have been deleted several times
    Column("token_hash", Text, nullable=False, index=True),
    Column("enrolment_hash", Text, nullable=False),
    Column("deleted_at", Instant, nullable=False),
)

_INSERT = insert_whole(table).values(deleted_at=now())
_BY_NODE = select(table).where(table.c.node_id == bindparam("node_id"))
_BY_TOKEN = select(table).where(table.c.token_hash == bindparam("token_hash"))
_BY_NAME = select(table).where(table.c.name == bindparam("name")).order_by(table.c.deleted_at.desc())
_PRUNE = delete(table).where(table.c.deleted_at < now_plus("span_us"))


async def insert(tx: Transaction, node_id: str, name: str, token_hash: str, enrolment_hash: str) -> None:
    """`nodes.delete` calls it."""
    await tx.execute(
        _INSERT, {"node_id": node_id, "name": name, "token_hash": token_hash, "enrolment_hash": enrolment_hash}
    )


async def find(tx: Transaction, node_id: str) -> NodeTombstone | None:
    return record(NodeTombstone, await tx.fetch_one(_BY_NODE, {"node_id": node_id}))


async def find_by_token_hash(tx: Transaction, token_hash: str) -> NodeTombstone | None:
    if not token_hash:
        return None
    return record(NodeTombstone, await tx.fetch_one(_BY_TOKEN, {"token_hash": token_hash}))


async def list_by_name(tx: Transaction, name: str) -> list[NodeTombstone]:
    """The latest first."""
    return records(NodeTombstone, await tx.fetch_all(_BY_NAME, {"name": name}))


async def prune(tx: Transaction, *, older_than_s: float) -> int:
    return (await tx.execute(_PRUNE, {"span_us": -span_us(older_than_s)})).rowcount
