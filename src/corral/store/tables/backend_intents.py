"""Intents: what one node still has to do for one backend, and how far that is.

One row per node and backend, kept for as long as the node is, because its attempts are numbered through: the same
number twice would be the same order.

Only the controller that holds the reconciler's lease sends orders; people's retries and cancels write here too. Whoever
changes a row has read it with `list_` in the same write transaction, which keeps it until the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Table, Text, bindparam, func, select

from corral.store.engine.schema import columns_of, metadata, records, upsert_whole
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Choice, Instant, among, storable
from corral.store.records import BackendIntent, IntentStage, OrderKind

table = Table(
    "backend_intents",
    metadata,
    Column("node_id", Text, ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
    Column("backend", Text, primary_key=True),
    Column("kind", Choice(OrderKind), nullable=False),
    Column("stage", Choice(IntentStage), nullable=False),
    Column("generation", BigInteger, nullable=False, index=True),
    Column("operation_id", Text, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("updated_at", Instant, nullable=False),
    Column("variant", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("failures", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("next_try_at", Instant, index=True),
    Column("epoch", BigInteger, nullable=False),
    Column("sent_at", Instant),
    Column("accepted_at", Instant),
    Column("boot_id", Text, nullable=False),
    Column("before", Text, nullable=False),
    Column("running", Boolean, nullable=False),
    Column("answered", Boolean, nullable=False),
    Column("switch_failed", Boolean, nullable=False),
)

_PUT = upsert_whole(table)
# In key order, so that two transactions that lock several rows cannot deadlock.
_ALL = select(table).order_by(table.c.node_id, table.c.backend)
_OF_NODES = _ALL.where(among(table.c.node_id, "node_ids"))
_LOCK_ALL = _ALL.with_for_update(key_share=True)
_LOCK_OF_NODES = _OF_NODES.with_for_update(key_share=True)
_OF_GENERATION = _ALL.where(table.c.generation == bindparam("generation"))
_OF_OPERATION = _ALL.where(table.c.operation_id == bindparam("operation_id")).with_for_update(key_share=True)
_SENT_TO = (
    select(table.c.node_id)
    .where((table.c.stage == "sent") | table.c.sent_at.is_not(None), among(table.c.node_id, "node_ids"))
    .distinct()
)
_ACTIVE = table.c.stage.in_(("waiting", "sent"))
_DUE = select(table.c.node_id).where(_ACTIVE, table.c.next_try_at <= bindparam("now", type_=Instant())).distinct()
_NEXT = select(func.min(table.c.next_try_at)).where(_ACTIVE, table.c.next_try_at > bindparam("now", type_=Instant()))


async def list_(tx: Transaction, node_ids: Sequence[str] | None = None) -> list[BackendIntent]:
    """Of these nodes, or all. In a write transaction the rows are locked until its end."""
    if node_ids is None:
        return records(BackendIntent, await tx.fetch_all(_LOCK_ALL if tx.writable else _ALL))
    wanted = {"node_ids": node_ids}
    return records(BackendIntent, await tx.fetch_all(_LOCK_OF_NODES if tx.writable else _OF_NODES, wanted))


async def list_generation(tx: Transaction, generation: int) -> list[BackendIntent]:
    """Every node's intent for one rule, as a snapshot."""
    return records(BackendIntent, await tx.fetch_all(_OF_GENERATION, {"generation": generation}))


async def lock_operation(tx: Transaction, operation_id: str) -> list[BackendIntent]:
    """In a write transaction: the intents of one operation, ours until its end."""
    return records(BackendIntent, await tx.fetch_all(_OF_OPERATION, {"operation_id": operation_id}))


async def put(tx: Transaction, intents: Iterable[BackendIntent]) -> None:
    """Whole rows, new or changed. Raises `Conflict` when a node was deleted."""
    await tx.execute_many(_PUT, [_columns(intent) for intent in intents])


def _columns(intent: BackendIntent) -> dict[str, Any]:
    """Nodes report some of the texts."""
    return columns_of(intent) | {
        "digest": storable(intent.digest, 512),
        "reason": storable(intent.reason),
        "before": storable(intent.before, 512),
    }


async def list_sent_to(tx: Transaction, node_ids: Sequence[str]) -> set[str]:
    """Those among the nodes that may be at an order, or have been without our having heard what came of it."""
    return {row[0] for row in await tx.fetch_all(_SENT_TO, {"node_ids": node_ids})}


async def list_due(tx: Transaction, now: datetime) -> list[str]:
    """Nodes whose next try has come."""
    return [row[0] for row in await tx.fetch_all(_DUE, {"now": now})]


async def next_due(tx: Transaction, now: datetime) -> datetime | None:
    """When the next try after `now` is."""
    row = await tx.fetch_one(_NEXT, {"now": now})
    found: datetime | None = row[0] if row else None
    return found
