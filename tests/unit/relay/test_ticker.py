"""The ticker ticks only while it has something to watch, and deadlines never come early."""

from __future__ import annotations

import asyncio
import time

import pytest

from corral.contract.http import Patience
from corral.relay import Limits, PoolLimits, Timeouts
from corral.relay.limits import choose_tick_s
from corral.relay.loop.ticker import Ticker
from tests.support.relay import HeldClock, hold_clock
from tests.support.waiting import until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    return hold_clock(monkeypatch)


class Watched:
    def __init__(self, ticker: Ticker, span_s: float) -> None:
        self.ticker = ticker
        self.started = min(time.monotonic(), ticker.now + ticker.tick_s)  # a loop that stood still knows no later time
        self.deadline = ticker.deadline(span_s)
        self.expired_after_s = 0.0

    def postpone(self, span_s: float) -> None:
        self.deadline += span_s

    def check(self, now: float) -> None:
        if now >= self.deadline:
            self.expired_after_s = time.monotonic() - self.started
            self.ticker.discard(self)


async def test_a_deadline_comes_on_time_but_never_early() -> None:
    ticker = Ticker(0.01)
    keeper = Watched(ticker, 60)
    ticker.add(keeper)
    await asyncio.sleep(0.025)  # the ticker's time may now be a tick old
    watched = Watched(ticker, 0.05)
    ticker.add(watched)
    await until(lambda: watched.expired_after_s)
    assert watched.expired_after_s >= 0.05
    ticker.discard(keeper)


async def test_time_in_which_a_process_stood_still_is_nobodys_fault(clock: HeldClock) -> None:
    ticker = Ticker(0.01)
    silent, heard = Watched(ticker, 5), Watched(ticker, 5)
    for each in (silent, heard):
        ticker.add(each)
    clock.leap(60)
    heard.deadline = ticker.deadline(5)  # what was sent to it meanwhile is read first, and the ticker does not know yet
    await until(lambda: ticker.now == clock.monotonic())
    assert (silent.expired_after_s, heard.expired_after_s) == (0, 0)
    await clock.forward(4.5, ticker)
    assert (silent.expired_after_s, heard.expired_after_s) == (0, 0)
    await clock.forward(1, ticker)
    assert silent.expired_after_s > 0
    assert heard.expired_after_s > 0


@pytest.mark.parametrize("uptime_s", [0.5, 1000.0, 3000.0, 5000.0, 6000.0, 3_456_000.0, 1e9])
async def test_deadlines_come_though_every_tick_is_late(clock: HeldClock, uptime_s: float) -> None:
    """Six leaps make up the span; whether the deadline comes with the sixth or the seventh is a matter of rounding,
    which differs with the machine's uptime."""
    clock.leap(uptime_s - clock.monotonic())
    ticker = Ticker(0.01)
    keeper = Watched(ticker, 60)  # a ticker without members would stop at the sixth
    watched = Watched(ticker, 0.05)
    for each in (keeper, watched):
        ticker.add(each)
    for leap in range(1, 8):
        clock.leap(1)
        await until(lambda: ticker.now == clock.monotonic())
        assert leap > 5 or not watched.expired_after_s
    assert watched.expired_after_s > 0
    ticker.discard(keeper)


def ticking(ticker: Ticker) -> bool:
    return ticker._timer is not None


async def test_a_wheel_without_members_stands_still() -> None:
    ticker = Ticker(0.01)
    watched = Watched(ticker, 60)
    ticker.add(watched)
    assert ticking(ticker)
    ticker.discard(watched)
    assert not ticking(ticker)
    ticker.discard(watched)


def test_ticks_follow_the_shortest_deadline_within_bounds() -> None:
    assert choose_tick_s(100) == 1.0
    assert choose_tick_s(0.4) == 0.1
    assert choose_tick_s(0.001) == 0.01
    assert Timeouts().tick_s() <= 1.0
    assert Timeouts(head_s=0.2).tick_s() == 0.05
    assert PoolLimits(patience=Patience(first_byte_s=0.2)).tick_s() == 0.05
    assert PoolLimits().tick_s() == 1.0


def test_the_defaults_that_others_rely_on() -> None:
    assert Limits().head_bytes == 65536
    assert PoolLimits().patience == Patience(None, None)
