"""SQLite: one writer, a few readers, each a connection with a thread of its own.

Why not SQLAlchemy's async engine on aiosqlite: it was tried. With a BEGIN IMMEDIATE hook it loses no update, but a task
cancelled inside a transaction can leave a connection behind that holds the write lock until it is garbage collected
(of 1,500 transactions with every other one cancelled, hundreds of the rest failed with "database is locked"), and one
short transaction costs nine hops between threads, 2.5 ms. Here a statement is one hop, and the work on a
connection happens in the order of submission: a rollback submitted by a cancelled task runs before the next work, so no
task waits for it and no transaction stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy.dialects.sqlite import pysqlite

from corral.kit.errors import Conflict, CorralError, Invalid, Unavailable
from corral.store.engine.statements import Compiler
from corral.store.engine.transactions import StoreOptions
from corral.store.engine.types import SQLITE_NOW

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
_Work = tuple[Callable[[], Any], "asyncio.Future[Any] | None"]  # and who waits for it

_MIN_VERSION = (3, 35, 0)  # RETURNING
_CONFLICTS = {
    sqlite3.SQLITE_CONSTRAINT_UNIQUE,
    sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY,
    sqlite3.SQLITE_CONSTRAINT_ROWID,
    sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY,
}
_INVALID = {sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH}
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_BROKEN = {
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_CORRUPT,
}


def translated(error: sqlite3.Error, path: Path) -> Exception:
    """The driver's error as an error of `kit.errors`; unchanged where our own SQL is wrong."""
    extended = getattr(error, "sqlite_errorcode", None)
    primary = None if extended is None else extended & 0xFF
    if extended in _CONFLICTS:
        return Conflict(f"the row exists already, or a row it refers to was deleted: {error}")
    if primary in _INVALID:
        return Invalid(f"the value cannot be stored: {error}")
    if primary == sqlite3.SQLITE_NOTADB:
        return Invalid(f"{path} is not a SQLite database")
    if primary in _LOCKED:
        return Unavailable(f"the database {path} is locked by another process")
    if primary in _BROKEN:
        return Unavailable(f"the database {path} cannot be used: {error}")
    return error


def create_file(path: Path) -> None:
    """Create the file and its folder, for the owner only: the database holds the cluster's secrets."""
    if sqlite3.sqlite_version_info < _MIN_VERSION:
        raise Invalid(f"SQLite {sqlite3.sqlite_version} is too old: 3.35 or newer is needed")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise Invalid(f"the database {path} cannot be opened for writing: {error.strerror}") from error


def connect(path: Path, *, busy_timeout_s: float, foreign_keys: bool = True) -> sqlite3.Connection:
    """A connection that starts no transaction by itself. A missing file is not created again, empty."""
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode=rw",
        uri=True,
        timeout=busy_timeout_s,
        isolation_level=None,
        cached_statements=256,
    )
    try:
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
        connection.execute("PRAGMA journal_size_limit=67108864")
        connection.create_function(SQLITE_NOW, 0, _clock_us)
    except BaseException:
        connection.close()
        raise
    return connection


def _clock_us() -> int:
    return time.time_ns() // 1000


def use_wal(path: Path, *, busy_timeout_s: float) -> None:
    """Once per opening: the file remembers the mode. SQLite does not wait for a lock here, so this function does."""
    deadline = time.monotonic() + busy_timeout_s
    connection = connect(path, busy_timeout_s=busy_timeout_s)
    try:
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
                break
            except sqlite3.OperationalError as error:
                if (getattr(error, "sqlite_errorcode", 0) & 0xFF) not in _LOCKED or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
    finally:
        connection.close()
    if mode != "wal":
        raise Invalid(f"the database {path} is on a file system without shared memory: use a local disk")


def begin_immediate(connection: sqlite3.Connection, deadline: float) -> None:
    """Wait for another process's lock until `deadline` (monotonic clock), with at least one attempt."""
    left_ms = max(0, math.ceil((deadline - time.monotonic()) * 100) * 10)  # few values, so few statements to parse
    connection.execute(f"PRAGMA busy_timeout={left_ms}").close()
    connection.execute("BEGIN IMMEDIATE").close()


class _ConnectionThread:
    """One connection and the one thread that uses it. Work runs in the order of submission.

    A thread and a queue of our own: an executor's futures, locks and semaphores cost more than most statements do."""

    def __init__(self, path: Path, name: str, connect: Callable[[], sqlite3.Connection]) -> None:
        self._path = path
        self._name = name
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._work: SimpleQueue[_Work | None] = SimpleQueue()

    async def do(self, work: Work[T]) -> T:
        """Raises errors of `kit.errors`. Work that is cancelled before the thread starts it never runs."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._submit(lambda: self._on_thread(work), answer)
        try:
            return await answer
        except sqlite3.Error as error:
            found = translated(error, self._path)
            if found is error:
                raise
            raise found from error

    def submit_rollback(self) -> None:
        """Submit a rollback without waiting for it. A closed connection has no open transaction."""
        if not self._closed:
            self._submit(self._roll_back, None)

    async def roll_back_and_wait(self) -> None:
        """Roll back, and wait until it is done."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._submit(self._roll_back, done)
        await asyncio.shield(done)

    async def close(self) -> None:
        """Close after the work that was submitted before."""
        self._closed = True
        if self._thread is not None:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._work.put((self._drop, done))
            self._work.put(None)
            await asyncio.shield(done)
            self._thread.join()

    def _submit(self, work: Callable[[], Any], answer: asyncio.Future[Any] | None) -> None:
        if self._closed:
            raise RuntimeError("this store is closed")  # no thread would run the work
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"sqlite {self._name}", daemon=True)
            self._thread.start()
        self._work.put((work, answer))

    def _serve(self) -> None:
        while (submitted := self._work.get()) is not None:
            work, answer = submitted
            if answer is None or not answer.cancelled():
                _do(work, answer)
            del submitted, work, answer  # otherwise rows would stay in memory until the next work arrives

    def _on_thread(self, work: Work[T]) -> T:
        if self._connection is None:
            self._connection = self._connect()
        try:
            return work(self._connection)
        except sqlite3.Error as error:
            if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _BROKEN:
                self._drop()  # the next work opens a new connection: the disk may have space again
            raise

    def _roll_back(self) -> None:
        try:
            if self._connection is not None and self._connection.in_transaction:
                self._connection.rollback()
        except sqlite3.Error:
            self._drop()  # closing rolls back too

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


