"""Every test of the relay runs on uvloop, as in production, with the fast path and without it, and on asyncio's
loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.support.relay import HeldClock, hold_clock


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops = {"uvloop": uvloop.new_event_loop, "fast-path": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    if "test_fast_path" in item.nodeid:
        del loops["fast-path"]  # these tests turn the fast path on and off themselves
    return loops


@pytest.fixture(autouse=True)
def _write_together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On asyncio's loop bytes are always written together, as they are when many requests are in flight."""
    if "asyncio" in request.node.name:
        monkeypatch.setattr("corral.relay.write_queue._FEW", -1)


@pytest.fixture(autouse=True)
def _fast_path_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both paths give the same answers, byte for byte: no test knows which path a request took."""
    if "fast-path" in request.node.name:
        monkeypatch.setattr("tests.support.relay.FAST_PATH_ON", True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    return hold_clock(monkeypatch)
