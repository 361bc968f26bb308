"""The same tests on SQLite and the bus's twin, and on PostgreSQL and NATS.

Use the fixtures by importing them: `from tests.support.both_stores import fleet, local_fleet, postgres, postgres_url`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.backend_fleet import Fleet, open_fleet
from tests.support.buses import open_yard
from tests.support.postgres import postgres, postgres_url
from tests.support.sqlite import sqlite_url

__all__ = ["KINDS", "fleet", "local_fleet", "on_kind", "postgres", "postgres_url"]

T = TypeVar("T")
Opens = Callable[..., AbstractAsyncContextManager[T]]  # with the URL of a store, and a yard for its bus

KINDS = ("sqlite and the bus's twin", "postgresql and nats")


@contextlib.asynccontextmanager
async def on_kind(request: pytest.FixtureRequest, tmp_path: Path, opens: Opens[T], **known: Any) -> AsyncIterator[T]:
    """A fleet of the kind that the fixture's parameter says, one of `KINDS`."""
    if request.param == KINDS[0]:
        async with opens(sqlite_url(tmp_path), **known) as opened:
            yield opened
        return
    url = request.getfixturevalue("postgres_url")
    async with open_yard("nats", tmp_path / "bus") as yard, opens(url, yard=yard, **known) as opened:
        yield opened


@pytest.fixture(params=KINDS)
async def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Fleet]:
    """One controller, no node yet."""
    async with on_kind(request, tmp_path, open_fleet) as opened:
        yield opened


@pytest.fixture
async def local_fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """On the bus's twin, which loses and doubles on request."""
    async with open_fleet(sqlite_url(tmp_path)) as opened:
        yield opened
