"""Every test here runs on SQLite and on PostgreSQL, each with a database of its own; those that do not care how a store
is opened run on the simulation's too, which is SQLite without threads."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from corral.store import Store, StoreOptions, open_store
from corral.store.engine.inline_sqlite import InlineFile, TransactionStep
from tests.support import sqlite
from tests.support.postgres import Postgres, postgres, postgres_url

__all__ = ["postgres", "postgres_url"]

PATIENT = StoreOptions(
    turn_wait_s=30.0,
    busy_timeout_s=30.0,
    connect_timeout_s=30.0,
    statement_timeout_s=30.0,
    lock_timeout_s=30.0,
    idle_in_transaction_s=30.0,
)


@pytest.fixture(autouse=True)
def _nothing_left_behind(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """asyncio and asyncpg say in the log, not by raising, what was forgotten: futures, transactions, connections."""
    before = set(threading.enumerate())
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert set(threading.enumerate()) <= before, "a thread of a store outlived it"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        kinds = ["sqlite", "postgresql"]
        if set(inspect.signature(metafunc.function).parameters).isdisjoint({"url", "empty_url", "kind"}):
            kinds.append("inline")
        metafunc.parametrize("kind", kinds, indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return sqlite.sqlite_url(tmp_path)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest) -> str:
    """A database with the schema and nothing in it."""
    return str(request.getfixturevalue("postgres_url" if kind == "postgresql" else "sqlite_url"))


@pytest.fixture
def empty_url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database without even the schema."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path}/empty.db"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.new_database("template0")
    yield url
    server.drop(url)


@pytest.fixture
def inline_file(kind: str, url: str) -> Iterator[InlineFile | None]:
    if kind != "inline":
        yield None
        return
    file = InlineFile(Path(url.removeprefix("sqlite:///")), now_us=lambda: time.time_ns() // 1000)
    yield file
    file.close()


async def _turns(_step: TransactionStep) -> None:
    """As where a thread or a server does the work: others go on meanwhile."""
    await asyncio.sleep(0)


@pytest.fixture
async def store(url: str, inline_file: InlineFile | None) -> AsyncIterator[Store]:
    if inline_file is not None:
        yield inline_file.store(_turns)
        return
    async with open_store(url, options=PATIENT) as opened:
        yield opened


@pytest.fixture
async def other(url: str, inline_file: InlineFile | None) -> AsyncIterator[Store]:
    """A second store on the same database, as another controller has it."""
    if inline_file is not None:
        yield inline_file.store(_turns)
        return
    async with open_store(url, options=PATIENT) as opened:
        yield opened
