"""SQLite without threads: every statement is executed where it is asked for. For tests and the simulation.

The same file, the same statements and the same transactions as in `sqlite.py`: writers stand in line, readers see one
moment. But nothing happens by itself and no clock is looked at: time comes from whoever opens it, and so does what
happens between two steps (another task's turn, an outage, the end of the process). So a run can be repeated exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy.dialects.sqlite import pysqlite

from corral.store.engine.sqlite import connect, translated
from corral.store.engine.statements import Compiler
from corral.store.engine.transactions import Store
from corral.store.engine.types import SQLITE_NOW


class Step(StrEnum):
    """Where something may come between."""

    BEGIN = "begin"  # before anything is read or written
    STATEMENT = "statement"  # inside a transaction
    COMMIT = "commit"  # before the commit
    COMMITTED = "committed"  # after it, before the caller hears


# Awaited at each step. What it raises comes out of the transaction there; a process that ends never comes back from it.
Between = Callable[[Step], Awaitable[None]]
# Told of every commit, with the tables that were written.
Committed = Callable[[frozenset[str]], None]

_COMPILER = Compiler(pysqlite.dialect())  # knows the statements of all runs


async def nothing_between(_step: Step) -> None:
    return None


class InlineFile:
    """One database that several processes use at once, or what stands for processes."""

    def __init__(self, path: Path, *, now_us: Callable[[], int], committed: Committed | None = None) -> None:
        """The file must have its schema. `now_us` is the database's clock."""
        self.path = path
        self._now_us = now_us
        self._committed = committed
        self._turn = asyncio.Lock()
        self._writer = self._connect()
        self._readers: list[sqlite3.Connection] = []
        self._all = [self._writer]

    def store(self, between: Between = nothing_between) -> Store:
        """As one process sees it."""
        return Store(_InlineDatabase(self, between))

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[sqlite3.Connection]:
        async with self._turn:
            yield self._writer

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        connection = self._readers.pop() if self._readers else self._connect(query_only=True)
        try:
            yield connection
        finally:
            self._readers.append(connection)

    def has_committed(self, tables: frozenset[str]) -> None:
        if self._committed is not None:
            self._committed(tables)

    def _connect(self, *, query_only: bool = False) -> sqlite3.Connection:
        connection = connect(self.path, busy_timeout_s=0)
        connection.execute("PRAGMA synchronous=OFF")  # nobody will pull this plug
        connection.create_function(SQLITE_NOW, 0, self._now_us)
        if query_only:
            connection.execute("PRAGMA query_only=ON")
            self._all.append(connection)
        return connection


class _InlineDatabase:
    kind = "sqlite"

    def __init__(self, file: InlineFile, between: Between) -> None:
        self.compiler = _COMPILER
        self._file = file
        self._between = between

    @asynccontextmanager
    async def transaction(self, *, write: bool) -> AsyncIterator[_InlineSession]:
        await self._between(Step.BEGIN)
        if not write:
            with self._file.reading() as connection:
                session = _InlineSession(self._file.path, connection, self._between)
                try:
                    yield session
                finally:
                    connection.rollback()
            return
        async with self._file.writing() as connection:
            session = _InlineSession(self._file.path, connection, self._between)
            session.do("BEGIN IMMEDIATE", ())
            try:
                yield session
                await self._between(Step.COMMIT)
                connection.commit()
            finally:
                connection.rollback()  # nothing, after a commit
            self._file.has_committed(frozenset(session.written))
        await self._between(Step.COMMITTED)

    async def close(self) -> None:
        """The file is its opener's."""


class _InlineSession:
    def __init__(self, path: Path, connection: sqlite3.Connection, between: Between) -> None:
        self._path = path
        self._connection = connection
        self._between = between
        self.written: set[str] = set()

    async def run(self, sql: str, arguments: Sequence[Any]) -> int:
        await self._between(Step.STATEMENT)
        self.written.add(_table_of(sql))
        cursor = self.do(sql, arguments)
        rows = cursor.fetchall()
        return len(rows) or cursor.rowcount

    async def run_many(self, sql: str, arguments: Sequence[Sequence[Any]]) -> None:
        await self._between(Step.STATEMENT)
        self.written.add(_table_of(sql))
        for one in arguments:
            self.do(sql, one)

    async def fetch(self, sql: str, arguments: Sequence[Any]) -> Sequence[Sequence[Any]]:
        await self._between(Step.STATEMENT)
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN")
        if not sql.startswith("SELECT"):
            self.written.add(_table_of(sql))
        return self.do(sql, arguments).fetchall()

    def own_clock_us(self) -> None:
        return None

    def do(self, sql: str, arguments: Sequence[Any]) -> sqlite3.Cursor:
        try:
            return self._connection.execute(sql, arguments)
        except sqlite3.Error as error:
            found = translated(error, self._path)
            if found is error:
                raise
            raise found from error


def _table_of(sql: str) -> str:
    """INSERT INTO x, UPDATE x, DELETE FROM x; as far as anybody need know."""
    words = sql.split(None, 3)
    return words[2 if words[0] in ("INSERT", "DELETE") else 1].strip("(") if len(words) > 1 else ""
