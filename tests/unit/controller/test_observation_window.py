"""Our own outages, sleeps and leaps of a clock: time in which silence proves nothing."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from corral.bus.local import LocalBus, LocalHub
from corral.controller.health.observation_window import ObservationWindow
from tests.support.manual_clock import ManualClock

GAP_S = 30.0


class Ears:
    """A controller that writes a batch a second, on a clock of ours; the database has its own."""

    def __init__(self, hub: LocalHub, bus: LocalBus, clock: ManualClock) -> None:
        self.hub = hub
        self.clock = clock
        self.database_ahead_s = 0.0
        self.listening = ObservationWindow(bus, clock, longest_gap_s=GAP_S)

    @property
    def database_now(self) -> datetime:
        return self.clock.now() + timedelta(seconds=self.database_ahead_s)

    def work(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1)
            self.listening.recorded(self.database_now)

    @property
    def seconds(self) -> float:
        return self.listening.seconds(self.database_now)


@pytest.fixture
async def ears() -> Ears:
    clock = ManualClock()
    hub = LocalHub(clock)
    return Ears(hub, hub.join("controller"), clock)


async def test_it_counts_from_the_first_batch(ears: Ears) -> None:
    assert ears.seconds == 0.0
    ears.work(61)
    assert ears.seconds == 60.0


async def test_a_failed_batch_starts_over(ears: Ears) -> None:
    ears.work(100)
    ears.listening.not_recorded()
    assert ears.seconds == 0.0
    ears.work(10)
    assert ears.seconds == 9.0


async def test_without_the_bus_nothing_counts(ears: Ears) -> None:
    ears.work(100)
    ears.hub.cut("controller")
    assert ears.listening.is_deaf
    assert ears.seconds == 0.0
    ears.hub.heal("controller")
    ears.work(10)
    assert ears.seconds == 10.0


@pytest.mark.parametrize("first", ["monitor", "batch"])
async def test_a_process_that_was_stopped_begins_anew_whichever_loop_wakes_first(ears: Ears, first: str) -> None:
    ears.work(100)
    ears.clock.advance(61)
    if first == "monitor":
        assert ears.seconds == 0.0
    ears.listening.recorded(ears.database_now)
    assert ears.seconds == 0.0
    ears.work(59)
    assert ears.seconds == 59.0


@pytest.mark.parametrize("first", ["monitor", "batch"])
async def test_a_leap_of_the_databases_clock_is_a_gap_too(ears: Ears, first: str) -> None:
    """A laptop that was closed: our clock stood still, the database's did not. Or somebody set it."""
    ears.work(100)
    ears.database_ahead_s += 3600
    if first == "monitor":
        assert ears.seconds == 0.0
    ears.work(10)
    assert ears.seconds == 9.0


async def test_a_clock_set_back_is_a_gap(ears: Ears) -> None:
    ears.work(100)
    ears.database_ahead_s -= 3600
    assert ears.seconds == 0.0
    ears.work(10)
    assert ears.seconds == 9.0


async def test_small_steps_do_not_matter(ears: Ears) -> None:
    ears.work(100)
    ears.database_ahead_s += 5
    ears.work(1)
    ears.database_ahead_s -= 10
    ears.clock.advance(GAP_S - 5)
    ears.work(1)
    assert ears.seconds == 99 + 1 + GAP_S - 5 + 1