def _do(work: Callable[[], Any], answer: asyncio.Future[Any] | None) -> None:
    result: Any = None
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as raised:
        error = raised
    if answer is not None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            answer.get_loop().call_soon_threadsafe(_settle, answer, result, error)


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.cancelled():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


class _SqliteSession:
    def __init__(self, thread: _ConnectionThread, *, begin_first: bool) -> None:
        self._thread = thread
        self._begin_first = begin_first

    async def run(self, sql: str, arguments: Sequence[Any]) -> int:
        def work(connection: sqlite3.Connection) -> int:
            cursor = connection.execute(sql, arguments)
            rows = cursor.fetchall()  # a RETURNING statement is done only when its rows are read
            return len(rows) or cursor.rowcount

        return await self._thread.do(work)

    async def run_many(self, sql: str, arguments: Sequence[Sequence[Any]]) -> None:
        await self._thread.do(lambda connection: connection.executemany(sql, arguments).close())

    async def fetch(self, sql: str, arguments: Sequence[Any]) -> Sequence[Sequence[Any]]:
        begin_first, self._begin_first = self._begin_first, False

        def work(connection: sqlite3.Connection) -> list[Sequence[Any]]:
            if begin_first:
                connection.execute("BEGIN")
            return connection.execute(sql, arguments).fetchall()

        return await self._thread.do(work)

    def own_clock_us(self) -> int:
        """Statements use the same clock (`connect`), so no query is needed."""
        return _clock_us()


class SqliteDatabase:
    kind = "sqlite"

    def __init__(self, path: Path, options: StoreOptions) -> None:
        self.path = path
        self.options = options
        self.compiler = Compiler(pysqlite.dialect())
        self._write_turn = asyncio.Lock()
        self._writer = _ConnectionThread(path, "writer", lambda: connect(path, busy_timeout_s=options.busy_timeout_s))
        self._readers = [_ConnectionThread(path, f"reader {n}", self._connect_reader) for n in range(options.readers)]
        self._idle: asyncio.LifoQueue[_ConnectionThread] = asyncio.LifoQueue()
        for reader in reversed(self._readers):
            self._idle.put_nowait(reader)

    @asynccontextmanager
    async def transaction(self, *, write: bool) -> AsyncIterator[_SqliteSession]:
        # One deadline for both locks together: behind a lock that is never released, waiting callers fail at their own
        # deadline, not one after the other.
        deadline = time.monotonic() + self.options.busy_timeout_s
        async with self._writing() if write else self._reading() as thread:
            try:
                if write:
                    await thread.do(lambda connection: begin_immediate(connection, deadline))
                yield _SqliteSession(thread, begin_first=not write)
                if write:
                    await thread.do(lambda connection: connection.commit())
                else:
                    thread.submit_rollback()  # ends the snapshot; no need to wait
            except (asyncio.CancelledError, GeneratorExit):
                thread.submit_rollback()  # after the running work, before the next
                raise
            except BaseException:
                await thread.roll_back_and_wait()
                raise

    async def close(self) -> None:
        for thread in (*self._readers, self._writer):
            await thread.close()

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[_ConnectionThread]:
        timeout_s = min(self.options.turn_wait_s, self.options.busy_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._write_turn.acquire()
        except TimeoutError as error:
            raise self._busy_error("write", timeout_s) from error
        try:
            yield self._writer
        finally:
            self._write_turn.release()

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[_ConnectionThread]:
        try:
            async with asyncio.timeout(self.options.turn_wait_s):
                thread = await self._idle.get()
        except TimeoutError as error:
            raise self._busy_error("read", self.options.turn_wait_s) from error
        try:
            yield thread
        finally:
            self._idle.put_nowait(thread)

    def _busy_error(self, what: str, waited_s: float) -> CorralError:
        return Unavailable(f"the database {self.path} is busy: no {what} could start within {waited_s:g} s")

    def _connect_reader(self) -> sqlite3.Connection:
        connection = connect(self.path, busy_timeout_s=self.options.busy_timeout_s)
        connection.execute("PRAGMA query_only=ON")
        return connection


def sqlite_path(rest: str) -> Path:
    """The path of a URL, from the text after `sqlite://`: a slash, then the path (an absolute path has two slashes), as
    in SQLAlchemy. Escapes are not decoded: users and our own settings write a plain path after `sqlite:///`."""
    path = rest.removeprefix("/")
    if not rest.startswith("/") or path in ("", ":memory:") or "?" in path:
        raise Invalid("a SQLite database is a file: write sqlite:///relative.db or sqlite:////absolute/path.db")
    return Path(path).expanduser().absolute()
