from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.backend_fleet import Fleet, open_fleet, sqlite_url


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """One controller, no node yet."""
    async with open_fleet(sqlite_url(tmp_path)) as opened:
        yield opened
