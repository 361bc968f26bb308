"""PostgreSQL through asyncpg's own pool. Statements come compiled; no SQLAlchemy engine is involved (see `sqlite.py`).

Readers get a snapshot (REPEATABLE READ, READ ONLY: no such transaction can fail for somebody else's write). Writers run
at READ COMMITTED: at a higher level two changes that raise the same counter of `revisions` could never both succeed.
Every wait has an end here and on the server, so a network that swallows packets costs seconds, not for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import asyncpg
from sqlalchemy.dialects.postgresql import asyncpg as dialect

from corral.kit.errors import Conflict, Invalid, OutcomeUnknown, Unavailable
from corral.store.engine.statements import Compiler
from corral.store.engine.transactions import StoreOptions

T = TypeVar("T")

_BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_BEGIN_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_CONFLICTS = ("23505", "23503", "23P01", "40001", "40P01")  # unique, foreign key, exclusion, serialization, deadlock
_INVALID = ("22", "23")
# Connections, credentials, no such database, resources, locks, operator's shutdown, disk; 25006: we reached a standby.
_UNAVAILABLE = ("08", "28", "3D", "53", "55", "57", "58", "25006")

_SHORT_S = 0.1  # a wait for a connection that is not worth mentioning
_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
_OUT_OF_ORDER = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


def where(url: str) -> str:
    """The database as people may be shown it: without credentials."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"postgresql://{host}{parts.path}"


def translated(error: BaseException, place: str) -> BaseException:
    """The error of the house for a driver's; the same one back when it is a mistake in our own SQL."""
    reason = "no answer in time" if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)
    reason = reason.splitlines()[0]
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        # Another controller has just migrated the schema; the driver forgets its old plans and the next try is right.
        return Unavailable(f"the database {place} was changed under this transaction: {reason}")
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        if state in _CONFLICTS:
            return Conflict(f"already there, or changed meanwhile: {reason}")
        if state.startswith(_INVALID):
            return Invalid(f"this cannot be stored: {reason}")
        if state.startswith(_UNAVAILABLE):
            return Unavailable(f"the database {place} cannot be used: {reason}")
    elif isinstance(error, asyncpg.exceptions.ClientConfigurationError):
        return Invalid(f"the database URL cannot be used: {reason}")
    elif isinstance(error, OSError | TimeoutError | asyncpg.exceptions.TargetServerAttributeNotMatched):
        return Unavailable(f"the database {place} cannot be reached: {reason}")
    elif isinstance(error, asyncpg.InternalClientError):
        # The server's last word has been read, and the end of the line has not: the driver is between two states.
        return Unavailable(f"the database {place} cannot be reached: the server has ended the connection")
    elif isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError):
        return Invalid(f"this cannot be stored: {reason}")
    elif isinstance(error, asyncpg.InterfaceError) and "another operation" not in reason:
        # The connection or the pool was closed, by the server's doing or ours. What remains is two tasks that use one
        # transaction at a time, and that is a mistake.
        return Unavailable(f"the database {place} cannot be reached: {reason}")
    return error


async def through(place: str, call: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> T:
    """Make a driver's call; what it raises becomes an error of the house. A closed connection raises when called, not
    when awaited, so the call is made in here."""
    try:
        return await call(*arguments, **options)
    except Exception as error:
        found = translated(error, place)
        if found is error:
            raise
        raise found from error


def _ms(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))


def server_settings(options: StoreOptions) -> dict[str, str]:
    return {
        "application_name": "corral",
        "statement_timeout": _ms(options.statement_timeout_s),
        "lock_timeout": _ms(options.lock_timeout_s),
        "idle_in_transaction_session_timeout": _ms(options.idle_in_transaction_s),
        "jit": "off",  # our statements are short: compiling them would take longer than running them
    }


async def _no_reset(connection: Any) -> None:
    """We leave nothing behind in a session that would have to be reset; an open transaction is rolled back anyway."""


