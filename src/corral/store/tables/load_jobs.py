"""Load jobs: models that were requested and that no replica serves yet. One per model; the row is the whole state, so
any controller that holds the lease continues it (docs/reference/wire/routing.md#load-job).

Success deletes the row. A failed job stays for a while: waiting requests get the cause, and the next attempt waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import BigInteger, Column, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.contract.loads import LoadState
from corral.store.engine import claims
from corral.store.engine.schema import NameText, columns_of, metadata, record, records, upsert_whole
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Choice, Instant, Json, among
from corral.store.records import LoadJob

table = Table(
    "load_jobs",
    metadata,
    Column("model", NameText, primary_key=True),
    Column("state", Choice(LoadState), nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("updated_at", Instant, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("revision", Text, nullable=False),
    Column("node_id", Text, nullable=False),
    Column("node_name", NameText, nullable=False),
    Column("message", Text, nullable=False),
    Column("bytes_sent", BigInteger, nullable=False),
    Column("total_bytes", BigInteger, nullable=False),
    Column("file_index", BigInteger, nullable=False),
    Column("total_files", BigInteger, nullable=False),
    Column("moving_since", Instant),
    Column("error", Text, nullable=False),
    Column("failures", BigInteger, nullable=False),
    Column("failed_on", Json[dict[str, str]](dict[str, str]), nullable=False),
    Column("failed_at", Instant),
    Column("retry_at", Instant),
    Column("operation_id", Text, nullable=False),
)

_PUT = upsert_whole(table)
_BY_MODEL = select(table).where(table.c.model == bindparam("model"))
_ALL = select(table).order_by(table.c.model)
_LOCK_ALL = _ALL.with_for_update(key_share=True)
_DELETE = delete_from(table).where(among(table.c.model, "models"))


async def claim(tx: Transaction, job: LoadJob) -> bool:
    """False: there is one for this model already."""
    return await claims.claim_insert(tx, table, columns_of(job))


async def find(tx: Transaction, model: str) -> LoadJob | None:
    """In a write transaction it is locked until its end."""
    return record(LoadJob, await tx.lock_one(_BY_MODEL, {"model": model}))


async def list_(tx: Transaction) -> list[LoadJob]:
    """In a write transaction the rows are locked until its end."""
    return records(LoadJob, await tx.fetch_all(_LOCK_ALL if tx.writable else _ALL))


async def put(tx: Transaction, jobs: Iterable[LoadJob]) -> None:
    await tx.execute_many(_PUT, [columns_of(job) for job in jobs])


async def delete(tx: Transaction, models: Sequence[str]) -> None:
    if models:
        await tx.execute(_DELETE, {"models": models})
