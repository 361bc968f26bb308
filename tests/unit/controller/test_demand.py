"""What gateways lack, as every controller knows it, whichever they told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from corral.bus.local import LocalHub
from corral.contract.receipts import Receipts
from corral.controller.gateways.demand import Demand
from tests.support.manual_clock import ManualClock
from tests.support.waiting import until


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def two(clock: ManualClock) -> AsyncIterator[list[Demand]]:
    hub = LocalHub(clock)
    async with hub.join("c1") as one, hub.join("c2") as other:
        made = [Demand(one, clock), Demand(other, clock)]
        tasks = [asyncio.create_task(each.run()) for each in made]
        await until(lambda: len(one.active_registrations()) == len(other.active_registrations()) == 1, "both listen")
        yield made
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_pressure_is_counted_for_a_minute_and_then_forgotten(two: list[Demand], clock: ManualClock) -> None:
    first, second = two
    await first.take(Receipts(gateway="g1", pressure={"m": 2}))
    await until(lambda: second.pressure("m", 60.0) == 2, "the other hears of it")
    clock.advance(10)
    await second.take(Receipts(gateway="g2", pressure={"m": 3, "n": 1}))
    await until(lambda: first.pressure("m", 60.0) == 5, "and the other way round")
    for each in two:
        assert (each.pressure("m", 3600.0), each.pressure("m", 5.0), each.pressure("n", 60.0)) == (5, 3, 1), "once"
    clock.advance(55)
    assert first.pressure("m", 3600.0) == 3
    clock.advance(10)
    await first.take(Receipts(gateway="g1"))
    assert (first.pressure("m", 3600.0), first._pressure) == (0, {}), "nothing is kept of what is over"


async def test_those_who_wait_count_until_the_gateway_says_otherwise_or_nothing(
    two: list[Demand], clock: ManualClock
) -> None:
    first, second = two
    await first.take(Receipts(gateway="g1", waiting={"m": 2}))
    await second.take(Receipts(gateway="g2", waiting={"m": 1, "n": 4}))
    for each in two:
        await until(lambda each=each: each.waiting() == {"m": 3, "n": 4}, "both know of both")  # type: ignore[misc]
    await first.take(Receipts(gateway="g1"))
    for each in two:
        await until(lambda each=each: each.waiting() == {"m": 1, "n": 4}, "g1 has none")  # type: ignore[misc]
    clock.advance(6)
    assert first.waiting() == second.waiting() == {}, "g2 has not told for long"
