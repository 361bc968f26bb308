"""Requests under way as every controller lists them, whichever the gateways told, and only while somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral.bus.api import Tokens
from corral.bus.local import LocalHub
from corral.contract.messages.hints import RUNNING_WANTED, RunningWanted
from corral.contract.receipts import MAX_RUNNING, RunningReport, RunningRequest
from corral.controller.gateways.running import RunningRequests
from corral.store.open import open_store
from tests.support.manual_clock import ManualClock
from tests.support.waiting import until


class Two:
    def __init__(self, first: RunningRequests, second: RunningRequests, asked: list[float]) -> None:
        self.first = first
        self.second = second
        self.asked = asked  # hints that gateways received


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def two(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Two]:
    hub, asked = LocalHub(clock), list[float]()

    async def on_wanted(wanted: RunningWanted, _tokens: Tokens) -> None:
        asked.append(wanted.for_s)

    async with (
        open_store(f"sqlite:///{tmp_path / 'corral.db'}") as store,
        hub.join("c1") as one,
        hub.join("c2") as other,
        hub.join("gateway") as gateway,
    ):
        made = [RunningRequests(store, bus, clock) for bus in (one, other)]
        tasks = [asyncio.create_task(each.run()) for each in made]
        await gateway.subscribe(RUNNING_WANTED, on_wanted)
        await until(lambda: len(one.active_registrations()) == len(other.active_registrations()) == 1, "both listen")
        yield Two(made[0], made[1], asked)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def request(name: str, at: float = 100.0, **more: object) -> RunningRequest:
    return RunningRequest(name, at, "key-1", "tiny", "/v1/chat/completions", **more)  # type: ignore[arg-type]


async def ids(running: RunningRequests, **filters: str) -> list[str]:
    return [each.id for each in (await running.list_views(**filters)).requests]  # type: ignore[arg-type]


async def test_the_other_controller_lists_them_too_and_the_oldest_come_first(two: Two) -> None:
    await two.first.take(RunningReport("g1", (request("b", 20.0, node_id="n1", tokens=7), request("c", 30.0)), 2))
    await two.second.take(RunningReport("g2", (request("a", 10.0),), 1))
    for each in (two.first, two.second):
        async with asyncio.timeout(10):
            while await ids(each) != ["a", "b", "c"]:  # noqa: ASYNC110 - another controller's message decides
                await asyncio.sleep(0.001)
    views = (await two.first.list_views()).requests
    assert [(view.state, view.node_id, view.tokens) for view in views] == [
        ("waiting", "", 0),
        ("running", "n1", 7),
        ("waiting", "", 0),
    ]
    assert await ids(two.first, node="n1") == ["b"]
    assert await ids(two.first, model="other") == []


async def test_a_key_sees_and_counts_its_own(two: Two) -> None:
    mine = RunningRequest("mine", 1.0, "key-2", "tiny", "/v1/embeddings")
    await two.first.take(RunningReport("g1", (mine, request("a")), 500))
    own = await two.first.list_views(key_id="key-2")
    assert ([each.id for each in own.requests], own.total) == (["mine"], 1)
    assert (await two.first.list_views()).total == 500
    assert (await two.first.list_views(key_id="key-3")).total == 0


async def test_the_list_is_bounded(two: Two) -> None:
    for gateway in range(3):
        found = tuple(request(f"{gateway}-{number}", float(number)) for number in range(MAX_RUNNING))
        await two.first.take(RunningReport(f"g{gateway}", found, 1000))
    listed = await two.first.list_views()
    assert (len(listed.requests), listed.total) == (MAX_RUNNING, 3000)


async def test_gateways_are_asked_only_while_somebody_looks(two: Two, clock: ManualClock) -> None:
    assert two.asked == []
    for _ in range(5):
        await two.first.list_views()
    await until(lambda: len(two.asked) == 1, "asked once")
    clock.advance(4.5)
    await two.first.list_views()
    await until(lambda: len(two.asked) == 2, "and again, before the gateways stop")
    assert all(for_s > 4.5 for for_s in two.asked)


async def test_a_gateway_that_is_gone_is_forgotten(two: Two, clock: ManualClock) -> None:
    await two.first.take(RunningReport("g1", (request("a"),), 1))
    assert await ids(two.first) == ["a"]
    clock.advance(6)
    assert await ids(two.first) == []


async def test_the_first_look_waits_for_gateways_that_reported_before(two: Two, clock: ManualClock) -> None:
    await two.first.take(RunningReport("g1", (request("old"),), 1))
    clock.advance(60)
    looking = asyncio.create_task(two.first.list_views(wait_s=30.0))
    await until(lambda: two.asked != [], "the gateways are asked")
    await two.first.take(RunningReport("g1", (request("new"),), 1))
    assert [each.id for each in (await looking).requests] == ["new"]
