"""Samples: what the fleet, a model or a node did in one interval. Each controller writes rows of its own (`source`), so
none waits for another; a reader merges the rows of one interval. Fine intervals are kept for a day, coarse ones for 30
days."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec
from sqlalchemy import BigInteger, Column, Index, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import columns_of, metadata, record, records, upsert_whole
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json

COARSE_S = 900  # an interval of this length or longer is a coarse one
KEEP_FINE = timedelta(hours=25)
KEEP_COARSE = timedelta(days=30, hours=1)


class Gauge(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A value that was read several times in an interval."""

    total: float
    count: int
    most: float


class SampleBody(msgspec.Struct, frozen=True, omit_defaults=True):
    until_s: float  # how much of the interval the row covers, from its beginning
    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token: dict[int, int] = msgspec.field(default_factory=lambda: dict[int, int]())  # logarithmic buckets
    queue: dict[int, int] = msgspec.field(default_factory=lambda: dict[int, int]())
    gauges: dict[str, Gauge] = msgspec.field(default_factory=lambda: dict[str, Gauge]())


class Sample(msgspec.Struct, frozen=True):
    kind: str  # fleet, model, node
    name: str  # of the model; the id of the node
    step_s: int
    at: datetime  # the beginning of the interval
    source: str  # the controller process that counted
    body: SampleBody


table = Table(
    "samples",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("step_s", BigInteger, primary_key=True),
    Column("at", Instant, primary_key=True),
    Column("source", Text, primary_key=True),
    Column("body", Json[SampleBody](SampleBody), nullable=False),
    Index("ix_samples_step_s_at", "step_s", "at"),
)

_PUT = upsert_whole(table)
_OF = (table.c.kind == bindparam("of_kind")) & (table.c.name == bindparam("of_name"))
_SINCE = table.c.at >= bindparam("since", type_=Instant())
_FINE = select(table).where(_OF, table.c.step_s < COARSE_S, _SINCE).order_by(table.c.at)
_COARSE = select(table).where(_OF, table.c.step_s >= COARSE_S, _SINCE).order_by(table.c.at)
_LATEST = select(table).where(_OF, table.c.step_s < COARSE_S, _SINCE).order_by(table.c.at.desc()).limit(1)
_BEFORE = table.c.at < bindparam("before", type_=Instant())
_PRUNE_FINE = delete_from(table).where(table.c.step_s < COARSE_S, _BEFORE)
_PRUNE_COARSE = delete_from(table).where(table.c.step_s >= COARSE_S, _BEFORE)


async def put(tx: Transaction, samples: Sequence[Sample]) -> None:
    """A row replaces what the same source wrote for the same interval."""
    await tx.execute_many(_PUT, [columns_of(sample) for sample in samples])


async def list_(tx: Transaction, *, kind: str, name: str, since: datetime, coarse: bool) -> list[Sample]:
    """By time; several of one interval where several controllers counted."""
    given = {"of_kind": kind, "of_name": name, "since": since}
    return records(Sample, await tx.fetch_all(_COARSE if coarse else _FINE, given))


async def find_latest(tx: Transaction, *, kind: str, name: str, since: datetime) -> Sample | None:
    """Of the fine ones."""
    return record(Sample, await tx.fetch_one(_LATEST, {"of_kind": kind, "of_name": name, "since": since}))


async def prune(tx: Transaction, now: datetime) -> int:
    fine = (await tx.execute(_PRUNE_FINE, {"before": now - KEEP_FINE})).rowcount
    return fine + (await tx.execute(_PRUNE_COARSE, {"before": now - KEEP_COARSE})).rowcount
