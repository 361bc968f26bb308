from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser

from tests.support.chromium import chromium


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One for all tests of a file: starting it takes longer than most of them do."""
    async with chromium() as browser:
        yield browser
