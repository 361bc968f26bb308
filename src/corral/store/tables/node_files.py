"""Which model files are on which nodes: the files were there when a replica last ran from them. A node may have deleted
a file since; then it is fetched again, and only the choice of the node was less good."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec
from sqlalchemy import Column, ForeignKey, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import insert_whole, metadata, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, now


class NodeFile(msgspec.Struct, frozen=True):
    node_id: str
    digest: str  # sha256:…
    seen_at: datetime


table = Table(
    "node_files",
    metadata,
    Column("node_id", Text, ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
    Column("digest", Text, primary_key=True),
    Column("seen_at", Instant, nullable=False),
)

_INSERT = insert_whole(table).values(seen_at=now())
_SEEN = _INSERT.on_conflict_do_update(
    index_elements=[table.c.node_id, table.c.digest], set_={"seen_at": _INSERT.excluded.seen_at}
)
_ALL = select(table).order_by(table.c.node_id, table.c.digest)
_PRUNE = delete_from(table).where(table.c.seen_at < bindparam("before", type_=Instant()))


async def seen(tx: Transaction, files: Iterable[tuple[str, str]]) -> None:
    """Record pairs of node and digest, seen now. Raises `Conflict` when a node was deleted."""
    await tx.execute_many(_SEEN, [{"node_id": node_id, "digest": digest} for node_id, digest in sorted(set(files))])


async def list_(tx: Transaction) -> list[NodeFile]:
    return records(NodeFile, await tx.fetch_all(_ALL))


async def by_node(tx: Transaction) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for file in await list_(tx):
        found.setdefault(file.node_id, set()).add(file.digest)
    return {node_id: frozenset(digests) for node_id, digests in found.items()}


async def prune(tx: Transaction, before: datetime) -> None:
    await tx.execute(_PRUNE, {"before": before})
