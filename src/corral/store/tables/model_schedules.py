"""Schedules: how many replicas of a model there should be, on which nodes, and how requests are spread over them
(docs/reference/wire/http-nodes.md#schedules). A schedule may be there before its model is."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import BigInteger, Boolean, Column, Table, Text, bindparam, select, update
from sqlalchemy import delete as delete_from

from corral.kit.errors import NotFound
from corral.store.engine.schema import NameText, columns_of, insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json, Real, now


class Schedule(msgspec.Struct, frozen=True):
    model: str
    id: str  # uuid4
    created_at: datetime
    updated_at: datetime
    node_selector: dict[str, str] = msgspec.field(default_factory=lambda: dict[str, str]())  # all must be equal
    min_replicas: int = 0
    max_replicas: int = 0  # 0: no bound
    spread_all: bool = False  # one on every node that matches
    route_policy: str = ""  # round_robin, prefix_cache; empty: the fleet's
    balance_abs_threshold: int = 0  # 0: the fleet's, like the two below
    balance_rel_threshold: float = 0.0
    min_prefix_match: float = 0.0
    # What was wanted could not be had: so many looks in a row, and when it is tried again.
    unsatisfiable_ticks: int = 0
    unsatisfiable_until: datetime | None = None


table = Table(
    "model_schedules",
    metadata,
    Column("model", NameText, primary_key=True),
    Column("id", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("updated_at", Instant, nullable=False),
    Column("node_selector", Json[dict[str, str]](dict[str, str]), nullable=False),
    Column("min_replicas", BigInteger, nullable=False),
    Column("max_replicas", BigInteger, nullable=False),
    Column("spread_all", Boolean, nullable=False),
    Column("route_policy", Text, nullable=False),
    Column("balance_abs_threshold", BigInteger, nullable=False),
    Column("balance_rel_threshold", Real, nullable=False),
    Column("min_prefix_match", Real, nullable=False),
    Column("unsatisfiable_ticks", BigInteger, nullable=False),
    Column("unsatisfiable_until", Instant),
)

_KEPT = ("model", "id", "created_at")  # of the schedule that was there first
_INSERT = insert_whole(table).values(created_at=now(), updated_at=now())
_PUT = _INSERT.on_conflict_do_update(
    index_elements=[table.c.model],
    set_={column.key: _INSERT.excluded[column.key] for column in table.columns if column.key not in _KEPT},
).returning(*table.columns)
_BY_MODEL = select(table).where(table.c.model == bindparam("model"))
_ALL = select(table).order_by(table.c.model)
_DELETE = delete_from(table).where(table.c.model == bindparam("model"))
_MARK = (
    update(table)
    .where(table.c.model == bindparam("schedule_of"))
    .values(
        unsatisfiable_ticks=bindparam("ticks", type_=BigInteger()),
        unsatisfiable_until=bindparam("until", type_=Instant()),
    )
)
_CLEAR = (
    update(table)
    .where((table.c.unsatisfiable_ticks != 0) | table.c.unsatisfiable_until.is_not(None))
    .values(unsatisfiable_ticks=0, unsatisfiable_until=None)
)


async def put(tx: Transaction, schedule: Schedule) -> Schedule:
    """New, or in place of the model's; then its id stays. What comes back is what was written."""
    written = record(Schedule, await tx.fetch_one(_PUT, columns_of(schedule)))
    assert written is not None
    return written


async def find(tx: Transaction, model: str) -> Schedule | None:
    """In a write transaction the row is locked until its end."""
    return record(Schedule, await tx.lock_one(_BY_MODEL, {"model": model}))


async def get(tx: Transaction, model: str) -> Schedule:
    schedule = await find(tx, model)
    if schedule is None:
        raise NotFound(f"there is no schedule for the model {model}")
    return schedule


async def list_(tx: Transaction) -> list[Schedule]:
    return records(Schedule, await tx.fetch_all(_ALL))


async def delete(tx: Transaction, model: str) -> bool:
    return (await tx.execute(_DELETE, {"model": model})).rowcount == 1


async def mark_unsatisfiable(tx: Transaction, model: str, ticks: int, until: datetime | None) -> None:
    """What is wanted cannot be had now. Not a change a person made: neither `updated_at` moves nor a counter."""
    await tx.execute(_MARK, {"schedule_of": model, "ticks": ticks, "until": until})


async def clear_unsatisfiable(tx: Transaction) -> int:
    """Room may have come: all are tried again. How many were waiting."""
    return (await tx.execute(_CLEAR)).rowcount
