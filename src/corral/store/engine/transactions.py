"""The database as other packages see it: a `Store` that opens transactions.

    async with store.write() as tx:
        node = await nodes.get(tx, node_id)
        await nodes.update(tx, node.id, {"status": "healthy"}, expected=node.row_version)
        await revisions.bump(tx, "nodes")

A read transaction sees one snapshot of the whole database. A write transaction is committed at the end of the block and
rolled back when an exception (or a cancellation) leaves it. SQLite runs one writer at a time. PostgreSQL runs writers
concurrently: each statement sees what is committed by then, and only rows that were read with `lock_one` (the `get` and
`find` of every table) or written stay unchanged until the end of the transaction. Everything else may be out of date,
so claim instead of assuming. A row that does not exist cannot be locked: claim it (`claims.claim_insert`).

One transaction belongs to one task, and never waits for the network.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy import Select, select

from corral.store.engine.statements import Compiler, Parameters, Row, Statement
from corral.store.engine.types import from_us, now

T = TypeVar("T")

_NOW = select(now())
_ONE = "SELECT 1"


@dataclass(frozen=True)
class StoreOptions:
    """How long the store waits for a resource, and how many connections it opens."""

    turn_wait_s: float = 10.0  # until a connection of this process becomes free
    readers: int = 4  # SQLite: connections beside the one writer
    busy_timeout_s: float = 5.0  # SQLite: for the write lock of this process and of other processes, together
    pool_size: int = 10  # PostgreSQL: connections of this process
    connect_timeout_s: float = 5.0  # PostgreSQL
    statement_timeout_s: float = 10.0  # PostgreSQL: one statement, waiting for row locks included
    lock_timeout_s: float = (
        5.0  # PostgreSQL: for a row that another transaction has locked; a wait for a connection counts
    )
    # PostgreSQL: a controller that is frozen inside a transaction must not lock its rows for ever.
    idle_in_transaction_s: float = 10.0
    migration_wait_s: float = 60.0  # for another process that is migrating


class Session(Protocol):
    """One driver connection inside one transaction. Raises only errors of `kit.errors`."""

    async def run(self, sql: str, arguments: Sequence[Any]) -> int:
        """Returns the number of changed rows."""

    async def run_many(self, sql: str, arguments: Sequence[Sequence[Any]]) -> None: ...

    async def fetch(self, sql: str, arguments: Sequence[Any]) -> Sequence[Sequence[Any]]: ...

    def own_clock_us(self) -> int | None:
        """The database's clock where it is this process's own; None where a query is needed."""


class Database(Protocol):
    """One kind of database: `sqlite.py`, `postgres.py`."""

    kind: str
    compiler: Compiler

    def transaction(self, *, write: bool) -> AbstractAsyncContextManager[Session]:
        """Commits when the block ends, rolls back when it raises."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Result:
    rowcount: int


class Transaction:
    def __init__(self, session: Session, compiler: Compiler, *, writable: bool) -> None:
        self._session: Session | None = session
        self._compiler = compiler
        self._failed: BaseException | None = None
        self.writable = writable

    @property
    def kind(self) -> str:
        """`sqlite` or `postgresql`, for the rare statement that differs."""
        return self._compiler.dialect.name

    async def execute(self, statement: Statement, parameters: Parameters | None = None) -> Result:
        sql, arguments = self._compiler.plan(statement).bind(parameters or {})
        return Result(await self._run(self._writing().run(sql, arguments)))

    async def execute_many(self, statement: Statement, rows: Sequence[Parameters]) -> None:
        """Execute the statement for every row, in one call. Does nothing without rows."""
        if not rows:
            return
        sql, arguments = self._compiler.plan(statement).bind_many(rows)
        await self._run(self._writing().run_many(sql, arguments))

    async def execute_rows(self, statement: Statement, rows: Sequence[Row]) -> None:
        """`execute_many` for prepared rows: the values in the order of the statement's parameters, as the drivers
        take them. No value is checked: the caller makes sure that both databases can store it."""
        if rows:
            await self._run(self._writing().run_many(self._compiler.plan(statement).text, rows))

    async def fetch_one(self, statement: Statement, parameters: Parameters | None = None) -> Row | None:
        """The first row, or None."""
        rows = await self.fetch_all(statement, parameters)
        return rows[0] if rows else None

    async def fetch_all(self, statement: Statement, parameters: Parameters | None = None) -> list[Row]:
        """Also for INSERT, UPDATE and DELETE with RETURNING."""
        plan = self._compiler.plan(statement)
        sql, arguments = plan.bind(parameters or {})
        session = self._writing() if plan.changes else self._open()
        return [plan.read(row) for row in await self._run(session.fetch(sql, arguments))]

    async def lock_one(self, statement: Select[Any], parameters: Parameters | None = None) -> Row | None:
        """Like `fetch_one`; in a write transaction the row is locked until the transaction ends."""
        return await self.fetch_one(_with_row_lock(statement) if self.writable else statement, parameters)

    async def now(self) -> datetime:
        """The database's clock: the only clock that all controllers share."""
        own_us = self._open().own_clock_us()
        if own_us is not None:
            return from_us(own_us)
        row = await self.fetch_one(_NOW)
        assert row is not None
        return cast(datetime, row[0])

    def end(self) -> None:
        self._session = None

    def refuse_if_failed(self) -> None:
        """PostgreSQL commits nothing after a failed statement, and reports no error; SQLite would commit the rest."""
        if self._failed is not None:
            raise RuntimeError("a statement of this transaction failed, so it cannot be committed") from self._failed

    async def _run(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except BaseException as error:
            self._failed = error
            raise

    def _open(self) -> Session:
        if self._session is None:
            raise RuntimeError("this transaction has ended; use it inside its block only")
        self.refuse_if_failed()
        return self._session

    def _writing(self) -> Session:
        if not self.writable:
            raise RuntimeError("this transaction only reads; take store.write() to change something")
        return self._open()


@lru_cache(maxsize=512)
def _with_row_lock(statement: Select[Any]) -> Select[Any]:
    """The statement with FOR NO KEY UPDATE, which SQLite neither has nor needs; cached, since statements are constants.
    (Other transactions may still add rows that refer to the locked row, such as labels.)"""
    return statement.with_for_update(key_share=True)


class Store:
    """Made by `open_store`. Calls raise `Unavailable` while the database cannot be reached, and work again
    afterwards."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def kind(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._database.kind

    def read(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction(write=False)

    def write(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transaction(write=True)

    async def ping(self) -> None:
        """Return when the database answers, else raise `Unavailable`."""
        async with self.read() as tx:
            await tx.fetch_one(_ONE)

    @asynccontextmanager
    async def _transaction(self, *, write: bool) -> AsyncIterator[Transaction]:
        async with self._database.transaction(write=write) as session:
            tx = Transaction(session, self._database.compiler, writable=write)
            try:
                yield tx
                tx.refuse_if_failed()
            finally:
                tx.end()
