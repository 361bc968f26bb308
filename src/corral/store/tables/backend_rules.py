"""Rules: what people want of backends, in the order they said it. A rule is never edited: a later one says otherwise, a
node is excepted from it, or it is withdrawn. What they come to on a node is `controller/backends/rules.py`'s."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, Boolean, Column, Table, Text, bindparam, select, update
from sqlalchemy import delete as delete_from

from corral.kit.errors import NotFound
from corral.store.engine.schema import columns_of, insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Choice, Instant, Json, now
from corral.store.records import BackendRequest, BackendRule, RuleOrigin, ScopeKind, Want

table = Table(
    "backend_rules",
    metadata,
    # Numbered by the counter of `revisions`, whose row is held until the commit: the order is that of the commits.
    Column("generation", BigInteger, primary_key=True, autoincrement=False),
    Column("operation_id", Text, nullable=False, index=True),
    Column("scope_kind", Choice(ScopeKind), nullable=False),
    Column("scope_value", Text, nullable=False),
    Column("backend", Text, nullable=False, index=True),
    Column("want", Choice(Want), nullable=False),
    Column("target", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("asked", Json[BackendRequest](BackendRequest), key="request", nullable=False),
    Column("origin", Choice(RuleOrigin), nullable=False),
    Column("force", Boolean, nullable=False),
    Column("max_parallel", Text, nullable=False),
    Column("excluded", Json[tuple[str, ...]](tuple[str, ...]), nullable=False),
    Column("withdrawn_at", Instant),
)

_INSERT = insert_whole(table)
_BY_GENERATION = select(table).where(table.c.generation == bindparam("generation"))
_BY_OPERATION = select(table).where(table.c.operation_id == bindparam("operation_id")).order_by(table.c.generation)
_LIVE = select(table).where(table.c.withdrawn_at.is_(None)).order_by(table.c.generation)
_LIVE_OF = _LIVE.where(table.c.backend == bindparam("backend"))
_WITHDRAW = (
    update(table)
    .where(table.c.generation == bindparam("rule_generation"), table.c.withdrawn_at.is_(None))
    .values(withdrawn_at=now())
)
_EXCLUDE = (
    update(table)
    .where(table.c.generation == bindparam("rule_generation"))
    .values(excluded=bindparam("nodes", type_=table.c.excluded.type))
)
_PRUNE = delete_from(table).where(table.c.withdrawn_at < bindparam("before", type_=Instant()))


async def insert(tx: Transaction, rule: BackendRule) -> None:
    await tx.execute(_INSERT, columns_of(rule))


async def get(tx: Transaction, generation: int) -> BackendRule:
    rule = record(BackendRule, await tx.lock_one(_BY_GENERATION, {"generation": generation}))
    if rule is None:
        raise NotFound(f"there is no rule {generation}")
    return rule


async def find_for_operation(tx: Transaction, operation_id: str) -> BackendRule | None:
    """The rule an operation made, withdrawn or not."""
    return record(BackendRule, await tx.lock_one(_BY_OPERATION, {"operation_id": operation_id}))


async def list_live(tx: Transaction, backend: str | None = None) -> list[BackendRule]:
    """Those that hold, in their order; of one backend when it is named."""
    if backend is None:
        return records(BackendRule, await tx.fetch_all(_LIVE))
    return records(BackendRule, await tx.fetch_all(_LIVE_OF, {"backend": backend}))


async def withdraw(tx: Transaction, generation: int) -> bool:
    """False when it already was."""
    return (await tx.execute(_WITHDRAW, {"rule_generation": generation})).rowcount == 1


async def exclude(tx: Transaction, generation: int, node_id: str) -> None:
    """The rule holds no more for this node; for the others it does."""
    rule = await get(tx, generation)
    excepted = tuple(sorted({*rule.excluded, node_id}))
    await tx.execute(_EXCLUDE, {"rule_generation": generation, "nodes": excepted})


async def prune(tx: Transaction, before: datetime) -> int:
    """Forget those withdrawn before."""
    return (await tx.execute(_PRUNE, {"before": before})).rowcount
