"""Leases: which controller runs a loop that must run once (docs/explanation/design.md#leases). They use the database's
clock only.

The epoch rises each time a lease changes hands. A holder that was frozen for too long notices at its next write: the
write starts with `require`, which compares the epoch and keeps the lease from changing hands until the commit.
"""

from __future__ import annotations

from datetime import datetime

import msgspec
from sqlalchemy import BigInteger, Column, Table, Text, bindparam, case, select, update

from corral.kit.errors import Conflict
from corral.store.engine.schema import insert_whole, metadata, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, from_us, now, now_plus, span_us

_NOBODY = ""
_FAR_US = 600_000_000  # and at least ten times the claimed TTL


class Lease(msgspec.Struct, frozen=True):
    name: str
    holder: str
    epoch: int
    expires_at: datetime


table = Table(
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", Instant, nullable=False),
)

_INSERT = insert_whole(table).values(epoch=1, expires_at=now_plus("ttl_us"))
_CLAIM = _INSERT.on_conflict_do_update(
    index_elements=[table.c.name],
    set_={
        "epoch": case((table.c.holder == _INSERT.excluded.holder, table.c.epoch), else_=table.c.epoch + 1),
        "holder": _INSERT.excluded.holder,
        "expires_at": _INSERT.excluded.expires_at,
    },
    where=(table.c.holder == _INSERT.excluded.holder)
    | (table.c.expires_at <= now())
    | (table.c.expires_at > now_plus("far_us")),  # no claim lasts so long: the clock was set back since
).returning(*table.columns)
_BY_NAME = select(table).where(table.c.name == bindparam("name"))
_ALL = select(table).order_by(table.c.name)
# A shared row lock: the lease cannot change hands during such a transaction; several may run concurrently.
_STILL_HELD = (
    select(table.c.epoch)
    .where(
        table.c.name == bindparam("name"), table.c.holder == bindparam("holder"), table.c.epoch == bindparam("epoch")
    )
    .with_for_update(read=True)
)
_RELEASE = (
    update(table)
    .where(
        table.c.name == bindparam("lease_name"),
        table.c.holder == bindparam("lease_holder"),
        table.c.epoch == bindparam("lease_epoch"),
    )
    .values(holder=_NOBODY, expires_at=from_us(0))
)


async def claim_lease(tx: Transaction, name: str, holder: str, ttl_s: float) -> Lease | None:
    """Take or renew the lease; None while another holder has it. A renewal keeps the epoch, a change of holder raises
    it.

    `holder` must be new for each start of a process: two processes with one name would both hold the lease.
    """
    ttl_us = span_us(ttl_s)
    wanted = {"name": name, "holder": holder, "ttl_us": ttl_us, "far_us": max(_FAR_US, 10 * ttl_us)}
    return record(Lease, await tx.fetch_one(_CLAIM, wanted))


async def find(tx: Transaction, name: str) -> Lease | None:
    """The lease with its present or last holder."""
    return record(Lease, await tx.fetch_one(_BY_NAME, {"name": name}))


async def list_(tx: Transaction) -> list[Lease]:
    return records(Lease, await tx.fetch_all(_ALL))


async def release(tx: Transaction, lease: Lease) -> bool:
    """Release the lease at once. False when another holder has taken it."""
    names = {"lease_name": lease.name, "lease_holder": lease.holder, "lease_epoch": lease.epoch}
    return (await tx.execute(_RELEASE, names)).rowcount == 1


async def still_holds(tx: Transaction, lease: Lease) -> bool:
    """Whether no other holder has taken the lease; in a write transaction also that none can before its end.

    An expired lease that no other holder took still counts: only the epoch decides.
    """
    names = {"name": lease.name, "holder": lease.holder, "epoch": lease.epoch}
    if tx.writable:
        return await tx.fetch_one(_STILL_HELD, names) is not None
    found = await find(tx, lease.name)
    return found is not None and (found.holder, found.epoch) == (lease.holder, lease.epoch)


async def require(tx: Transaction, lease: Lease) -> None:
    """The first statement of a write transaction under a lease. Raises `Conflict` when the lease is lost."""
    if not await still_holds(tx, lease):
        raise Conflict(f"the lease {lease.name!r} has passed to another controller")
