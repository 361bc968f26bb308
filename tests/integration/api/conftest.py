from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.backend_api import Api, open_api


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    """One controller's doors, no node yet."""
    async with open_api(tmp_path) as opened:
        yield opened
