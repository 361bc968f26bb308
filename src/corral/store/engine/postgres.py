"""PostgreSQL through asyncpg's own pool. Statements come compiled; no SQLAlchemy engine is involved (see `sqlite.py`).

Readers get a snapshot (REPEATABLE READ, READ ONLY: another transaction's write cannot make them fail). Writers run at
READ COMMITTED: at a higher level two changes that raise the same counter of `revisions` could never both succeed. Every
wait has a timeout here and on the server, so a network that drops packets costs seconds.
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

_NEGLIGIBLE_WAIT_S = 0.1  # a wait for a connection that is not worth mentioning
_CONNECTION_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
_DRIVER_ERRORS = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


def where(url: str) -> str:
    """The database's address without credentials, for messages."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"postgresql://{host}{parts.path}"


def translated(error: BaseException, place: str) -> BaseException:
    """The driver's error as an error of `kit.errors`; unchanged where our own SQL is wrong."""
    reason = "no answer in time" if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)
    reason = reason.splitlines()[0]
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        # Another controller has just migrated the schema; the driver drops its cached plans and the next attempt works.
        return Unavailable(f"the database {place} was changed under this transaction: {reason}")
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        if state in _CONFLICTS:
            return Conflict(f"the row exists already, or was changed by another transaction: {reason}")
        if state.startswith(_INVALID):
            return Invalid(f"the value cannot be stored: {reason}")
        if state.startswith(_UNAVAILABLE):
            return Unavailable(f"the database {place} cannot be used: {reason}")
    elif isinstance(error, asyncpg.exceptions.ClientConfigurationError):
        return Invalid(f"the database URL cannot be used: {reason}")
    elif isinstance(error, OSError | TimeoutError | asyncpg.exceptions.TargetServerAttributeNotMatched):
        return Unavailable(f"the database {place} cannot be reached: {reason}")
    elif isinstance(error, asyncpg.InternalClientError):
        # The server has closed the connection and the driver has not noticed yet.
        return Unavailable(f"the database {place} cannot be reached: the server has ended the connection")
    elif isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError):
        return Invalid(f"the value cannot be stored: {reason}")
    elif isinstance(error, asyncpg.InterfaceError) and "another operation" not in reason:
        # The connection or the pool was closed, by the server or by this process. The remaining case is two tasks that
        # use one transaction at a time, which is a bug.
        return Unavailable(f"the database {place} cannot be reached: {reason}")
    return error


async def translate_errors(place: str, call: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> T:
    """Call the driver and translate its errors. A closed connection raises when called, not when awaited, so the call
    is made here."""
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
    """Our sessions keep no state that would have to be reset; an open transaction is rolled back anyway."""


class _PostgresSession:
    def __init__(self, connection: Any, place: str) -> None:
        self._connection = connection
        self._place = place

    async def run(self, sql: str, arguments: Sequence[Any]) -> int:
        status = await translate_errors(self._place, self._connection.execute, sql, *arguments)
        count = status.rpartition(" ")[2]  # UPDATE 3, INSERT 0 3, CREATE TABLE
        return int(count) if count.isdigit() else 0

    async def run_many(self, sql: str, arguments: Sequence[Sequence[Any]]) -> None:
        await translate_errors(self._place, self._connection.executemany, sql, arguments)

    async def fetch(self, sql: str, arguments: Sequence[Any]) -> Sequence[Sequence[Any]]:
        rows: Sequence[Sequence[Any]] = await translate_errors(self._place, self._connection.fetch, sql, *arguments)
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
        """Create the pool; the first connection is opened when it is needed."""
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
        connection = await self._begin(_BEGIN_WRITE if write else _BEGIN_READ)
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

    async def _begin(self, begin: str) -> Any:
        """A connection inside a transaction. A pooled connection that is dead (the server was restarted) fails here,
        before any statement has run, so a new connection is tried."""
        try:
            return await self._acquire_and(begin)
        except Unavailable as error:
            if not isinstance(error.__cause__, _CONNECTION_LOST):
                raise
        await self._pool.expire_connections()  # the others are as old
        return await self._acquire_and(begin)

    async def _acquire_and(self, begin: str) -> Any:
        started_at = time.monotonic()
        connection = await translate_errors(self.place, self._pool.acquire, timeout=self.options.turn_wait_s)
        waited_s = time.monotonic() - started_at
        if waited_s > _NEGLIGIBLE_WAIT_S:
            # The other connections may all have waited for one lock: the wait for a connection counts as lock wait.
            begin += (
                f"; SET LOCAL lock_timeout = {_ms(max(_NEGLIGIBLE_WAIT_S, self.options.lock_timeout_s - waited_s))}"
            )
        try:
            await translate_errors(self.place, connection.execute, begin)
        except BaseException:
            await self._release(connection)
            raise
        return connection

    async def _commit(self, connection: Any) -> None:
        try:
            await translate_errors(self.place, connection.execute, "COMMIT")
        except Unavailable as error:
            raise OutcomeUnknown(f"the database {self.place} was lost during a commit: {error.message}") from error

    async def _roll_back(self, connection: Any) -> None:
        # A connection that cannot roll back is closed, by its server or by the pool, which rolls back too.
        with contextlib.suppress(*_DRIVER_ERRORS):
            await connection.execute("ROLLBACK", timeout=self.options.connect_timeout_s)

    async def _release(self, connection: Any) -> None:
        # The pool discards a broken connection; the outcome of the transaction has been reported already.
        with contextlib.suppress(*_DRIVER_ERRORS):
            await self._pool.release(connection, timeout=self.options.connect_timeout_s)
