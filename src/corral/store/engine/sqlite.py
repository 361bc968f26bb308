"""SQLite: one writer, a few readers, each a connection with a thread of its own.

Why not SQLAlchemy's async engine on aiosqlite: it was tried. With a BEGIN IMMEDIATE hook it loses no update, but a task
cancelled inside a transaction can leave a connection behind that holds the write lock until it is garbage collected
(of 1,500 transactions with every other one cancelled, hundreds of the rest failed with "database is locked"), and one
short transaction costs nine hops between threads, 2.5 ms. Here a statement is one hop, and what is asked of a
connection happens in the order it was asked: a rollback posted by a cancelled task runs before whatever comes next, so
nobody needs to wait for it and nothing can stay open.
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

_OLDEST = (3, 35, 0)  # RETURNING
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
    """The error of the house for a driver's; the same one back when it is a mistake in our own SQL."""
    extended = getattr(error, "sqlite_errorcode", None)
    primary = None if extended is None else extended & 0xFF
    if extended in _CONFLICTS:
        return Conflict(f"already there, or gone meanwhile: {error}")
    if primary in _INVALID:
        return Invalid(f"this cannot be stored: {error}")
    if primary == sqlite3.SQLITE_NOTADB:
        return Invalid(f"{path} is not a SQLite database")
    if primary in _LOCKED:
        return Unavailable(f"the database {path} is locked by another process")
    if primary in _BROKEN:
        return Unavailable(f"the database {path} cannot be used: {error}")
    return error


def create_file(path: Path) -> None:
    """The file and its folder, for the owner only: it holds the cluster's secrets."""
    if sqlite3.sqlite_version_info < _OLDEST:
        raise Invalid(f"SQLite {sqlite3.sqlite_version} is too old: 3.35 or newer is needed")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise Invalid(f"the database {path} cannot be opened for writing: {error.strerror}") from error


def connect(path: Path, *, busy_timeout_s: float, foreign_keys: bool = True) -> sqlite3.Connection:
    """A connection that starts no transaction by itself. A file that has gone is not made anew, empty."""
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
    """Once per opening: the mode is remembered in the file. SQLite does not wait for a lock here, so we do."""
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
        raise Invalid(f"the database {path} lies on a file system without shared memory: use a local disk")


def begin_immediate(connection: sqlite3.Connection, deadline: float) -> None:
    """Waits for another process's lock until then (by the monotonic clock), and asks at least once."""
    left_ms = max(0, math.ceil((deadline - time.monotonic()) * 100) * 10)  # few values, so few statements to parse
    connection.execute(f"PRAGMA busy_timeout={left_ms}").close()
    connection.execute("BEGIN IMMEDIATE").close()


class _Lane:
    """One connection and the one thread that touches it. Work is done in the order it was handed in.

    A thread and a queue of our own: an executor's futures, locks and semaphores cost more than most statements do."""

    def __init__(self, path: Path, name: str, opened: Callable[[], sqlite3.Connection]) -> None:
        self._path = path
        self._name = name
        self._opened = opened
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._work: SimpleQueue[_Work | None] = SimpleQueue()

    async def do(self, work: Work[T]) -> T:
        """Raises errors of the house. Cancelled while it still waits for the thread, the work is not done at all."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._hand_in(lambda: self._on_thread(work), answer)
        try:
            return await answer
        except sqlite3.Error as error:
            found = translated(error, self._path)
            if found is error:
                raise
            raise found from error

    def post_rollback(self) -> None:
        """Handed in for certain, however the caller fares. Nothing stays open on a closed one."""
        if not self._closed:
            self._hand_in(self._roll_back, None)

    async def rolled_back(self) -> None:
        """The same, and waits for it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hand_in(self._roll_back, done)
        await asyncio.shield(done)

    async def close(self) -> None:
        """After what was handed in before."""
        self._closed = True
        if self._thread is not None:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._work.put((self._drop, done))
            self._work.put(None)
            await asyncio.shield(done)
            self._thread.join()

    def _hand_in(self, work: Callable[[], Any], answer: asyncio.Future[Any] | None) -> None:
        if self._closed:
            raise RuntimeError("this store is closed")  # nobody would ever answer
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"sqlite {self._name}", daemon=True)
            self._thread.start()
        self._work.put((work, answer))

    def _serve(self) -> None:
        while (handed_in := self._work.get()) is not None:
            work, answer = handed_in
            if answer is None or not answer.cancelled():
                _do(work, answer)
            del handed_in, work, answer  # or rows would stay in memory for as long as nothing else is to be done

    def _on_thread(self, work: Work[T]) -> T:
        if self._connection is None:
            self._connection = self._opened()
        try:
            return work(self._connection)
        except sqlite3.Error as error:
            if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _BROKEN:
                self._drop()  # the next one starts with a fresh connection: the disk may have room again
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            answer.get_loop().call_soon_threadsafe(_settle, answer, result, error)


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.cancelled():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


