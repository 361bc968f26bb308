"""Inventories: what each node says it has and runs, and which orders it is at or has ended lately.

Without a row a node has never told. What an inventory means is `controller/inventory/installed.py`'s."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec
from sqlalchemy import BigInteger, Column, ForeignKey, Table, Text, and_, bindparam, cast, or_, select, update

from corral.contract.messages.backends import NodeBackend, OrderReport
from corral.contract.messages.replicas import ReplicaProcess
from corral.store.engine.schema import insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, Json, among, now


class Inventory(msgspec.Struct, frozen=True):
    node_id: str
    boot_id: str  # of the worker that told it; empty = it does not say
    seq: int  # rises with each change on the node; 0 = it does not say
    seen_at: datetime  # when it was last written down
    backends: tuple[NodeBackend, ...]
    orders: tuple[OrderReport, ...] = ()
    processes: tuple[ReplicaProcess, ...] = ()
    reported_at: datetime | None = None  # when the worker told its orders, the last time it did
    fingerprint: str = ""  # of all that was told; `put` makes it


class Processes(msgspec.Struct, frozen=True):
    """The part of an inventory that says what runs."""

    node_id: str
    boot_id: str
    processes: tuple[ReplicaProcess, ...]


table = Table(
    "node_backends",
    metadata,
    Column("node_id", Text, ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
    Column("boot_id", Text, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("seen_at", Instant, nullable=False, index=True),
    Column("backends", Json[tuple[NodeBackend, ...]](tuple[NodeBackend, ...]), nullable=False),
    Column("orders", Json[tuple[OrderReport, ...]](tuple[OrderReport, ...]), nullable=False),
    Column(
        "processes",
        Json[tuple[ReplicaProcess, ...]](tuple[ReplicaProcess, ...]),
        nullable=False,
        server_default="[]",  # for releases that do not know the column yet
    ),
    Column("told_at", Instant, key="reported_at"),
    Column("fingerprint", Text, nullable=False),
)

_REPORTED = ("boot_id", "seq", "backends", "orders", "processes")
_INSERT = insert_whole(table).values(seen_at=now())
# The reply to a query reports no orders and therefore no time; it is current.
_NOT_OLDER = or_(
    table.c.reported_at.is_(None),
    _INSERT.excluded.reported_at.is_(None),
    _INSERT.excluded.reported_at >= table.c.reported_at,
)
# A heartbeat that was in transit during a query must not overwrite the reply; nor may a heartbeat of the previous
# worker, which a controller without a database kept, overwrite the report of its successor.
_IS_NEWER = or_(
    and_(
        _INSERT.excluded.boot_id == table.c.boot_id,
        or_(_INSERT.excluded.seq > table.c.seq, and_(_INSERT.excluded.seq.in_((0, table.c.seq)), _NOT_OLDER)),
    ),
    and_(_INSERT.excluded.boot_id != table.c.boot_id, _NOT_OLDER),
)
_NOTHING_SINCE = table.c.seen_at <= bindparam("unless_since", type_=Instant())
_PUT, _PUT_UNLESS_SINCE = (
    _INSERT.on_conflict_do_update(
        index_elements=[table.c.node_id],
        set_={name: _INSERT.excluded[name] for name in (*_REPORTED, "reported_at", "seen_at", "fingerprint")},
        where=where,
    )
    for where in (_IS_NEWER, and_(_IS_NEWER, _NOTHING_SINCE))
)
_BY_NODE = select(table).where(table.c.node_id == bindparam("node_id"))
_ALL = select(table).order_by(table.c.node_id)
_OF = _ALL.where(among(table.c.node_id, "node_ids"))
_BOOTS = select(table.c.node_id, table.c.boot_id).where(among(table.c.node_id, "node_ids"))
_FINGERPRINTS = select(table.c.node_id, table.c.fingerprint).where(
    among(table.c.node_id, "node_ids"), table.c.reported_at.is_not(None)
)
_CONFIRM = (
    update(table)
    .where(table.c.node_id == bindparam("of_node"), table.c.fingerprint == bindparam("of_fingerprint"))
    .values(reported_at=bindparam("at", type_=Instant()))
)
_SET_PROCESSES = (
    update(table)
    .where(table.c.node_id == bindparam("of_node"))
    .values(
        processes=bindparam("run", type_=table.c.processes.type),
        reported_at=now(),
        fingerprint=bindparam("new_fingerprint"),
    )
)
_PROCESSES = (
    select(table.c.node_id, table.c.boot_id, table.c.processes)
    .where(cast(table.c.processes, Text) != "[]")
    .order_by(table.c.node_id)
)
_PROCESSES_OF = _PROCESSES.where(among(table.c.node_id, "node_ids"))
_CHANGED = select(table.c.node_id, table.c.seen_at, table.c.fingerprint).where(
    table.c.seen_at > bindparam("since", type_=Instant())
)


async def put(tx: Transaction, inventory: Inventory) -> bool:
    """The time is the database's. False when a later one is there. Raises `Conflict` when the node was deleted."""
    return (await tx.execute(_PUT, _columns(inventory))).rowcount == 1


