"""Receipts: what became of each request for a model, as gateways told. Kept for some days.

A batch may come twice, when its answer was lost: a request is known by its id and the moment it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeAlias

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    Select,
    Table,
    Text,
    bindparam,
    case,
    func,
    select,
    text,
)
from sqlalchemy import delete as delete_from

from corral.contract.receipts import CLIENT_GONE
from corral.store.engine.schema import insert_whole, metadata, records
from corral.store.engine.statements import Row
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, among
from corral.store.tables import api_keys, nodes


class StoredReceipt(msgspec.Struct, frozen=True):
    at: datetime
    id: str
    key_id: str
    model: str
    path: str
    served_by: str
    node_id: str
    process_id: str
    revision: str
    digest: str
    ending: str
    status: int
    replica: int
    queue_us: int
    load_us: int
    first_byte_us: int
    total_us: int
    prompt_tokens: int
    completion_tokens: int
    tries: int
    resumed: int
    estimated: bool
    streamed: bool
    error: str
    error_text: str


class KeyUsage(msgspec.Struct, frozen=True):
    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int


# A receipt as `insert` takes it: the values of `StoredReceipt` in its order, `at` in microseconds since 1970. A bare
# tuple: thousands come in a second, and a record made, taken apart and checked costs more than storing it.
ReceiptRow: TypeAlias = Row


class NamedReceipt(msgspec.Struct, frozen=True):
    """With the names people know: empty where it is gone by now."""

    receipt: StoredReceipt
    node: str
    key: str


class ServedRequest(msgspec.Struct, frozen=True):
    """What comparing two builds takes of a receipt."""

    at: datetime
    node_id: str
    model: str
    served_by: str
    status: int
    ending: str
    queue_us: int
    load_us: int
    first_byte_us: int
    total_us: int
    completion_tokens: int
    streamed: bool


table = Table(
    "receipts",
    metadata,
    Column("at", Instant, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("key_id", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("served_by", Text, nullable=False),
    Column("node_id", Text, nullable=False),
    Column("process_id", Text, nullable=False),
    Column("revision", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("ending", Text, nullable=False),
    Column("status", BigInteger, nullable=False),
    Column("replica", BigInteger, nullable=False),
    Column("queue_us", BigInteger, nullable=False),
    Column("load_us", BigInteger, nullable=False),
    Column("first_byte_us", BigInteger, nullable=False),
    Column("total_us", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("tries", BigInteger, nullable=False),
    Column("resumed", BigInteger, nullable=False, server_default=text("0")),
    Column("estimated", Boolean, nullable=False),
    Column("streamed", Boolean, nullable=False),
    # For releases that do not know the columns yet.
    *(Column(name, Text, nullable=False, server_default=text("''")) for name in ("error", "error_text")),
    Index("ix_receipts_model_at", "model", "at"),
    Index("ix_receipts_key_id_at", "key_id", "at"),
)

_INSERT = insert_whole(table).on_conflict_do_nothing(index_elements=list(table.primary_key.columns))
_NEWEST = (
    select(table, nodes.table.c.name, api_keys.table.c.name)
    .select_from(
        table.outerjoin(nodes.table, nodes.table.c.id == table.c.node_id).outerjoin(
            api_keys.table, api_keys.table.c.id == table.c.key_id
        )
    )
    .order_by(table.c.at.desc(), table.c.id)
    .limit(bindparam("limit", type_=Integer))
)


def _failed(rows: Any) -> Any:
    """`contract.receipts.is_failure` in SQL."""
    refused = (rows.c.status >= 400) & (rows.c.status != CLIENT_GONE)
    return refused | (rows.c.ending == "upstream_broke")


_FILTERS: dict[str, Any] = {
    "model": (table.c.model == bindparam("model")) | (table.c.served_by == bindparam("model")),
    "key": (table.c.key_id == bindparam("key")) | (api_keys.table.c.name == bindparam("key")),
    "key_id": table.c.key_id == bindparam("key_id"),
    "id": table.c.id == bindparam("id"),
    "until": table.c.at < bindparam("until", type_=Instant()),
    "node": (table.c.node_id == bindparam("node")) | (nodes.table.c.name == bindparam("node")),
    "failed": _failed(table),
    "status": table.c.status >= bindparam("status"),
    "status_end": table.c.status < bindparam("status_end"),
    "since": table.c.at >= bindparam("since", type_=Instant()),
    "before": (table.c.at < bindparam("before", type_=Instant()))
    | ((table.c.at == bindparam("before", type_=Instant())) & (table.c.id > bindparam("before_id"))),
}
_RECENT = (
    select(table.c.key_id, table.c.status, table.c.ending, table.c.prompt_tokens, table.c.completion_tokens)
    .where(table.c.at >= bindparam("since", type_=Instant()))
    .order_by(table.c.at.desc())
    .limit(bindparam("limit", type_=Integer))
    .subquery()
)
_BY_KEY = select(
    _RECENT.c.key_id,
    func.count(),
    func.sum(case((_failed(_RECENT), 1), else_=0)),
    func.sum(_RECENT.c.prompt_tokens),
    func.sum(_RECENT.c.completion_tokens),
).group_by(_RECENT.c.key_id)


_SERVED = (
    select(*(table.c[name] for name in ServedRequest.__struct_fields__))
    .where(table.c.at >= bindparam("since", type_=Instant()))
    .order_by(table.c.at.desc())
    .limit(bindparam("limit", type_=Integer))
)
_SERVED_BY_PROCESSES = _SERVED.where(among(table.c.process_id, "ids"))
_SERVED_BY_BUILDS = _SERVED.where(among(table.c.digest, "ids"))
_SERVED_BY_NODES = _SERVED.where(among(table.c.node_id, "ids"))
_SERVED_BY_REVISION = _SERVED.where(
    table.c.revision == bindparam("revision"),
    (table.c.model == bindparam("model")) | (table.c.served_by == bindparam("model")),
)
_PRUNE = delete_from(table).where(table.c.at < bindparam("moment", type_=Instant()))
_FIELDS = len(StoredReceipt.__struct_fields__)


async def insert(tx: Transaction, rows: Sequence[ReceiptRow]) -> None:
    """Those that are here already stay as they are. Texts have no NUL, numbers fit into 63 bits: the caller checks."""
    await tx.execute_rows(_INSERT, rows)


async def list_(tx: Transaction, *, limit: int, failed: bool = False, **wanted: Any) -> list[NamedReceipt]:
    """The newest first. `wanted`: model, key and node (by id or name), status (those before status_end), since, before
    with before_id."""
    given = {name: value for name, value in wanted.items() if value is not None}
    statement: Select[Any] = _NEWEST
    for name in (*(["failed"] if failed else []), *(name for name in _FILTERS if name in given)):
        statement = statement.where(_FILTERS[name])
    rows = await tx.fetch_all(statement, {"limit": limit, **given})
    return [
        NamedReceipt(receipt=StoredReceipt(*row[:_FIELDS]), node=row[_FIELDS] or "", key=row[_FIELDS + 1] or "")
        for row in rows
    ]


async def usage_by_key(tx: Transaction, since: datetime, *, limit: int) -> dict[str, KeyUsage]:
    """By the id of the key, of at most the newest `limit` requests: a busy fleet has millions a day."""
    rows = await tx.fetch_all(_BY_KEY, {"since": since, "limit": limit})
    return {row[0]: KeyUsage(int(row[1]), int(row[2]), int(row[3]), int(row[4])) for row in rows}


async def list_served_by_processes(
    tx: Transaction, process_ids: Sequence[str], *, since: datetime, limit: int
) -> list[ServedRequest]:
    """The newest first."""
    wanted = {"ids": process_ids, "since": since, "limit": limit}
    return records(ServedRequest, await tx.fetch_all(_SERVED_BY_PROCESSES, wanted))


async def list_served_by_builds(
    tx: Transaction, digests: Sequence[str], *, since: datetime, limit: int
) -> list[ServedRequest]:
    """By processes of these builds of a backend; the newest first."""
    wanted = {"ids": digests, "since": since, "limit": limit}
    return records(ServedRequest, await tx.fetch_all(_SERVED_BY_BUILDS, wanted))


async def list_served_by_nodes(
    tx: Transaction, node_ids: Sequence[str], *, since: datetime, limit: int
) -> list[ServedRequest]:
    """By processes on these nodes; the newest first."""
    wanted = {"ids": node_ids, "since": since, "limit": limit}
    return records(ServedRequest, await tx.fetch_all(_SERVED_BY_NODES, wanted))


async def list_served_by_revision(
    tx: Transaction, model: str, revision: str, *, since: datetime, limit: int
) -> list[ServedRequest]:
    """By processes of this revision of the model; the newest first."""
    wanted = {"model": model, "revision": revision, "since": since, "limit": limit}
    return records(ServedRequest, await tx.fetch_all(_SERVED_BY_REVISION, wanted))


async def prune(tx: Transaction, before: datetime) -> int:
    return (await tx.execute(_PRUNE, {"moment": before})).rowcount
