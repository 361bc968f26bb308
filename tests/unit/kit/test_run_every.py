"""Loops outlive their mistakes, and are woken."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
import structlog.testing

from corral.kit.errors import Conflict, Unavailable
from corral.kit.tasks import Wake, flatten_errors, run_every
from tests.support.waiting import DEADLINE_S


class JumpingClock:
    """Time passes only by sleeping."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> datetime:
        return datetime.fromtimestamp(sum(self.slept), UTC)

    def monotonic(self) -> float:
        return sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


async def test_a_failing_step_is_backed_off_and_the_loop_goes_on() -> None:
    clock = JumpingClock()
    outcomes: list[Exception | None] = [None, Unavailable("gone"), ValueError("odd"), Unavailable("gone"), None]
    done = asyncio.Event()

    async def step() -> None:
        if not outcomes:
            done.set()
            return
        outcome = outcomes.pop(0)
        if outcome:
            raise outcome

    loop = asyncio.create_task(run_every("test", 300.0, step, clock=clock, max_wait_s=10.0))
    await asyncio.wait_for(done.wait(), DEADLINE_S)
    loop.cancel()
    ok, first, second, third, after = clock.slept[:5]
    assert ok == after == 300.0
    assert 0.8 <= first <= 1.2, "a slow loop tries again soon after a failure"
    assert second > first
    assert third <= 12


async def test_a_trouble_that_lasts_is_told_when_it_begins_and_when_it_is_over() -> None:
    failures = [Unavailable("away")] * 50 + [Conflict("otherwise")] * 50
    done = asyncio.Event()

    async def step() -> None:
        if failures:
            raise failures.pop(0)
        done.set()

    with structlog.testing.capture_logs() as lines:
        loop = asyncio.create_task(run_every("test", 1.0, step, clock=JumpingClock()))
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        await asyncio.sleep(0)
        loop.cancel()
    told = [(line["event"], line.get("error")) for line in lines if line["log_level"] != "debug"]
    assert told == [
        ("loop will try again", "away"),
        ("loop will try again", "otherwise"),
        ("loop works again", None),
    ]


async def test_a_wake_makes_the_loop_look_at_once_and_many_count_as_one() -> None:
    wake, looks = Wake(), 0

    async def step() -> None:
        nonlocal looks
        looks += 1

    loop = asyncio.create_task(run_every("test", 3600.0, step, clock=JumpingClock(), wake=wake))
    for expected in (1, 2, 3):
        async with asyncio.timeout(DEADLINE_S):
            while looks < expected:  # noqa: ASYNC110 - the loop under test has no event to offer
                await asyncio.sleep(0)
        wake.set()
        wake.set()
    loop.cancel()


async def test_cancelling_passes_through() -> None:
    async def step() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await run_every("test", 1.0, step, clock=JumpingClock())


def test_leaves_of_nested_groups() -> None:
    one, two = ValueError("1"), ValueError("2")
    assert flatten_errors(ExceptionGroup("a", [one, ExceptionGroup("b", [two])])) == [one, two]
    assert flatten_errors(one) == [one]
