"""Targets: the build that a rule means for each kind of machine. A target is resolved once and then stored, so that the
whole fleet gets the same build, also nodes that join after the gallery has changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Column, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import columns_of, insert_whole, metadata, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json, among
from corral.store.records import BackendTarget, TargetBuild
from corral.store.tables import backend_rules

table = Table(
    "backend_targets",
    metadata,
    Column("id", Text, primary_key=True),
    Column("capability", Text, primary_key=True),
    Column("platform", Text, primary_key=True),
    Column("python", Text, primary_key=True),
    Column("resolved_at", Instant, nullable=False),
    Column("build", Json[TargetBuild](TargetBuild)),
    Column("reason", Text, nullable=False),
)

_INSERT = insert_whole(table).on_conflict_do_nothing(index_elements=list(table.primary_key.columns))
_ALL = select(table).order_by(table.c.id, table.c.capability, table.c.platform, table.c.python)
_OF = _ALL.where(among(table.c.id, "ids"))
_FORGET = delete_from(table).where(table.c.build.is_(None))
_UNUSED = delete_from(table).where(table.c.id.not_in(select(backend_rules.table.c.target)))
_FORGET_OF = _FORGET.where(table.c.id == bindparam("id"))


async def add(tx: Transaction, targets: Iterable[BackendTarget]) -> None:
    """Those already found out stay as they are."""
    await tx.execute_many(_INSERT, [columns_of(target) for target in targets])


async def list_for(tx: Transaction, ids: Sequence[str]) -> list[BackendTarget]:
    return records(BackendTarget, await tx.fetch_all(_OF, {"ids": ids}))


async def forget_missing(tx: Transaction, target_id: str | None = None) -> int:
    """What was not to be had may be now: it will be looked up again. Of one target, or of all."""
    if target_id is None:
        return (await tx.execute(_FORGET)).rowcount
    return (await tx.execute(_FORGET_OF, {"id": target_id})).rowcount


async def prune(tx: Transaction) -> int:
    """Forget those no rule speaks of."""
    return (await tx.execute(_UNUSED)).rowcount