async def put_all(tx: Transaction, inventories: Iterable[Inventory], *, unless_since: datetime | None = None) -> None:
    """The same for many, in key order, so that two such transactions cannot deadlock. `unless_since`: one
    that was written after that moment stays."""
    rows = [_columns(row) for row in sorted(inventories, key=lambda row: row.node_id)]
    if unless_since is None:
        await tx.execute_many(_PUT, rows)
    else:
        await tx.execute_many(_PUT_UNLESS_SINCE, [row | {"unless_since": unless_since} for row in rows])


def _columns(inventory: Inventory) -> dict[str, object]:
    columns = {name: getattr(inventory, name) for name in ("node_id", "reported_at", *_REPORTED)}
    return columns | {"fingerprint": fingerprint_of(inventory)}


def fingerprint_of(inventory: Inventory) -> str:
    """Equal for equal reports: most heartbeats report no change."""
    reported = tuple(getattr(inventory, name) for name in _REPORTED)
    return hashlib.blake2b(msgspec.msgpack.encode(reported), digest_size=16).hexdigest()


async def confirm(tx: Transaction, inventories: Sequence[Inventory]) -> None:
    """The nodes reported the same again: only `reported_at` changes, and no watcher wakes."""
    rows = [
        {"of_node": row.node_id, "of_fingerprint": fingerprint_of(row), "at": row.reported_at} for row in inventories
    ]
    await tx.execute_many(_CONFIRM, rows)


async def set_processes(tx: Transaction, node_id: str, processes: tuple[ReplicaProcess, ...]) -> bool:
    """Store the processes of a worker that does not report by itself. Its installed backends stay as last reported.
    False while the node has no inventory yet."""
    before = await find(tx, node_id)
    if before is None:
        return False
    fingerprint = fingerprint_of(msgspec.structs.replace(before, processes=processes))
    await tx.execute(_SET_PROCESSES, {"of_node": node_id, "run": processes, "new_fingerprint": fingerprint})
    return True


async def list_fingerprints(tx: Transaction, node_ids: Sequence[str]) -> dict[str, str]:
    """The fingerprints of reported inventories. An inventory from a reply has none: only the node's own report says
    what runs there, and that nothing else does."""
    return {node_id: value for node_id, value in await tx.fetch_all(_FINGERPRINTS, {"node_ids": node_ids})}


async def list_boots(tx: Transaction, node_ids: Sequence[str]) -> dict[str, str]:
    """The boot id of the worker that reported the inventory; nodes without one are absent."""
    return {node_id: boot for node_id, boot in await tx.fetch_all(_BOOTS, {"node_ids": node_ids}) if boot}


async def find(tx: Transaction, node_id: str) -> Inventory | None:
    return record(Inventory, await tx.fetch_one(_BY_NODE, {"node_id": node_id}))


async def list_(tx: Transaction, node_ids: Sequence[str] | None = None) -> list[Inventory]:
    if node_ids is None:
        return records(Inventory, await tx.fetch_all(_ALL))
    return records(Inventory, await tx.fetch_all(_OF, {"node_ids": node_ids}))


async def list_changed(tx: Transaction, since: datetime) -> dict[str, tuple[datetime, str]]:
    """Nodes whose inventory was written after that: when, and its fingerprint."""
    return {
        node_id: (seen_at, fingerprint)
        for node_id, seen_at, fingerprint in await tx.fetch_all(_CHANGED, {"since": since})
    }


async def list_processes(tx: Transaction, node_ids: Sequence[str] | None = None) -> dict[str, Processes]:
    """By node, of these or all: what runs there. Nodes on which nothing does are absent."""
    if node_ids is None:
        rows = await tx.fetch_all(_PROCESSES)
    else:
        rows = await tx.fetch_all(_PROCESSES_OF, {"node_ids": node_ids})
    return {row.node_id: row for row in records(Processes, rows)}
