"""The same tests on SQLite and the bus's twin, and on PostgreSQL and NATS.

Use the fixtures by importing them: `from tests.support.both_kinds import fleet, local_fleet, postgres, postgres_url`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.backend_fleet import Fleet, open_fleet, sqlite_url
from tests.support.buses import open_yard
from tests.support.postgres import postgres, postgres_url

__all__ = ["fleet", "local_fleet", "postgres", "postgres_url"]


@pytest.fixture(params=["sqlite and the bus's twin", "postgresql and nats"])
async def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Fleet]:
    """One controller, no node yet."""
    if request.param.startswith("sqlite"):
        async with open_fleet(sqlite_url(tmp_path)) as opened:
            yield opened
        return
    url = request.getfixturevalue("postgres_url")
    async with open_yard("nats", tmp_path / "bus") as yard, open_fleet(url, yard=yard) as opened:
        yield opened


@pytest.fixture
async def local_fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """On the bus's twin, which loses and doubles on request."""
    async with open_fleet(sqlite_url(tmp_path)) as opened:
        yield opened
