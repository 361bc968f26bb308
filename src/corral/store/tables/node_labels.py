"""Labels of nodes: (node, key) → value, and where each came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Column, ForeignKey, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import insert_whole, metadata, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import among


class NodeLabel(msgspec.Struct, frozen=True):
    node_id: str
    key: str
    value: str
    origin: str  # worker, admin, auto


table = Table(
    "node_labels",
    metadata,
    Column("node_id", Text, ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Column("origin", Text, nullable=False),
)

_INSERT = insert_whole(table)
_UPSERT = _INSERT.on_conflict_do_update(
    index_elements=[table.c.node_id, table.c.key],
    set_={"value": _INSERT.excluded.value, "origin": _INSERT.excluded.origin},
)
_OF_NODE = select(table).where(table.c.node_id == bindparam("node_id")).order_by(table.c.key)
_ALL = select(table).order_by(table.c.node_id, table.c.key)
_OF_NODES = _ALL.where(among(table.c.node_id, "node_ids"))
_DELETE_ALL = delete_from(table).where(table.c.node_id == bindparam("node_id"))
_DELETE = _DELETE_ALL.where(table.c.key == bindparam("key"))
_DELETE_REPORTED = _DELETE_ALL.where(table.c.origin != "admin")


async def get(tx: Transaction, node_id: str) -> dict[str, str]:
    """Empty for a node without labels, or for an unknown node."""
    return {label.key: label.value for label in await list_(tx, node_id)}


async def list_(tx: Transaction, node_id: str) -> list[NodeLabel]:
    return records(NodeLabel, await tx.fetch_all(_OF_NODE, {"node_id": node_id}))


async def list_for(tx: Transaction, node_ids: Sequence[str] | None = None) -> dict[str, dict[str, str]]:
    """Labels by node, in one query; of all nodes when none are named. Nodes without labels are absent."""
    rows = await (tx.fetch_all(_ALL) if node_ids is None else tx.fetch_all(_OF_NODES, {"node_ids": node_ids}))
    found: dict[str, dict[str, str]] = {}
    for node_id, key, value, _ in rows:
        found.setdefault(node_id, {})[key] = value
    return found


async def merge(tx: Transaction, node_id: str, labels: Mapping[str, str], *, origin: str) -> None:
    """Set these labels, keep the others. Raises `Conflict` when the node does not exist."""
    rows = [{"node_id": node_id, "key": key, "value": value, "origin": origin} for key, value in labels.items()]
    await tx.execute_many(_UPSERT, rows)


async def replace_all(tx: Transaction, node_id: str, labels: Mapping[str, str], *, origin: str) -> None:
    await tx.execute(_DELETE_ALL, {"node_id": node_id})
    await merge(tx, node_id, labels, origin=origin)


async def delete(tx: Transaction, node_id: str, key: str) -> bool:
    return (await tx.execute(_DELETE, {"node_id": node_id, "key": key})).rowcount == 1


async def delete_reported(tx: Transaction, node_id: str) -> None:
    """Delete the labels that the node reported; the labels that users set stay."""
    await tx.execute(_DELETE_REPORTED, {"node_id": node_id})
