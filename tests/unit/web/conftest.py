from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from litestar.testing import AsyncTestClient

from tests.support.manual_clock import ManualClock
from tests.support.page import PageApp, open_page_app
from tests.unit.web.browsing import Browser


@pytest.fixture
def door_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def page(tmp_path: Path, door_clock: ManualClock) -> AsyncIterator[PageApp]:
    async with open_page_app(tmp_path, door_clock=door_clock) as page:
        yield page


@pytest.fixture
async def browser(page: PageApp) -> AsyncIterator[Browser]:
    async with AsyncTestClient(page.app, base_url="http://corral.local") as client:
        yield Browser(client, page)
