"""Keeping the view: what is read when, and what stays while nobody answers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from corral.contract.view import FleetView, ViewKey
from corral.gateway.view.cache import ViewCache, ViewCounts
from corral.gateway.view.controller_link import ReadView
from corral.kit.errors import Denied, Unavailable
from tests.support.scripted_controller_link import ScriptedControllerLink


class HandClock:
    """Stands still until moved; a sleeper only lets others run."""

    def __init__(self) -> None:
        self.wall = 1_000_000.0
        self.ticks = 50.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.wall, UTC)

    def monotonic(self) -> float:
        return self.ticks

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def move(self, seconds: float) -> None:
        self.wall += seconds
        self.ticks += seconds


class Scripted(ScriptedControllerLink):
    """A controller with one view; notes what it was asked."""

    def __init__(self) -> None:
        self.view = FleetView(revision=1)
        self.last_error: Exception | None = None
        self.asked: list[str | None] = []
        self.looks: asyncio.Queue[str | None] = asyncio.Queue()

    async def read_view(self, known_etag: str | None) -> ReadView | None:
        self.asked.append(known_etag)
        self.looks.put_nowait(known_etag)
        if self.last_error is not None:
            raise self.last_error
        etag = f'"{self.view.revision}"'
        return None if known_etag == etag else ReadView(self.view, etag)


def keeper(source: Scripted, clock: HandClock) -> tuple[ViewCache, ViewCounts]:
    counts = ViewCounts()
    return ViewCache(source, counts, clock, check_interval_s=1, full_interval_s=15, gap_s=0.01), counts


async def test_unchanged_views_are_asked_for_by_their_etag() -> None:
    source, clock = Scripted(), HandClock()
    keep, counts = keeper(source, clock)
    for _ in range(3):
        await keep.run_once()
        clock.move(1)
    assert source.asked == [None, '"1"', '"1"']
    assert (counts.reads, counts.unchanged) == (1, 2)


async def test_the_view_is_read_whole_now_and_then() -> None:
    # The same revision need not be the same view: think of a database restored from a copy.
    source, clock = Scripted(), HandClock()
    keep, _ = keeper(source, clock)
    await keep.run_once()
    before = keep.fleet
    source.view = FleetView(revision=1, keys=(ViewKey(id="a", secret_hash="ab" * 32, role="admin"),))
    clock.move(14.9)
    await keep.run_once()
    assert keep.fleet is before
    clock.move(0.2)
    await keep.run_once()
    assert source.asked[-1] is None
    assert keep.fleet is not None
    assert len(keep.fleet.clients) == 1


async def test_the_last_view_stays_while_the_controller_is_away() -> None:
    source, clock = Scripted(), HandClock()
    keep, counts = keeper(source, clock)
    assert keep.last_error
    await keep.run_once()
    for trouble in (Unavailable("gone"), Denied("another key")):
        source.last_error = trouble
        clock.move(86_400)
        await keep.run_once()
        assert keep.fleet is not None
        assert keep.fleet.revision == 1
        assert keep.last_error == str(trouble)
        assert not counts.controller_reachable
    source.last_error = None
    source.view = FleetView(revision=2)
    await keep.run_once()
    assert keep.fleet is not None
    assert keep.fleet.revision == 2
    assert not keep.last_error
    assert counts.controller_reachable
    assert counts.failures == 2


async def test_expiry_is_judged_by_the_controllers_clock() -> None:
    source, clock = Scripted(), HandClock()
    keep, _ = keeper(source, clock)
    assert keep.server_now() == 1_000_000
    source.view = FleetView(revision=1, server_time=1_000_300.0)
    await keep.run_once()
    clock.move(10)
    assert keep.server_now() == 1_000_310


async def test_hints_make_one_more_look_however_many_they_are() -> None:
    source = Scripted()
    counts = ViewCounts()
    keep = ViewCache(source, counts, HandClock(), check_interval_s=3600, full_interval_s=3600, gap_s=0.01)
    running = asyncio.create_task(keep.run())
    async with asyncio.timeout(10):
        await source.looks.get()
        for _ in range(100):
            keep.hint()
        await source.looks.get()
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(source.asked) == 2
    running.cancel()
    await asyncio.wait([running])
