"""Rollouts: how far an upgrade is that proceeds by hardware class, of a backend or of Corral itself, or the trial of a
new revision of a model. One row per operation; it goes with the operation.

The controller that reconciles advances it; people pause, promote and abort it.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKey, Table, Text, bindparam, select

from corral.kit.errors import NotFound
from corral.store.engine.schema import columns_of, metadata, record, records, upsert_whole
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Choice, Instant, Json
from corral.store.records import (
    ROLLOUT_OVER,
    ModelTrial,
    Rollout,
    RolloutClass,
    RolloutNodeBefore,
    RolloutPhase,
    RolloutSettings,
)

table = Table(
    "rollouts",
    metadata,
    Column("operation_id", Text, ForeignKey("operations.id", ondelete="CASCADE"), primary_key=True),
    Column("generation", BigInteger, nullable=False),
    Column("subject", Text, nullable=False),
    Column("phase", Choice(RolloutPhase), nullable=False, index=True),
    Column("settings", Json[RolloutSettings](RolloutSettings), nullable=False),
    Column("started_at", Instant, nullable=False),
    Column("ticked_at", Instant),
    Column("ended_at", Instant),
    Column("paused_by", Text, nullable=False),
    Column("promoted_by", Text, nullable=False),
    Column("aborted_by", Text, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("reverted_by", Json[tuple[str, ...]](tuple[str, ...]), nullable=False),
    Column("classes", Json[tuple[RolloutClass, ...]](tuple[RolloutClass, ...]), nullable=False),
    Column("nodes", Json[dict[str, RolloutNodeBefore]](dict[str, RolloutNodeBefore]), nullable=False),
    Column("trial", Json[ModelTrial](ModelTrial)),
)

_PUT = upsert_whole(table)
_ACTIVE = select(table).where(table.c.phase.not_in(sorted(ROLLOUT_OVER)))
_ACTIVE_OF_BACKENDS = _ACTIVE.where(table.c.trial.is_(None), table.c.generation > 0).order_by(
    table.c.generation, table.c.operation_id
)
_ACTIVE_OF_CORRAL = _ACTIVE.where(table.c.trial.is_(None), table.c.generation == 0).order_by(table.c.operation_id)
_ACTIVE_OF_MODELS = _ACTIVE.where(table.c.trial.is_not(None)).order_by(table.c.subject, table.c.operation_id)
_BY_OPERATION = select(table).where(table.c.operation_id == bindparam("operation_id"))
_NEWEST = select(table).order_by(table.c.started_at.desc(), table.c.operation_id).limit(bindparam("limit"))


async def put(tx: Transaction, rollout: Rollout) -> None:
    """The whole row, new or changed. The caller has read it in the same transaction, under the counter of the rules."""
    await tx.execute(_PUT, columns_of(rollout))


async def find(tx: Transaction, operation_id: str) -> Rollout | None:
    """In a write transaction the row is locked until its end."""
    return record(Rollout, await tx.lock_one(_BY_OPERATION, {"operation_id": operation_id}))


async def get(tx: Transaction, operation_id: str) -> Rollout:
    rollout = await find(tx, operation_id)
    if rollout is None:
        raise NotFound(f"operation {operation_id} is no rollout")
    return rollout


async def list_active(tx: Transaction) -> list[Rollout]:
    """Those of backends that are not over, the oldest first."""
    return records(Rollout, await tx.fetch_all(_ACTIVE_OF_BACKENDS))


async def list_of_corral(tx: Transaction) -> list[Rollout]:
    """Those of versions of Corral that are not over."""
    return records(Rollout, await tx.fetch_all(_ACTIVE_OF_CORRAL))


async def list_trials(tx: Transaction) -> list[Rollout]:
    """Those of models that are not over; at most one of each model."""
    return records(Rollout, await tx.fetch_all(_ACTIVE_OF_MODELS))


async def find_trial(tx: Transaction, model: str) -> Rollout | None:
    return next((found for found in await list_trials(tx) if found.subject == model), None)


async def list_(tx: Transaction, *, limit: int = 50) -> list[Rollout]:
    """The newest first."""
    return records(Rollout, await tx.fetch_all(_NEWEST, {"limit": limit}))
