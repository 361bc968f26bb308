"""Models: what each is (its definition, whole), and where the definition came from.

`revision` is of the definition's meaning (`contract.models.revision_of`): replicas of another one are other replicas.
Every change raises `row_version`, also one that means nothing to a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Column, Table, Text, bindparam, select, update
from sqlalchemy import delete as delete_from

from corral.kit.errors import NotFound
from corral.store.engine.schema import NameText, columns_of, insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json, among, now


class StoredModel(msgspec.Struct, frozen=True):
    id: str  # what clients call it
    definition: dict[str, Any]
    revision: str
    origin: str  # person, gallery, file
    created_at: datetime
    updated_at: datetime
    source: str = ""  # gallery@entry, or the file below the watched folder
    created_by: str = ""  # the name of a key, where a person asked for it
    row_version: int = 1
    # Revisions whose replicas may answer until one of the present revision can; none after an edit that said not to
    # wait (`recreate`). Whoever sees the present one ready calls `forget_previous_revisions`.
    previous_revisions: tuple[str, ...] = ()


table = Table(
    "models",
    metadata,
    Column("id", NameText, primary_key=True),
    Column("definition", Json[dict[str, Any]](dict[str, Any]), nullable=False),
    Column("revision", Text, nullable=False),
    Column("origin", Text, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("updated_at", Instant, nullable=False),
    Column("source", Text, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("row_version", BigInteger, nullable=False),
    Column("formers", Json[tuple[str, ...]](tuple[str, ...]), key="previous_revisions", nullable=False),
)

_REPLACED = ("definition", "revision", "origin", "source", "updated_at", "previous_revisions")
_INSERT = insert_whole(table).values(created_at=now(), updated_at=now(), row_version=1)
_PUT = _INSERT.on_conflict_do_update(
    index_elements=[table.c.id],
    set_={
        **{name: _INSERT.excluded[name] for name in _REPLACED},
        "row_version": table.c.row_version + 1,
    },
).returning(*table.columns)
_BY_ID = select(table).where(table.c.id == bindparam("id"))
_ALL = select(table).order_by(table.c.id)
_IDS = select(table.c.id).order_by(table.c.id)
_THESE = _ALL.where(among(table.c.id, "ids"))
_OF_ORIGIN = _ALL.where(table.c.origin == bindparam("origin"))
_DELETE = delete_from(table).where(table.c.id == bindparam("id"))
_FORGET_PREVIOUS_REVISIONS = (
    update(table)
    .where(
        table.c.id == bindparam("model_id"),
        table.c.revision == bindparam("ready"),
        table.c.previous_revisions != bindparam("none", type_=table.c.previous_revisions.type),
    )
    .values(previous_revisions=bindparam("none", type_=table.c.previous_revisions.type))
)


async def put(tx: Transaction, model: StoredModel) -> StoredModel:
    """New, or in place of the one of that id; then who made it and when stay. Moments are the database's: what comes
    back is what was written."""
    written = record(StoredModel, await tx.fetch_one(_PUT, columns_of(model)))
    assert written is not None
    return written


async def find(tx: Transaction, model_id: str) -> StoredModel | None:
    """In a write transaction the row is locked until its end."""
    return record(StoredModel, await tx.lock_one(_BY_ID, {"id": model_id}))


async def get(tx: Transaction, model_id: str) -> StoredModel:
    model = await find(tx, model_id)
    if model is None:
        raise NotFound(f"there is no model {model_id}")
    return model


async def list_(tx: Transaction, ids: Sequence[str] | None = None) -> list[StoredModel]:
    """By name; only these when some are named."""
    if ids is None:
        return records(StoredModel, await tx.fetch_all(_ALL))
    return records(StoredModel, await tx.fetch_all(_THESE, {"ids": ids}))


async def list_ids(tx: Transaction) -> list[str]:
    return [model_id for (model_id,) in await tx.fetch_all(_IDS)]


async def list_of_origin(tx: Transaction, origin: str) -> list[StoredModel]:
    return records(StoredModel, await tx.fetch_all(_OF_ORIGIN, {"origin": origin}))


async def delete(tx: Transaction, model_id: str) -> bool:
    return (await tx.execute(_DELETE, {"id": model_id})).rowcount == 1


async def forget_previous_revisions(tx: Transaction, model_id: str, revision: str) -> bool:
    """A replica of this revision is ready, so none of an earlier one may answer any more. False when that was so, or
    when the revision is not the model's (any more)."""
    return (
        await tx.execute(_FORGET_PREVIOUS_REVISIONS, {"model_id": model_id, "ready": revision, "none": ()})
    ).rowcount == 1
