"""One row per node in an operation: its progress or its outcome. A row that has ended is never written again. Progress
is stored about once a second; events on the bus carry it sooner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Table, Text, and_, bindparam, func, select

from corral.store.engine.schema import NameText, columns_of, metadata, records, upsert_whole
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Choice, Instant, Json, Real, among, storable
from corral.store.records import CONTROLLER, ENDED, OperationNode, OperationNodeStatus
from corral.store.tables import nodes, operations

table = Table(
    "operation_nodes",
    metadata,
    Column("operation_id", Text, ForeignKey("operations.id", ondelete="CASCADE"), primary_key=True),
    Column("node_id", Text, primary_key=True, index=True),
    Column("node_name", NameText, nullable=False),
    Column("status", Choice(OperationNodeStatus), nullable=False),
    Column("updated_at", Instant, nullable=False),
    Column("reason", Text, nullable=False),
    Column("phase", Text, nullable=False),
    Column("file_name", Text, nullable=False),
    Column("percentage", Real, nullable=False),
    Column("current_bytes", BigInteger, nullable=False),
    Column("total_bytes", BigInteger, nullable=False),
    Column("rate", Real, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("failures", BigInteger, nullable=False),
    Column("next_try_at", Instant),
    Column("waits", Boolean, nullable=False),
    Column("variant", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("sources", Json(dict[str, int]), nullable=False, server_default="{}"),
    Column("bad_sources", Json(tuple[str, ...]), nullable=False, server_default="[]"),
)

# Not `not_in`, whose list is written out anew for every row of a put.
_NOT_ENDED = and_(*(table.c.status != status for status in sorted(ENDED)))
_PUT = upsert_whole(table, where=_NOT_ENDED)
_OF = select(table).where(among(table.c.operation_id, "ids")).order_by(table.c.operation_id, table.c.node_name)
_OF_ONE = select(table).where(table.c.operation_id == bindparam("id")).order_by(table.c.node_name)
_OPEN = (
    select(table)
    .where(
        _NOT_ENDED,
        # Only these have such rows. Without saying so every row of every operation on file would be looked at.
        table.c.operation_id.in_(
            select(operations.table.c.id).where(
                operations.table.c.finished_at.is_(None),
                operations.table.c.generation > 0,  # 0: about a model's files, which no rule requires
            )
        ),
    )
    .order_by(table.c.operation_id, table.c.node_id)
)
_ORPHANS = _OPEN.where(table.c.node_id != CONTROLLER, table.c.node_id.not_in(select(nodes.table.c.id)))
_UNFINISHED = select(table.c.operation_id).where(_NOT_ENDED, among(table.c.operation_id, "ids")).distinct()
_COUNTS = (
    select(table.c.operation_id, table.c.status, func.count())
    .where(among(table.c.operation_id, "ids"))
    .group_by(table.c.operation_id, table.c.status)
)
_CANCELLED = select(table.c.operation_id, table.c.node_id, table.c.reason).where(
    table.c.status == "cancelled", among(table.c.operation_id, "ids")
)
_OPEN_ON = _OPEN.where(among(table.c.node_id, "node_ids"))


async def put(tx: Transaction, rows: Iterable[OperationNode]) -> None:
    """Whole rows, new or changed; one that has ended stays so. Raises `Conflict` when the operation is gone."""
    await tx.execute_many(_PUT, [_columns(row) for row in rows])


def _columns(row: OperationNode) -> dict[str, Any]:
    """Nodes report some of the texts."""
    return columns_of(row) | {
        "reason": storable(row.reason),
        "phase": storable(row.phase, 64),
        "file_name": storable(row.file_name, 512),
        "digest": storable(row.digest, 512),
    }


async def list_(tx: Transaction, operation_id: str) -> list[OperationNode]:
    """In name order."""
    return records(OperationNode, await tx.fetch_all(_OF_ONE, {"id": operation_id}))


async def list_for(tx: Transaction, operation_ids: Sequence[str]) -> dict[str, list[OperationNode]]:
    """By operation, in name order; those without rows are absent."""
    found: dict[str, list[OperationNode]] = {}
    if not operation_ids:
        return found
    for row in records(OperationNode, await tx.fetch_all(_OF, {"ids": operation_ids})):
        found.setdefault(row.operation_id, []).append(row)
    return found


async def count_for(tx: Transaction, operation_ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """By operation: how many rows have which status."""
    found: dict[str, dict[str, int]] = {}
    for operation_id, status, count in await tx.fetch_all(_COUNTS, {"ids": operation_ids}):
        found.setdefault(operation_id, {})[status] = int(count)
    return found


async def list_open(tx: Transaction, node_ids: Sequence[str] | None = None) -> list[OperationNode]:
    """Rows of operations with a rule that have not ended, of these nodes or all."""
    if node_ids is None:
        return records(OperationNode, await tx.fetch_all(_OPEN))
    return records(OperationNode, await tx.fetch_all(_OPEN_ON, {"node_ids": node_ids}))


async def list_orphans(tx: Transaction) -> list[OperationNode]:
    """Rows of operations with a rule that have not ended, of nodes that are gone."""
    return records(OperationNode, await tx.fetch_all(_ORPHANS))


async def list_unfinished(tx: Transaction, operation_ids: Sequence[str]) -> set[str]:
    """Those among the operations that have a row that has not ended."""
    return {row[0] for row in await tx.fetch_all(_UNFINISHED, {"ids": operation_ids})}


async def list_cancelled(tx: Transaction, operation_ids: Sequence[str]) -> dict[tuple[str, str], str]:
    """(operation, node) of the rows a person has cancelled, with the reason that was given."""
    return {(row[0], row[1]): row[2] for row in await tx.fetch_all(_CANCELLED, {"ids": operation_ids})}
