"""Operations: requests of users, from acceptance to the end. The state of an operation follows from the rows of its
nodes (`operation_nodes`, `controller/operations/state.py`); this table has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from sqlalchemy import BigInteger, Boolean, Column, Integer, Table, Text, bindparam, select, update
from sqlalchemy import delete as delete_from

from corral.kit.errors import NotFound
from corral.store.engine.schema import columns_of, insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json, among
from corral.store.records import NO_SOAK, BackendRequest, RolloutSettings, UploadRequest


class StoredRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request whole, so that it can be made again; of an upload, only its sender can."""

    backend: BackendRequest = msgspec.field(name="asked")
    force: bool = False
    max_parallel: str = ""
    rollout: RolloutSettings = NO_SOAK
    release: int = 0  # of an upgrade of Corral: the counter of the release
    upload: UploadRequest | None = None


class Operation(msgspec.Struct, frozen=True):
    id: str
    kind: str  # install, upgrade, delete, rollback; fetch, stage, upload; corral-upgrade
    backend: str  # of a fetch: the model; of an upload: the name of the file
    scope_kind: str  # all, selector, node; controller
    scope_value: str
    generation: int  # of its rule; 0: it has none
    created_at: datetime
    request: StoredRequest
    created_by: str = ""  # the API key; empty = Corral itself
    cancelled_at: datetime | None = None
    withdrawn_at: datetime | None = None
    finished_at: datetime | None = None  # every row has ended; a node that joins later may open it again
    outcome: str = ""  # completed, failed, cancelled, reverted; once finished or dismissed
    error: str = ""
    dismissed: bool = False  # hidden by a user; the operation itself continues
    in_history: bool = True


table = Table(
    "operations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("backend", Text, nullable=False),
    Column("scope_kind", Text, nullable=False),
    Column("scope_value", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("created_at", Instant, nullable=False),
    Column("request", Json[StoredRequest](StoredRequest), nullable=False),
    Column("created_by", Text, nullable=False),
    Column("cancelled_at", Instant),
    Column("withdrawn_at", Instant),
    Column("finished_at", Instant, index=True),
    Column("outcome", Text, nullable=False),
    Column("error", Text, nullable=False),
    Column("dismissed", Boolean, nullable=False),
    Column("in_history", Boolean, nullable=False),
)

_INSERT = insert_whole(table)
_BY_ID = select(table).where(table.c.id == bindparam("id"))
_NEWEST = select(table).order_by(table.c.created_at.desc(), table.c.id)
_PAGE = _NEWEST.limit(bindparam("limit", type_=Integer))
_AFTER = _PAGE.where(
    (table.c.created_at < bindparam("created_at", type_=Instant()))
    | ((table.c.created_at == bindparam("created_at", type_=Instant())) & (table.c.id > bindparam("id")))
)
_OPEN = _NEWEST.where(table.c.finished_at.is_(None))
_OPEN_OF_KIND = _OPEN.where(table.c.kind == bindparam("kind"))
_LAST = _NEWEST.where(table.c.kind == bindparam("kind"), table.c.backend == bindparam("backend")).limit(1)
_SHOWN = _NEWEST.where(
    table.c.dismissed.is_(False),
    table.c.finished_at.is_(None) | (table.c.finished_at > bindparam("since", type_=Instant())),
)
_SHOWN_PAGE = _SHOWN.limit(bindparam("limit", type_=Integer))
_STOPPING = select(table.c.id).where(table.c.cancelled_at.is_not(None))
_STOPPING_OF = _STOPPING.where(among(table.c.id, "ids"))
_OF = select(table).where(among(table.c.id, "ids")).order_by(table.c.id)
_LOCK_OF = _OF.with_for_update(key_share=True)
_HISTORY = (
    select(table)
    .where(table.c.outcome != "", table.c.in_history.is_(True))
    .order_by(table.c.finished_at.desc(), table.c.created_at.desc(), table.c.id)
    .limit(bindparam("limit", type_=Integer))
)
_CLEAR_HISTORY = update(table).where(table.c.finished_at.is_not(None)).values(in_history=False)
_PRUNE = delete_from(table).where(table.c.finished_at < bindparam("before", type_=Instant()))


async def insert(tx: Transaction, operation: Operation) -> None:
    await tx.execute(_INSERT, columns_of(operation))


async def get(tx: Transaction, operation_id: str) -> Operation:
    operation = await find(tx, operation_id)
    if operation is None:
        raise NotFound(f"there is no operation {operation_id}")
    return operation


async def find(tx: Transaction, operation_id: str) -> Operation | None:
    """In a write transaction it is locked until its end, and with it, by agreement, its node rows."""
    return record(Operation, await tx.lock_one(_BY_ID, {"id": operation_id}))


async def list_for(tx: Transaction, ids: Sequence[str]) -> list[Operation]:
    """In the order of their ids; in a write transaction locked until its end, as with `find`."""
    return records(Operation, await tx.fetch_all(_LOCK_OF if tx.writable else _OF, {"ids": ids}))


async def list_open(tx: Transaction, *, kind: str = "") -> list[Operation]:
    """Those that have not ended, of one kind or of all; the newest first."""
    if kind:
        return records(Operation, await tx.fetch_all(_OPEN_OF_KIND, {"kind": kind}))
    return records(Operation, await tx.fetch_all(_OPEN))


async def find_last(tx: Transaction, *, kind: str, backend: str) -> Operation | None:
    """The newest of its kind about this backend, or model, ended or not."""
    return record(Operation, await tx.fetch_one(_LAST, {"kind": kind, "backend": backend}))


async def list_shown(tx: Transaction, *, finished_since: datetime, limit: int = 0) -> list[Operation]:
    """Those people watch: not dismissed, and not ended or only just. The newest first; 0 = all."""
    if limit:
        return records(Operation, await tx.fetch_all(_SHOWN_PAGE, {"since": finished_since, "limit": limit}))
    return records(Operation, await tx.fetch_all(_SHOWN, {"since": finished_since}))


async def list_(tx: Transaction, *, limit: int, after: Operation | None = None) -> list[Operation]:
    """All, the newest first; `after`: those that follow it in this order."""
    if after is None:
        return records(Operation, await tx.fetch_all(_PAGE, {"limit": limit}))
    place = {"created_at": after.created_at, "id": after.id, "limit": limit}
    return records(Operation, await tx.fetch_all(_AFTER, place))


async def list_cancelled(tx: Transaction, ids: Sequence[str]) -> list[str]:
    """Those among them whose bytes are to stop."""
    return [row[0] for row in await tx.fetch_all(_STOPPING_OF, {"ids": ids})]


async def list_history(tx: Transaction, *, limit: int = 50) -> list[Operation]:
    """Those that ended or were given up, the last first."""
    return records(Operation, await tx.fetch_all(_HISTORY, {"limit": limit}))


async def replace(tx: Transaction, operation: Operation) -> None:
    """Write the whole row. The caller has read it in the same transaction."""
    changes = columns_of(operation)
    await tx.execute(update(table).where(table.c.id == changes.pop("id")).values(changes))


async def clear_history(tx: Transaction) -> int:
    """Ended ones are shown no more. They stay on file: a rule that still holds belongs to each of them."""
    return (await tx.execute(_CLEAR_HISTORY)).rowcount


async def prune(tx: Transaction, before: datetime) -> int:
    """Forget those that ended before, with their rows. Rules that still hold go on without."""
    return (await tx.execute(_PRUNE, {"before": before})).rowcount
