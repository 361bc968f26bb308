"""Values on their way into SQL and back, URLs, and what drivers' errors become."""

from __future__ import annotations

import asyncio
import sqlite3
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select
from sqlalchemy.dialects import sqlite

from corral.kit.errors import Conflict, Invalid, Unavailable
from corral.store import open_store
from corral.store.engine.postgres import translated as translated_postgres
from corral.store.engine.postgres import where
from corral.store.engine.sqlite import sqlite_path
from corral.store.engine.sqlite import translated as translated_sqlite
from corral.store.engine.statements import Compiler
from corral.store.engine.types import check_value, from_us, to_us
from corral.store.tables import nodes

aware = st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30)).map(
    lambda moment: moment.replace(tzinfo=UTC)
)


@given(aware)
def test_a_moment_comes_back_to_the_microsecond(moment: datetime) -> None:
    assert from_us(to_us(moment)) == moment


@given(aware, aware)
def test_moments_compare_as_their_numbers_do(one: datetime, two: datetime) -> None:
    assert (one < two) == (to_us(one) < to_us(two))


def test_other_time_zones_are_the_same_moment() -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert to_us(noon.astimezone(timezone(timedelta(hours=5)))) == to_us(noon)


def test_a_naive_moment_is_a_mistake() -> None:
    with pytest.raises(TypeError):
        to_us(datetime(2026, 1, 1))


@pytest.mark.parametrize("value", ["", "ümläut 🐎", "\x01\x7f", 2**63 - 1, -(2**63), None, True, 1.5, ["a"]])
def test_what_can_be_stored(value: object) -> None:
    check_value(value)


@pytest.mark.parametrize("value", ["\0", "a\0b", "\ud800", 2**63, -(2**63) - 1, ["a", "\0"]])
def test_what_cannot_be_stored(value: object) -> None:
    with pytest.raises(Invalid):
        check_value(value)


def test_a_statement_is_compiled_once() -> None:
    compiler = Compiler(sqlite.dialect())
    statement = select(nodes.table)
    assert compiler.plan(statement) is compiler.plan(statement)
    assert compiler.plan("SELECT 1") is compiler.plan("SELECT 1")
    assert compiler.plan(select(nodes.table)) is not compiler.plan(statement)


@pytest.mark.parametrize(
    ("rest", "path"),
    [
        ("/corral.db", Path.cwd() / "corral.db"),
        ("//var/lib/corral.db", Path("/var/lib/corral.db")),
        ("//var/my data/100%25.db", Path("/var/my data/100%25.db")),
    ],
)
def test_where_a_sqlite_url_points(rest: str, path: Path) -> None:
    assert sqlite_path(rest) == path


@pytest.mark.parametrize(
    "url",
    [
        "",
        "corral.db",
        "sqlite:corral.db",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///a.db?mode=ro",
        "sqlite://host/a.db",
        "mysql://me:secret@host/db",
        "postgresql:/db",
    ],
)
def test_urls_that_will_never_do(url: str) -> None:
    async def use() -> None:
        async with open_store(url):
            pass

    with pytest.raises(Invalid) as caught:
        asyncio.run(use())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["postgresql://me:secret@db.example:5432/corral?sslmode=require", "postgresql:///corral"]
)
def test_a_password_is_not_shown(url: str) -> None:
    assert "secret" not in where(url)
    assert where(url).endswith("/corral")


def an_error(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("because")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_BUSY, Unavailable),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, Unavailable),
        (sqlite3.SQLITE_LOCKED, Unavailable),
        (sqlite3.SQLITE_FULL, Unavailable),
        (sqlite3.SQLITE_IOERR_FSYNC, Unavailable),
        (sqlite3.SQLITE_CANTOPEN, Unavailable),
        (sqlite3.SQLITE_READONLY, Unavailable),
        (sqlite3.SQLITE_CORRUPT, Unavailable),
        (sqlite3.SQLITE_NOTADB, Invalid),
        (sqlite3.SQLITE_CONSTRAINT_UNIQUE, Conflict),
        (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, Conflict),
        (sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY, Conflict),
        (sqlite3.SQLITE_CONSTRAINT_NOTNULL, Invalid),
        (sqlite3.SQLITE_CONSTRAINT_CHECK, Invalid),
        (sqlite3.SQLITE_TOOBIG, Invalid),
        (sqlite3.SQLITE_ERROR, sqlite3.OperationalError),
    ],
)
def test_errors_of_sqlite(code: int, kind: type[Exception]) -> None:
    assert type(translated_sqlite(an_error(code), Path("a.db"))) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (asyncpg.UniqueViolationError("x"), Conflict),
        (asyncpg.ForeignKeyViolationError("x"), Conflict),
        (asyncpg.DeadlockDetectedError("x"), Conflict),
        (asyncpg.SerializationError("x"), Conflict),
        (asyncpg.NotNullViolationError("x"), Invalid),
        (asyncpg.NumericValueOutOfRangeError("x"), Invalid),
        (asyncpg.CharacterNotInRepertoireError("x"), Invalid),
        (asyncpg.TooManyConnectionsError("x"), Unavailable),
        (asyncpg.DiskFullError("x"), Unavailable),
        (asyncpg.LockNotAvailableError("x"), Unavailable),
        (asyncpg.QueryCanceledError("x"), Unavailable),
        (asyncpg.AdminShutdownError("x"), Unavailable),
        (asyncpg.CannotConnectNowError("x"), Unavailable),
        (asyncpg.ConnectionDoesNotExistError("x"), Unavailable),
        (asyncpg.InvalidPasswordError("x"), Unavailable),
        (asyncpg.InvalidCatalogNameError("x"), Unavailable),
        (asyncpg.ReadOnlySQLTransactionError("x"), Unavailable),
        (asyncpg.InvalidCachedStatementError("x"), Unavailable),
        (asyncpg.InterfaceError("connection is closed"), Unavailable),
        (asyncpg.InterfaceError("cannot perform operation: another operation is in progress"), asyncpg.InterfaceError),
        (asyncpg.exceptions.ClientConfigurationError("invalid DSN"), Invalid),
        (ConnectionRefusedError(111, "refused"), Unavailable),
        (TimeoutError(), Unavailable),
        (asyncpg.PostgresSyntaxError("x"), asyncpg.PostgresSyntaxError),
        (asyncpg.UndefinedTableError("x"), asyncpg.UndefinedTableError),
        (ZeroDivisionError(), ZeroDivisionError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_errors_of_postgresql(error: Exception, kind: type[Exception]) -> None:
    assert type(translated_postgres(error, "postgresql://here/db")) is kind
