"""What a gateway reports of the requests under way while somebody looks: on both paths, and of those that wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from corral.gateway.main import Gateway
from tests.integration.gateway.conftest import USER, OpenGateway, bearer
from tests.integration.gateway.fleet import CHAT, SMALL, GatewayFleet, open_fleet
from tests.integration.gateway.scripted_controller import ScriptedController
from tests.support.waiting import until


@pytest.fixture
async def fleet(controller: ScriptedController, open_one: OpenGateway) -> AsyncIterator[GatewayFleet]:
    async with aiohttp.ClientSession() as http, open_fleet(controller, open_one, http) as fleet:
        fleet.controller.change(models=[SMALL], replicas=[fleet.one.replica("p1", slots=4)])
        yield fleet


async def report(fleet: GatewayFleet, gateway: Gateway) -> dict[str, Any]:
    """The next one."""
    before = len(fleet.controller.running)
    gateway.running.on_wanted(10.0)
    await until(lambda: len(fleet.controller.running) > before, "a report")
    return fleet.controller.running[-1]


@contextlib.asynccontextmanager
async def held(fleet: GatewayFleet, gateway: Gateway, count: int) -> AsyncIterator[None]:
    fleet.one.held = asyncio.Event()
    came = len(fleet.one.came)
    asked = [asyncio.create_task(fleet.who(gateway)) for _ in range(count)]
    await until(lambda: len(fleet.one.came) == came + count, "all are under way")
    yield
    fleet.one.held.set()
    await asyncio.gather(*asked)
    fleet.one.held = None


async def test_those_of_both_paths_are_reported_oldest_first(fleet: GatewayFleet) -> None:
    gateway = await fleet.gateway()
    assert await fleet.who(gateway) == "p1"  # leaves an idle connection, so the next request takes the fast path
    async with held(fleet, gateway, 3):
        on_fast_path = gateway.server.running_forwards()
        assert 1 <= len(on_fast_path) <= 3
        told = await report(fleet, gateway)
    assert (told["total"], len(told["requests"])) == (3, 3)
    assert [each["at"] for each in told["requests"]] == sorted(each["at"] for each in told["requests"])
    for each in told["requests"]:
        assert (each["model"], each["path"], each["node_id"], each["process_id"]) == ("small", CHAT, "n1", "p1")
        assert each["key_id"]
    assert len({each["id"] for each in told["requests"]}) == 3


async def test_one_that_waits_has_no_node_yet(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway()
    async with held(fleet, gateway, 1):
        waiting = asyncio.create_task(fleet.who(gateway))
        await until(
            lambda: bool(fleet.controller.batches) and bool(fleet.controller.batches[-1]["waiting"]), "it waits"
        )
        told = await report(fleet, gateway)
        assert [each.get("node_id", "") for each in told["requests"]] == ["n1", ""]
    assert await waiting == "p1"


async def test_the_events_of_a_stream_are_counted(fleet: GatewayFleet) -> None:
    gateway = await fleet.gateway()
    fleet.one.paused = asyncio.Event()
    for _ in range(2):  # the second time on the fast path
        body = {"model": "small", "stream": True, "messages": []}
        async with fleet.http.post(gateway.url + CHAT, headers=bearer(USER), json=body) as answer:
            assert b"content" in await answer.content.readline()
            seen = 0
            while not seen:
                told = (await report(fleet, gateway))["requests"]
                seen = told[0].get("tokens", 0)
            assert seen <= 2
            fleet.one.paused.set()
            await answer.read()
        fleet.one.paused = asyncio.Event()


async def test_what_has_ended_is_not_reported_and_nobody_who_looks_means_no_report(fleet: GatewayFleet) -> None:
    gateway = await fleet.gateway()
    for _ in range(2):
        await fleet.who(gateway)
    assert fleet.controller.running == []
    told = await report(fleet, gateway)
    assert (told["total"], told["requests"]) == (0, [])
