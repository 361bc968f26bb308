from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.backend_fleet import sqlite_url
from tests.support.buses import open_yard
from tests.support.postgres import postgres, postgres_url
from tests.support.replica_fleet import ReplicaFleet, open_replica_fleet

__all__ = ["fleet", "local", "postgres", "postgres_url"]


@pytest.fixture(params=["sqlite and the bus's twin", "postgresql and nats"])
async def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ReplicaFleet]:
    """One controller, no node yet."""
    if request.param.startswith("sqlite"):
        async with open_replica_fleet(sqlite_url(tmp_path)) as opened:
            yield opened
        return
    url = request.getfixturevalue("postgres_url")
    async with open_yard("nats", tmp_path / "bus") as yard, open_replica_fleet(url, yard=yard) as opened:
        yield opened


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[ReplicaFleet]:
    async with open_replica_fleet(sqlite_url(tmp_path)) as opened:
        yield opened
