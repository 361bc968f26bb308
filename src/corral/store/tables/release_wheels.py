"""The wheels of releases. They are in the database, because every controller serves them, also after another one has
ended; each has a few megabytes."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Column, LargeBinary, Table, Text, bindparam, select
from sqlalchemy import delete as delete_from

from corral.store.engine.schema import insert_whole, metadata
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import Instant, among, now

table = Table(
    "release_wheels",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("content", LargeBinary, nullable=False),
    Column("created_at", Instant, nullable=False),
)

_PUT = insert_whole(table).values(created_at=now()).on_conflict_do_nothing(index_elements=[table.c.sha256])
_CONTENT = select(table.c.content).where(table.c.sha256 == bindparam("sha256"))
_NAMES = select(table.c.sha256)
_DELETE = delete_from(table).where(among(table.c.sha256, "names"))


async def put(tx: Transaction, sha256: str, content: bytes) -> None:
    await tx.execute(_PUT, {"sha256": sha256, "content": content})


async def find(tx: Transaction, sha256: str) -> bytes | None:
    row = await tx.fetch_one(_CONTENT, {"sha256": sha256})
    return bytes(row[0]) if row is not None else None


async def list_names(tx: Transaction) -> frozenset[str]:
    return frozenset(str(row[0]) for row in await tx.fetch_all(_NAMES))


async def keep_only(tx: Transaction, names: Collection[str]) -> None:
    gone = sorted(await list_names(tx) - frozenset(names))
    if gone:
        await tx.execute(_DELETE, {"names": gone})
