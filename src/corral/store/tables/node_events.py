"""Changes of the status of nodes, the last ones of each: what became of it, when and why."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import Column, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import columns_of, insert_whole, metadata, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant

MAX_OF_A_NODE = 50


class StatusChange(msgspec.Struct, frozen=True):
    node_id: str
    at: datetime
    status: str
    reason: str = ""


table = Table(
    "node_events",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("at", Instant, primary_key=True),
    Column("status", Text, nullable=False),
    Column("reason", Text, nullable=False),
)

_INSERT = insert_whole(table).on_conflict_do_nothing(index_elements=list(table.primary_key.columns))
_OF_NODE = select(table).where(table.c.node_id == bindparam("of_node")).order_by(table.c.at.desc())
_OLDEST_KEPT = (
    select(table.c.at)
    .where(table.c.node_id == bindparam("of_node"))
    .order_by(table.c.at.desc())
    .limit(1)
    .offset(MAX_OF_A_NODE - 1)
    .scalar_subquery()
)
_TRIM = delete_from(table).where(table.c.node_id == bindparam("of_node"), table.c.at < _OLDEST_KEPT)
_PRUNE = delete_from(table).where(table.c.at < bindparam("before", type_=Instant()))


async def add(tx: Transaction, event: StatusChange) -> None:
    """Those beyond the last `MAX_OF_A_NODE` are deleted: a node that flaps for weeks keeps a short history."""
    await tx.execute(_INSERT, columns_of(event))
    await tx.execute(_TRIM, {"of_node": event.node_id})


async def list_(tx: Transaction, node_id: str) -> list[StatusChange]:
    """The newest first."""
    return records(StatusChange, await tx.fetch_all(_OF_NODE, {"of_node": node_id}))


async def prune(tx: Transaction, before: datetime) -> int:
    return (await tx.execute(_PRUNE, {"before": before})).rowcount
