from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.backend_fleet import sqlite_url
from tests.support.both_kinds import KINDS, on_kind, postgres, postgres_url
from tests.support.replica_fleet import ReplicaFleet, open_replica_fleet

__all__ = ["fleet", "local", "postgres", "postgres_url"]


@pytest.fixture(params=KINDS)
async def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ReplicaFleet]:
    """One controller, no node yet."""
    async with on_kind(request, tmp_path, open_replica_fleet) as opened:
        yield opened


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[ReplicaFleet]:
    async with open_replica_fleet(sqlite_url(tmp_path)) as opened:
        yield opened
