"""A counter per kind of thing, raised by every transaction that changes one: how others notice.

`bump` is the *last* statement of a changing transaction: on PostgreSQL it holds the counter's row until the commit, so
whatever comes after it makes all other changers wait.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Table, Text, bindparam, select

from corral.store.engine.schema import insert_whole, metadata
from corral.store.engine.transactions import Transaction

table = Table(
    "revisions",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

_BUMP = (
    insert_whole(table)
    .values(value=1)
    .on_conflict_do_update(index_elements=[table.c.kind], set_={"value": table.c.value + 1})
    .returning(table.c.value)
)
_ALL = select(table)
_ONE = select(table).where(table.c.kind == bindparam("kind"))


async def bump(tx: Transaction, kind: str) -> int:
    """The counter's new value."""
    row = await tx.fetch_one(_BUMP, {"kind": kind})
    assert row is not None
    return int(row[0])


async def hold(tx: Transaction, kind: str) -> None:
    """Lock the counter until the commit. All other transactions that change this kind have committed or wait, so the
    rows that are read from here on are consistent. On PostgreSQL each statement sees the latest commits: without the
    lock a transaction could read the rows of an operation and miss the rule that was written with them."""
    if await tx.lock_one(_ONE, {"kind": kind}) is None:
        await bump(tx, kind)  # the first ever


async def read_all(tx: Transaction) -> dict[str, int]:
    return {kind: value for kind, value in await tx.fetch_all(_ALL)}
