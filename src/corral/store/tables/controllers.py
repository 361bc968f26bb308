"""The controllers: each one updates its own row regularly."""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import Column, Table, Text, bindparam, select, text
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import insert_whole, metadata, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, now, now_plus, span_us


class Controller(msgspec.Struct, frozen=True):
    id: str
    host: str
    version: str
    started_at: datetime
    seen_at: datetime
    blob_url: str = ""  # where it serves model files; empty = it does not say


table = Table(
    "controllers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("host", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("started_at", Instant, nullable=False),
    Column("seen_at", Instant, nullable=False),
    Column("blob_url", Text, nullable=False, server_default=text("''")),  # for releases that do not know the column yet
)

_INSERT = insert_whole(table).values(started_at=now(), seen_at=now())
_CHANGES = {name: _INSERT.excluded[name] for name in ("host", "version", "seen_at", "blob_url")}
_SEEN = _INSERT.on_conflict_do_update(index_elements=[table.c.id], set_=_CHANGES)
_STARTED = _INSERT.on_conflict_do_update(
    index_elements=[table.c.id], set_=_CHANGES | {"started_at": _INSERT.excluded.started_at}
)
_ALL = select(table).order_by(table.c.started_at, table.c.id)
_LIVE = _ALL.where(table.c.seen_at > now_plus("ago_us"))
_DELETE = delete_from(table).where(table.c.id == bindparam("id"))
_PRUNE = delete_from(table).where(table.c.seen_at < bindparam("before", type_=Instant()))


async def seen(
    tx: Transaction, controller_id: str, *, host: str, version: str, blob_url: str = "", started: bool = False
) -> None:
    """Record that the controller is alive. `started`: set `started_at` too, also where an earlier run left its row."""
    row = {"id": controller_id, "host": host, "version": version, "blob_url": blob_url}
    await tx.execute(_STARTED if started else _SEEN, row)


async def list_(tx: Transaction) -> list[Controller]:
    """All rows, the longest-running controller first."""
    return records(Controller, await tx.fetch_all(_ALL))


async def list_live(tx: Transaction, *, within_s: float) -> list[Controller]:
    """The controllers seen within this time."""
    return records(Controller, await tx.fetch_all(_LIVE, {"ago_us": -span_us(within_s)}))


async def delete(tx: Transaction, controller_id: str) -> bool:
    """Called by a controller that stops."""
    return (await tx.execute(_DELETE, {"id": controller_id})).rowcount == 1


async def prune(tx: Transaction, before: datetime) -> int:
    """Delete the controllers not seen since."""
    return (await tx.execute(_PRUNE, {"before": before})).rowcount
