"""What becomes of a stream when something happens in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest

from corral.gateway.main import Gateway
from corral.gateway.receipts.metrics import render
from tests.integration.gateway.conftest import KEYS, USER, OpenGateway, bearer
from tests.integration.gateway.fleet import CHAT, GatewayFleet, open_fleet
from tests.integration.gateway.scripted_controller import ScriptedController
from tests.integration.gateway.scripted_ingress import ROLE
from tests.support.relay import HeldClock
from tests.support.waiting import until

HALF = b'data: {"choices":[{"delta":{"content":"0"}}]}\n\ndata: {"choices":[{"delta":{"content":"1"}}]}\n\n'


@pytest.fixture
async def fleet(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> AsyncIterator[GatewayFleet]:
    async with open_fleet(controller, open_one, http) as fleet:
        yield fleet


async def streaming(fleet: GatewayFleet, gateway: Gateway) -> aiohttp.ClientResponse:
    """A stream of which half has come, the rest waiting for `paused`."""
    body = {"model": "small", "stream": True}
    answer = await fleet.http.post(f"{gateway.url}{CHAT}", headers=bearer(USER), json=body)
    assert (answer.status, await answer.content.readexactly(len(HALF))) == (200, HALF)
    return answer


async def test_a_key_revoked_in_mid_stream_finishes_it_and_gets_no_other(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1", slots=8)])
    gateway = await fleet.gateway()
    fleet.one.paused = asyncio.Event()
    answer = await streaming(fleet, gateway)
    fleet.controller.change(keys=[row for row in KEYS if row["id"] != f"id-{USER}"])
    await gateway.views.run_once()
    assert (await fleet.ask(gateway))[0] == 401
    fleet.one.paused.set()
    assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    assert [(row["status"], row.get("ending")) for row in await fleet.receipts(1)] == [(200, None)]


async def test_first_is_when_the_first_content_came_not_the_head(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1", slots=8)])
    gateway = await fleet.gateway()
    fleet.one.reading = asyncio.Event()
    body = {"model": "small", "stream": True}
    answer = await fleet.http.post(f"{gateway.url}{CHAT}", headers=bearer(USER), json=body)
    assert (answer.status, await answer.content.readany()) == (200, ROLE)
    read_for_s = 0.3
    asyncio.get_running_loop().call_later(read_for_s, fleet.one.reading.set)
    await answer.read()
    [receipt] = await fleet.receipts(1)
    assert receipt["total_ms"] >= receipt["first_byte_ms"] >= read_for_s * 1000
    lines = render(gateway.metrics, now=0.0).decode().splitlines()
    assert 'corral_gateway_first_byte_seconds_count{route="inference"} 1.0' in lines
    assert 'corral_gateway_first_byte_seconds_bucket{le="0.25",route="inference"} 0.0' in lines


async def test_a_process_that_dies_in_mid_stream_cuts_the_answer_and_no_other(fleet: GatewayFleet) -> None:
    fleet.both(slots=8)
    gateway = await fleet.gateway()
    fleet.one.paused = fleet.two.paused = asyncio.Event()
    answers = [await streaming(fleet, gateway) for _ in range(4)]
    fleet.one.cut = True
    fleet.one.paused.set()
    whole = 0
    for answer in answers:
        with contextlib.suppress(aiohttp.ClientPayloadError):  # what was not sent whole does not look whole
            whole += (await answer.read()).endswith(b"data: [DONE]\n\n")
    assert whole == 2
    assert [row.get("ending") for row in await fleet.receipts(4)].count("upstream_broke") == 2
    fleet.one.paused = fleet.two.paused = None
    assert await fleet.who(gateway) in ("p1", "p2")


async def test_a_process_that_hangs_without_closing_is_given_up_after_a_while(
    fleet: GatewayFleet, clock: HeldClock
) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway(replica_idle_s=0.3, replica_first_byte_s=0.4)
    fleet.one.paused = asyncio.Event()
    answer = await streaming(fleet, gateway)
    clock.let_go()
    with pytest.raises(aiohttp.ClientPayloadError):
        await answer.read()
    clock.hold()
    fleet.one.held = asyncio.Event()  # the next hangs before it has said a word
    asking = asyncio.create_task(fleet.ask(gateway))
    await until(lambda: len(fleet.one.came) == 2, "it is asked")
    clock.let_go()
    status, told, _ = await asking
    assert (status, told["error"]["code"]) == (504, "upstream_failed")
    clock.hold()
    fleet.one.held = None
    assert await fleet.who(gateway) == "p1", "its slot is free"
    endings = [(row["status"], row.get("ending")) for row in await fleet.receipts(3)]
    assert endings[:2] == [(200, "upstream_broke"), (504, None)]
    assert [row.get("error", "") for row in await fleet.receipts(3)] == ["", "upstream_failed", ""]


async def test_a_client_that_leaves_in_mid_stream_stops_the_generation(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway()
    fleet.one.paused = asyncio.Event()
    answer = await streaming(fleet, gateway)
    answer.close()
    await until(lambda: fleet.one.running["p1"] == 0, "the process is told")
    assert [row.get("ending") for row in await fleet.receipts(1)] == ["client_left"]
