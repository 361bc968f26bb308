"""SQLite without threads: every statement runs inline, in the calling task. For tests and the simulation.

The same file, statements and transactions as in `sqlite.py`: one writer at a time, readers see one snapshot. But
nothing runs by itself and no clock is read: the opener passes the time, and a hook that runs at each step of a
transaction (another task's turn, an outage, the end of the process). So a run can be repeated exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects.sqlite import pysqlite

from corral.store.engine.sqlite import connect, translated
from corral.store.engine.statements import Compiler
from corral.store.engine.transactions import Store
from corral.store.engine.types import SQLITE_NOW, now


class TransactionStep(StrEnum):
    """Where the hook runs."""

    BEGIN = "begin"  # before anything is read or written
    STATEMENT = "statement"  # inside a transaction
    COMMIT = "commit"  # before the commit
    COMMITTED = "committed"  # after it, before the caller continues


# Awaited at each step. Its exception leaves the transaction at that step; for a process that ends it never returns.
StepHook = Callable[[TransactionStep], Awaitable[None]]
# Called after every commit with the names of the written tables.
OnCommit = Callable[[frozenset[str]], None]

_COMPILER = Compiler(pysqlite.dialect())  # shared, so that statements are compiled once for all runs
_NOW_SQL = _COMPILER.plan(select(now())).text


async def no_hook(_step: TransactionStep) -> None:
    return None


class InlineFile:
    """One database that several simulated processes use at once."""

    def __init__(self, path: Path, *, now_us: Callable[[], int], on_commit: OnCommit | None = None) -> None:
        """The file must have its schema. `now_us` is the database's clock."""
        self.path = path
        self.now_us = now_us
        self._on_commit = on_commit
        self._write_lock = asyncio.Lock()
        self._writer = self._connect()
        self._readers: list[sqlite3.Connection] = []
        self._all = [self._writer]

    def store(self, on_step: StepHook = no_hook) -> Store:
        """The store of one simulated process."""
        return Store(_InlineDatabase(self, on_step))

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[sqlite3.Connection]:
        async with self._write_lock:
            yield self._writer

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        connection = self._readers.pop() if self._readers else self._connect(query_only=True)
        try:
            yield connection
        finally:
            self._readers.append(connection)

    def notify_commit(self, tables: frozenset[str]) -> None:
        if self._on_commit is not None:
            self._on_commit(tables)

    def _connect(self, *, query_only: bool = False) -> sqlite3.Connection:
        connection = connect(self.path, busy_timeout_s=0)
        connection.execute("PRAGMA synchronous=OFF")  # no power cut in a simulation
        connection.create_function(SQLITE_NOW, 0, self.now_us)
        if query_only:
            connection.execute("PRAGMA query_only=ON")
            self._all.append(connection)
        return connection


class _InlineDatabase:
    kind = "sqlite"

    def __init__(self, file: InlineFile, on_step: StepHook) -> None:
        self.compiler = _COMPILER
        self._file = file
        self._on_step = on_step

    @asynccontextmanager
    async def transaction(self, *, write: bool) -> AsyncIterator[_InlineSession]:
        await self._on_step(TransactionStep.BEGIN)
        if not write:
            with self._file.reading() as connection:
                session = _InlineSession(self._file, connection, self._on_step)
                try:
                    yield session
                finally:
                    connection.rollback()
            return
        async with self._file.writing() as connection:
            session = _InlineSession(self._file, connection, self._on_step)
            session.do("BEGIN IMMEDIATE", ())
            try:
                yield session
                await self._on_step(TransactionStep.COMMIT)
                connection.commit()
            finally:
                connection.rollback()  # does nothing after a commit
            self._file.notify_commit(frozenset(session.written))
        await self._on_step(TransactionStep.COMMITTED)

    async def close(self) -> None:
        """The opener closes the file."""


class _InlineSession:
    def __init__(self, file: InlineFile, connection: sqlite3.Connection, on_step: StepHook) -> None:
        self._file = file
        self._connection = connection
        self._on_step = on_step
        self.written: set[str] = set()

    async def run(self, sql: str, arguments: Sequence[Any]) -> int:
        await self._on_step(TransactionStep.STATEMENT)
        self.written.add(_table_of(sql))
        cursor = self.do(sql, arguments)
        rows = cursor.fetchall()
        return len(rows) or cursor.rowcount

    async def run_many(self, sql: str, arguments: Sequence[Sequence[Any]]) -> None:
        await self._on_step(TransactionStep.STATEMENT)
        self.written.add(_table_of(sql))
        for one in arguments:
            self.do(sql, one)

    async def fetch(self, sql: str, arguments: Sequence[Any]) -> Sequence[Sequence[Any]]:
        await self._on_step(TransactionStep.STATEMENT)
        if sql == _NOW_SQL:  # every eleventh statement; it sees no table
            return [(self._file.now_us(),)]
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
            found = translated(error, self._file.path)
            if found is error:
                raise
            raise found from error


@lru_cache(maxsize=1024)
def _table_of(sql: str) -> str:
    """The x of INSERT INTO x, UPDATE x, DELETE FROM x."""
    words = sql.split(None, 3)
    return words[2 if words[0] in ("INSERT", "DELETE") else 1].strip("(") if len(words) > 1 else ""