class _PostgresSession:
    def __init__(self, connection: Any, place: str) -> None:
        self._connection = connection
        self._place = place

    async def run(self, sql: str, arguments: Sequence[Any]) -> int:
        status = await through(self._place, self._connection.execute, sql, *arguments)
        count = status.rpartition(" ")[2]  # UPDATE 3, INSERT 0 3, CREATE TABLE
        return int(count) if count.isdigit() else 0

    async def run_many(self, sql: str, arguments: Sequence[Sequence[Any]]) -> None:
        await through(self._place, self._connection.executemany, sql, arguments)

    async def fetch(self, sql: str, arguments: Sequence[Any]) -> Sequence[Sequence[Any]]:
        rows: Sequence[Sequence[Any]] = await through(self._place, self._connection.fetch, sql, *arguments)
        return rows

    def own_clock_us(self) -> None:
        return None


class PostgresDatabase:
    kind = "postgresql"

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.url = url
        self.place = where(url)
        self.options = options
        self.compiler = Compiler(dialect.dialect())  # type: ignore[no-untyped-call]
        self._pool: Any = None

    async def open(self) -> None:
        """Makes the pool; the first connection is made when one is needed."""
        self._pool = await asyncpg.create_pool(
            self.url,
            min_size=0,
            max_size=self.options.pool_size,
            reset=_no_reset,
            timeout=self.options.connect_timeout_s,
            # The server keeps its own, shorter time; this one is for a server that no longer answers.
            command_timeout=2 * self.options.statement_timeout_s,
            server_settings=server_settings(self.options),
        )

    @asynccontextmanager
    async def transaction(self, *, write: bool) -> AsyncIterator[_PostgresSession]:
        connection = await self._begun(_BEGIN_WRITE if write else _BEGIN_READ)
        try:
            yield _PostgresSession(connection, self.place)
            await (self._commit(connection) if write else self._roll_back(connection))
        except BaseException:
            await self._roll_back(connection)
            raise
        finally:
            await self._release(connection)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(self.options.turn_wait_s):
                await self._pool.close()
        except TimeoutError:
            self._pool.terminate()

    async def _begun(self, begin: str) -> Any:
        """A connection inside a transaction. One that died in the pool (the server was restarted) is found out here,
        before anything has happened, so a fresh one is tried."""
        try:
            return await self._acquire_and(begin)
        except Unavailable as error:
            if not isinstance(error.__cause__, _LOST):
                raise
        await self._pool.expire_connections()  # the others are as old
        return await self._acquire_and(begin)

    async def _acquire_and(self, begin: str) -> Any:
        asked_at = time.monotonic()
        connection = await through(self.place, self._pool.acquire, timeout=self.options.turn_wait_s)
        waited_s = time.monotonic() - asked_at
        if waited_s > _SHORT_S:
            # The others may all have waited for one lock. Who stood in line behind them has had that wait already.
            begin += f"; SET LOCAL lock_timeout = {_ms(max(_SHORT_S, self.options.lock_timeout_s - waited_s))}"
        try:
            await through(self.place, connection.execute, begin)
        except BaseException:
            await self._release(connection)
            raise
        return connection

    async def _commit(self, connection: Any) -> None:
        try:
            await through(self.place, connection.execute, "COMMIT")
        except Unavailable as error:
            raise OutcomeUnknown(f"the database {self.place} went away while committing: {error.message}") from error

    async def _roll_back(self, connection: Any) -> None:
        # A connection that cannot even do that is closed, by its server or by the pool, and that rolls back too.
        with contextlib.suppress(*_OUT_OF_ORDER):
            await connection.execute("ROLLBACK", timeout=self.options.connect_timeout_s)

    async def _release(self, connection: Any) -> None:
        # Whatever is wrong with it, the pool throws it away; what became of the transaction is already told.
        with contextlib.suppress(*_OUT_OF_ORDER):
            await self._pool.release(connection, timeout=self.options.connect_timeout_s)
