"""The last definitions of each model, for people who ask what changed. Deleted with their model."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Column, ForeignKey, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import NameText, columns_of, insert_whole, metadata, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json

MAX_OF_A_MODEL = 10


class ModelRevision(msgspec.Struct, frozen=True):
    model: str
    row_version: int  # of the model: several may have one revision, where a change means nothing to a process
    at: datetime
    revision: str
    definition: dict[str, Any]


table = Table(
    "model_revisions",
    metadata,
    Column("model", NameText, ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    Column("row_version", BigInteger, primary_key=True),
    Column("at", Instant, nullable=False),
    Column("revision", Text, nullable=False),
    Column("definition", Json[dict[str, Any]](dict[str, Any]), nullable=False),
)

_INSERT = insert_whole(table).on_conflict_do_nothing(index_elements=list(table.primary_key.columns))
_OF_MODEL = select(table).where(table.c.model == bindparam("of_model")).order_by(table.c.row_version.desc())
_TRIM = delete_from(table).where(
    table.c.model == bindparam("of_model"), table.c.row_version <= bindparam("last") - MAX_OF_A_MODEL
)


async def add(tx: Transaction, revision: ModelRevision) -> None:
    await tx.execute(_INSERT, columns_of(revision))
    await tx.execute(_TRIM, {"of_model": revision.model, "last": revision.row_version})


async def list_(tx: Transaction, model: str) -> list[ModelRevision]:
    """The newest first."""
    return records(ModelRevision, await tx.fetch_all(_OF_MODEL, {"of_model": model}))
