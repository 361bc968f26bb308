"""Replicas: the desired ones, by model and node, and their orders. Nodes report the processes that run
(`node_backends.processes`); gateways send requests only to those.

A row is one replica of one model on one node, from its placement until its process is known to be gone. Only the
controller that holds the lease of the loads changes rows, after reading them with `list_` in the same write
transaction, which locks them until the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Table, Text, bindparam, func, select
from sqlalchemy import delete as delete_from

from corral.contract.messages.replicas import ReplicaDevice, ReplicaFile
from corral.store.engine.schema import NameText, columns_of, metadata, records, upsert_whole
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Choice, Instant, Json, among
from corral.store.records import DesiredReplica, ReplicaStage

table = Table(
    "replicas",
    metadata,
    Column("node_id", Text, ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
    Column("model", NameText, primary_key=True, index=True),
    Column("replica", BigInteger, primary_key=True, autoincrement=False),
    Column("revision", Text, nullable=False),
    Column("backend", Text, nullable=False),
    Column("stage", Choice(ReplicaStage), nullable=False),
    Column("op_id", Text, nullable=False),
    Column("process_id", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("updated_at", Instant, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("devices", Json[tuple[ReplicaDevice, ...]](tuple[ReplicaDevice, ...]), nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("files", Json[tuple[ReplicaFile, ...]](tuple[ReplicaFile, ...])),
    Column("reason", Text, nullable=False),
    Column("error", Text, nullable=False),
    Column("next_try_at", Instant),
    Column("epoch", BigInteger, nullable=False),
    Column("sent_at", Instant),
    Column("accepted_at", Instant),
    Column("boot_id", Text, nullable=False),
    Column("ready_at", Instant),
    Column("last_used_at", Instant),
    Column("leaving_at", Instant),
    Column("stop_attempt", BigInteger, nullable=False),
    Column("force", Boolean, nullable=False),
)

_PUT = upsert_whole(table)
_ALL = select(table).order_by(table.c.node_id, table.c.model, table.c.replica)
_LOCK_ALL = _ALL.with_for_update(key_share=True)
_OF_MODEL = _ALL.where(table.c.model == bindparam("model"))
_LOCK_OF_MODEL = _OF_MODEL.with_for_update(key_share=True)
_OF_NODES = _ALL.where(among(table.c.node_id, "node_ids"))
_COUNT = select(table.c.node_id, func.count()).where(table.c.stage == bindparam("stage")).group_by(table.c.node_id)
_COUNT_OF_NODES = _COUNT.where(among(table.c.node_id, "node_ids"))
_DELETE = delete_from(table).where(
    table.c.node_id == bindparam("at_node"),
    table.c.model == bindparam("of_model"),
    table.c.replica == bindparam("number"),
)


async def list_(
    tx: Transaction, *, model: str | None = None, node_ids: Sequence[str] | None = None
) -> list[DesiredReplica]:
    """All, of one model, or of these nodes. In a write transaction those of all or of one model are ours until then."""
    if model is not None:
        return records(
            DesiredReplica, await tx.fetch_all(_LOCK_OF_MODEL if tx.writable else _OF_MODEL, {"model": model})
        )
    if node_ids is not None:
        return records(DesiredReplica, await tx.fetch_all(_OF_NODES, {"node_ids": node_ids}))
    return records(DesiredReplica, await tx.fetch_all(_LOCK_ALL if tx.writable else _ALL))


async def count_running(tx: Transaction, node_ids: Sequence[str] | None = None) -> dict[str, int]:
    """How many replicas run on each of these nodes, or on any; nodes without one are left out."""
    parameters: dict[str, Any] = {"stage": ReplicaStage.RUNNING}
    if node_ids is None:
        return {node_id: int(count) for node_id, count in await tx.fetch_all(_COUNT, parameters)}
    rows = await tx.fetch_all(_COUNT_OF_NODES, parameters | {"node_ids": node_ids})
    return {node_id: int(count) for node_id, count in rows}


async def put(tx: Transaction, rows: Iterable[DesiredReplica]) -> None:
    """Whole rows, new or changed. Raises `Conflict` when a node was deleted."""
    await tx.execute_many(_PUT, [columns_of(row) for row in rows])


async def delete(tx: Transaction, rows: Iterable[DesiredReplica]) -> None:
    keys = [{"at_node": row.node_id, "of_model": row.model, "number": row.replica} for row in rows]
    await tx.execute_many(_DELETE, keys)
