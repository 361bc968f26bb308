"""Processes on workers that only offer a gRPC address: where each is, what it was loaded with, and how it is.

Such a worker keeps no list that would survive it and knows nothing of revisions, so what a controller has found out is
written down here: any other can serve from it. What runs there, as everybody else reads it
(`node_backends.processes`), is made from these rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Column, ForeignKey, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.contract.messages.replicas import ReplicaDevice
from corral.store.engine.schema import NameText, columns_of, metadata, record, records, upsert_whole
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json, among


class PeerProcess(msgspec.Struct, frozen=True):
    process_id: str
    node_id: str
    model: str
    replica: int
    revision: str
    backend: str
    address: str  # host:port of its gRPC, as a controller reaches it
    state: str  # ready, stopping, failed
    load: str  # the ModelOptions it was loaded with, as JSON
    definition: dict[str, Any]  # the model's, of that revision
    started_at: datetime
    ready_at: datetime
    slots: int = 1
    devices: tuple[ReplicaDevice, ...] = ()
    memory_bytes: int = 0
    error: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.node_id, self.model, self.replica)


table = Table(
    "peer_processes",
    metadata,
    Column("process_id", Text, primary_key=True),
    Column("node_id", Text, ForeignKey("nodes.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("model", NameText, nullable=False),
    Column("replica", BigInteger, nullable=False),
    Column("revision", Text, nullable=False),
    Column("backend", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("load", Text, nullable=False),
    Column("definition", Json[dict[str, Any]](dict[str, Any]), nullable=False),
    Column("started_at", Instant, nullable=False),
    Column("ready_at", Instant, nullable=False),
    Column("slots", BigInteger, nullable=False),
    Column("devices", Json[tuple[ReplicaDevice, ...]](tuple[ReplicaDevice, ...]), nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("error", Text, nullable=False),
)

_PUT = upsert_whole(table)
_ALL = select(table).order_by(table.c.node_id, table.c.started_at, table.c.process_id)
_OF = _ALL.where(among(table.c.node_id, "node_ids"))
_ONE = select(table).where(table.c.process_id == bindparam("process_id"))
_DELETE = delete_from(table).where(table.c.process_id == bindparam("gone"))


async def list_(tx: Transaction, node_ids: Sequence[str] | None = None) -> list[PeerProcess]:
    """Of all nodes or these; of one node, those that started first come first."""
    if node_ids is None:
        return records(PeerProcess, await tx.fetch_all(_ALL))
    return records(PeerProcess, await tx.fetch_all(_OF, {"node_ids": node_ids}))


async def find(tx: Transaction, process_id: str) -> PeerProcess | None:
    return record(PeerProcess, await tx.fetch_one(_ONE, {"process_id": process_id}))


async def put(tx: Transaction, rows: Iterable[PeerProcess]) -> None:
    """Whole rows, new or changed. Raises `Conflict` when a node was deleted."""
    await tx.execute_many(_PUT, [columns_of(row) for row in rows])


async def delete(tx: Transaction, process_ids: Iterable[str]) -> None:
    await tx.execute_many(_DELETE, [{"gone": process_id} for process_id in sorted(process_ids)])
