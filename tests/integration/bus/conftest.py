from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.buses import Yard, open_yard
from tests.support.nats import nats_server

__all__ = ["nats_server"]


@pytest.fixture(params=["nats", "local"])
async def yard(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Yard]:
    async with open_yard(request.param, tmp_path) as opened:
        yield opened
