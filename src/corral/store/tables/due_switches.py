"""Due switches: nodes that have to end processes to switch a backend, from their turn until they have switched.

The controller that reconciles backends adds and deletes rows, the one that reconciles replicas writes refusals: each
leaves the columns of the other alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from sqlalchemy import Column, ForeignKey, Table, Text, bindparam, select, update
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import columns_of, insert_whole, metadata, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json, storable
from corral.store.records import DueSwitch

table = Table(
    "due_switches",
    metadata,
    Column("node_id", Text, ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
    Column("backend", Text, primary_key=True),
    Column("operation_id", Text, nullable=False),
    Column("since", Instant, nullable=False),
    Column("models", Json[tuple[str, ...]](tuple[str, ...]), nullable=False),
    Column("refusals", Json[dict[str, str]](dict[str, str]), nullable=False),
)

_ALL = select(table).order_by(table.c.node_id, table.c.backend)
_INSERT = insert_whole(table)
_PUT = _INSERT.on_conflict_do_update(
    index_elements=[table.c.node_id, table.c.backend], set_={"models": _INSERT.excluded.models}
)
_IS_SWITCH = (table.c.node_id == bindparam("on_node")) & (table.c.backend == bindparam("of_backend"))
_DELETE = delete_from(table).where(_IS_SWITCH)
_REFUSE = (
    update(table)
    .where(_IS_SWITCH, table.c.since == bindparam("due_since", type_=Instant()))
    .values(refusals=bindparam("because", type_=table.c.refusals.type))
)


async def list_(tx: Transaction) -> list[DueSwitch]:
    return records(DueSwitch, await tx.fetch_all(_ALL))


async def put(tx: Transaction, switches: Iterable[DueSwitch]) -> None:
    """New rows; of one that is there only the models change. Raises `Conflict` when a node was deleted."""
    await tx.execute_many(_PUT, [columns_of(switch) for switch in switches])


async def delete(tx: Transaction, keys: Iterable[tuple[str, str]]) -> None:
    """By node and backend."""
    await tx.execute_many(_DELETE, [{"on_node": node_id, "of_backend": backend} for node_id, backend in keys])


async def refuse(tx: Transaction, node_id: str, backend: str, since: datetime, refusals: dict[str, str]) -> None:
    """Write why no other node takes these models. A row that is gone, or due anew since, stays as it is."""
    texts = {model: storable(why, 1000) for model, why in refusals.items()}
    parameters = {"on_node": node_id, "of_backend": backend, "due_since": since, "because": texts}
    await tx.execute(_REFUSE, parameters)