class _SqliteSession:
    def __init__(self, lane: _Lane, *, begin_first: bool) -> None:
        self._lane = lane
        self._begin_first = begin_first

    async def run(self, sql: str, arguments: Sequence[Any]) -> int:
        def work(connection: sqlite3.Connection) -> int:
            cursor = connection.execute(sql, arguments)
            rows = cursor.fetchall()  # a RETURNING statement is done only when its rows are read
            return len(rows) or cursor.rowcount

        return await self._lane.do(work)

    async def run_many(self, sql: str, arguments: Sequence[Sequence[Any]]) -> None:
        await self._lane.do(lambda connection: connection.executemany(sql, arguments).close())

    async def fetch(self, sql: str, arguments: Sequence[Any]) -> Sequence[Sequence[Any]]:
        begin_first, self._begin_first = self._begin_first, False

        def work(connection: sqlite3.Connection) -> list[Sequence[Any]]:
            if begin_first:
                connection.execute("BEGIN")
            return connection.execute(sql, arguments).fetchall()

        return await self._lane.do(work)

    def own_clock_us(self) -> int:
        """Statements see the same one (`connect`); asking for it alone is not worth a hop between threads."""
        return _clock_us()


class SqliteDatabase:
    kind = "sqlite"

    def __init__(self, path: Path, options: StoreOptions) -> None:
        self.path = path
        self.options = options
        self.compiler = Compiler(pysqlite.dialect())
        self._write_turn = asyncio.Lock()
        self._writer = _Lane(path, "writer", lambda: connect(path, busy_timeout_s=options.busy_timeout_s))
        self._readers = [_Lane(path, f"reader {n}", self._connect_reader) for n in range(options.readers)]
        self._idle: asyncio.LifoQueue[_Lane] = asyncio.LifoQueue()
        for reader in reversed(self._readers):
            self._idle.put_nowait(reader)

    @asynccontextmanager
    async def transaction(self, *, write: bool) -> AsyncIterator[_SqliteSession]:
        # One end for the turn and the lock together: behind a lock that stays, those in line fail when their own time
        # is over, and not one after the other, each after a wait of its own.
        deadline = time.monotonic() + self.options.busy_timeout_s
        async with self._writing() if write else self._reading() as lane:
            try:
                if write:
                    await lane.do(lambda connection: begin_immediate(connection, deadline))
                yield _SqliteSession(lane, begin_first=not write)
                if write:
                    await lane.do(lambda connection: connection.commit())
                else:
                    lane.post_rollback()  # ends the snapshot; nobody waits for it
            except (asyncio.CancelledError, GeneratorExit):
                lane.post_rollback()  # behind whatever still runs there, before whatever comes next
                raise
            except BaseException:
                await lane.rolled_back()
                raise

    async def close(self) -> None:
        for lane in (*self._readers, self._writer):
            await lane.close()

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[_Lane]:
        longest_s = min(self.options.turn_wait_s, self.options.busy_timeout_s)
        try:
            async with asyncio.timeout(longest_s):
                await self._write_turn.acquire()
        except TimeoutError as error:
            raise self._no_turn("write", longest_s) from error
        try:
            yield self._writer
        finally:
            self._write_turn.release()

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[_Lane]:
        try:
            async with asyncio.timeout(self.options.turn_wait_s):
                lane = await self._idle.get()
        except TimeoutError as error:
            raise self._no_turn("read", self.options.turn_wait_s) from error
        try:
            yield lane
        finally:
            self._idle.put_nowait(lane)

    def _no_turn(self, what: str, waited_s: float) -> CorralError:
        return Unavailable(f"the database {self.path} is busy: no turn to {what} within {waited_s:g} s")

    def _connect_reader(self) -> sqlite3.Connection:
        connection = connect(self.path, busy_timeout_s=self.options.busy_timeout_s)
        connection.execute("PRAGMA query_only=ON")
        return connection


def sqlite_path(rest: str) -> Path:
    """What follows `sqlite://`: a slash, then the path as it is (an absolute one begins with two), as in SQLAlchemy.
    Escapes are not decoded: people and our own settings put a plain path behind `sqlite:///`."""
    path = rest.removeprefix("/")
    if not rest.startswith("/") or path in ("", ":memory:") or "?" in path:
        raise Invalid("a SQLite database is a file: write sqlite:///relative.db or sqlite:////absolute/path.db")
    return Path(path).expanduser().absolute()
