"""A supervisor per test, in a folder of its own; whatever it started is gone afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from corral.worker.supervisor.supervisor import Supervisor
from tests.support.supervising import make_supervisor, swept

Open = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "processes"
    with swept(where):
        yield where


@pytest.fixture
async def opened(folder: Path) -> AsyncIterator[Open]:
    """`await opened(grace_s=1)` gives a supervisor with these settings."""
    async with AsyncExitStack() as stack:

        async def open_one(environ: dict[str, str] | None = None, **changed: Any) -> Supervisor:
            supervisor = await stack.enter_async_context(make_supervisor(folder, environ=environ, **changed))
            stack.push_async_callback(supervisor.stop_all, grace_s=0.0, force=True, closing=True)
            return supervisor

        yield open_one


@pytest.fixture
async def supervisor(opened: Open) -> Supervisor:
    made: Supervisor = await opened()
    return made
