"""Every test of the relay runs on uvloop, as in production, with the short way and without, and on asyncio's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.support.relay import HeldClock, hold_clock


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops = {"uvloop": uvloop.new_event_loop, "quick": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    if "test_short_way" in item.nodeid:
        del loops["quick"]  # these choose their way themselves
    return loops


@pytest.fixture(autouse=True)
def _ways_of_writing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On asyncio's loop bytes are always written together, as they are when many requests are under way."""
    if "asyncio" in request.node.name:
        monkeypatch.setattr("corral.relay.outbox._FEW", -1)


@pytest.fixture(autouse=True)
def _ways_of_relaying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are the same, byte for byte, whichever way they took: no test knows which it is."""
    if "quick" in request.node.name:
        monkeypatch.setattr("tests.support.relay.QUICK", True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    return hold_clock(monkeypatch)
