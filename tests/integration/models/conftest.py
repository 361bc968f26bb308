from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral.store import Store, open_store
from tests.support.postgres import postgres, postgres_url
from tests.support.sqlite import sqlite_url

__all__ = ["postgres", "postgres_url"]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return sqlite_url(tmp_path)
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    async with open_store(url) as opened:
        yield opened


@pytest.fixture
async def other(url: str) -> AsyncIterator[Store]:
    """As another controller has it."""
    async with open_store(url) as opened:
        yield opened
