"""Rows of secrets that people create and revoke: API keys and join tokens. Only the hash of a secret is stored."""

from __future__ import annotations

from typing import Generic, TypeVar

from sqlalchemy import Table, bindparam, select, update

from corral.kit.errors import NotFound
from corral.store.engine.schema import columns_of, insert_whole, record, records
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import now

T = TypeVar("T")


class SecretRows(Generic[T]):
    def __init__(self, table: Table, kind: type[T], noun: str) -> None:
        """The table has the columns `id`, `secret_hash`, `created_at` and `revoked_at`."""
        self._kind = kind
        self._noun = noun
        self._insert = insert_whole(table)
        self._by_id = select(table).where(table.c.id == bindparam("id"))
        self._by_hash = select(table).where(table.c.secret_hash == bindparam("secret_hash"))
        self._all = select(table).order_by(table.c.created_at, table.c.id)
        not_revoked = table.c.revoked_at.is_(None)
        self._revoke = update(table).where(table.c.id == bindparam("row_id"), not_revoked).values(revoked_at=now())

    async def insert(self, tx: Transaction, row: T) -> None:
        """Raises `Conflict` when this very secret is there already."""
        await tx.execute(self._insert, columns_of(row))

    async def get(self, tx: Transaction, row_id: str) -> T:
        row = await self.find(tx, row_id)
        if row is None:
            raise NotFound(f"there is no {self._noun} {row_id}")
        return row

    async def find(self, tx: Transaction, row_id: str) -> T | None:
        return record(self._kind, await tx.lock_one(self._by_id, {"id": row_id}))

    async def find_by_hash(self, tx: Transaction, secret_hash: str) -> T | None:
        return record(self._kind, await tx.lock_one(self._by_hash, {"secret_hash": secret_hash}))

    async def list_(self, tx: Transaction) -> list[T]:
        """All rows, also expired and revoked ones, the oldest first."""
        return records(self._kind, await tx.fetch_all(self._all))

    async def revoke(self, tx: Transaction, row_id: str) -> bool:
        """False when it was revoked already, or is unknown."""
        return (await tx.execute(self._revoke, {"row_id": row_id})).rowcount == 1
