"""Bodies of requests for models: when they are read, how many of them are kept, and what is changed in them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from corral.gateway.main import Gateway
from corral.gateway.receipts.metrics import RouteClass, render
from tests.integration.gateway.conftest import KEYS, USER, OpenGateway, bearer
from tests.integration.gateway.fleet import CHAT, SMALL, GatewayFleet, open_fleet
from tests.integration.gateway.raw_client import connected
from tests.integration.gateway.scripted_controller import ScriptedController, key
from tests.support.waiting import until

MIB = 1024 * 1024


@pytest.fixture
async def fleet(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> AsyncIterator[GatewayFleet]:
    async with open_fleet(controller, open_one, http) as fleet:
        yield fleet


def rendered(gateway: Gateway) -> str:
    return render(gateway.metrics, now=0.0).decode()


def head(secret: str, length: int | None) -> bytes:
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: corral\r\nAuthorization: Bearer {secret}\r\n"
        f"Content-Type: application/json\r\n{framing}\r\n\r\n"
    ).encode()


async def answer_to_a_head(gateway: Gateway, secret: str, length: int) -> tuple[int, dict[str, str]]:
    """What is answered while not a byte of the body has been sent."""
    async with connected(gateway.port) as (reader, writer), asyncio.timeout(10):
        writer.write(head(secret, length))
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers


async def test_a_key_over_its_limits_is_refused_before_its_body_is_read(fleet: GatewayFleet) -> None:
    keys = [
        *KEYS,
        key("ck_few", "inference", limits={"requests_per_min": 1}),
        key("ck_one", "inference", limits={"concurrent": 1}),
    ]
    fleet.controller.change(keys=keys, replicas=[fleet.one.replica("p1", slots=8)])
    gateway = await fleet.gateway()
    assert (await fleet.ask(gateway, secret="ck_few"))[0] == 200
    status, headers = await answer_to_a_head(gateway, "ck_few", 60 * MIB)
    assert (status, int(headers["retry-after"]) >= 1) == (429, True)

    # A body on its way counts as a request under way, and ends as one when its client leaves.
    async with connected(gateway.port) as (_, writer):
        writer.write(head("ck_one", 60 * MIB) + b"{")
        await until(lambda: gateway.metrics.routes[RouteClass.INFERENCE].in_flight == 1, "it is being read")
        assert (await answer_to_a_head(gateway, "ck_one", 60 * MIB))[0] == 429
    await until(lambda: gateway.metrics.routes[RouteClass.INFERENCE].in_flight == 0, "it has left")
    assert (await fleet.ask(gateway, secret="ck_one"))[0] == 200
    assert (await fleet.ask(gateway, secret="ck_one", model=7))[0] == 400
    assert (await fleet.ask(gateway, secret="ck_one"))[0] == 200, "what cannot be served has ended, too"


@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_together_are_bounded(fleet: GatewayFleet, *, chunked: bool) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1", slots=8)])
    gateway = await fleet.gateway(body_limit_bytes=2 * MIB, bodies_limit_bytes=3 * MIB)
    fleet.one.held = asyncio.Event()
    body = json.dumps({"model": "small", "prompt": "x" * (2 * MIB - 100)}).encode()

    async def ask() -> tuple[int, dict[str, object]]:
        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 65536):
                yield body[start : start + 65536]

        data = pieces() if chunked else io.BytesIO(body)
        async with fleet.http.post(f"{gateway.url}{CHAT}", headers=bearer(USER), data=data) as answer:
            return answer.status, await answer.json()

    first = asyncio.create_task(ask())
    await until(lambda: len(fleet.one.came) == 1, "it is being served")
    assert "corral_gateway_body_bytes 2.0" in rendered(gateway), "two million"
    status, answer = await ask()
    assert (status, answer["error"]["code"]) == (503, "no_room")  # type: ignore[index]
    fleet.one.held.set()
    assert (await first)[0] == 200
    assert fleet.one.came[0].body == body
    assert (await ask())[0] == 200, "the room is free again"
    await until(lambda: "corral_gateway_body_bytes 0.0" in rendered(gateway), "none of it is kept")


@pytest.mark.parametrize("asked", ["small", "whisper"])
async def test_bodies_with_files_together_are_bounded(fleet: GatewayFleet, asked: str) -> None:
    """On disk as in memory; the copy that is made for a model asked for by another name counts, too."""
    fleet.controller.change(
        replicas=[fleet.one.replica("p1", slots=8)], models=[SMALL, {"id": "whisper", "alias": "small"}]
    )
    gateway = await fleet.gateway(multipart_limit_bytes=2 * MIB, spool_limit_bytes=5 * MIB)
    fleet.one.held = asyncio.Event()

    async def ask() -> tuple[int, dict[str, object]]:
        form = aiohttp.FormData({"model": asked}, default_to_multipart=True)
        form.add_field("file", io.BytesIO(b"x" * (2 * MIB - 1000)), filename="a.wav")
        url = f"{gateway.url}/v1/audio/transcriptions"
        async with fleet.http.post(url, headers=bearer(USER), data=form) as answer:
            return answer.status, await answer.json()

    fit = 2 if asked == "small" else 1
    served = [asyncio.create_task(ask()) for _ in range(fit)]
    await until(lambda: len(fleet.one.came) == fit, "they are being served")
    status, answer = await ask()
    assert (status, answer["error"]["code"]) == (503, "no_room")  # type: ignore[index]
    fleet.one.held.set()
    assert [status for status, _ in await asyncio.gather(*served)] == [200] * fit
    assert (await ask())[0] == 200, "the room is free again"
    await until(lambda: "corral_gateway_spooled_bytes 0.0" in rendered(gateway), "none of it is kept")


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_of_100_mb_is_refused_and_not_kept(fleet: GatewayFleet, *, declared: bool) -> None:
    """With the usual limits: before a byte of it is read where it says how long it is, else once it is too long."""
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway()
    if declared:
        assert (await answer_to_a_head(gateway, USER, 100_000_000))[0] == 413
    else:
        piece = b"%x\r\n%b\r\n" % (MIB, b"x" * MIB)
        async with connected(gateway.port) as (reader, writer), asyncio.timeout(20):
            answer = asyncio.create_task(reader.readline())  # whoever goes on for too long after it is cut off
            writer.write(head(USER, None))
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    if not answer.done():
                        writer.write(piece)
                        await writer.drain()
            assert b" 413 " in await answer
    assert await fleet.who(gateway) == "p1"


async def test_a_body_that_came_in_pieces_is_sent_again_where_the_first_is_not_reached(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1"), fleet.two.replica("p2", last_resort=True)])
    fleet.one.gone.add("p1")
    gateway = await fleet.gateway()

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model":"small",'
        yield b'"prompt":"hi"}'

    async with fleet.http.post(f"{gateway.url}{CHAT}", headers=bearer(USER), data=pieces()) as answer:
        assert (await answer.json())["choices"][0]["text"] == "p2"
    assert fleet.two.came[0].body == b'{"model":"small","prompt":"hi"}'


async def test_an_alias_is_its_model_in_a_form_and_in_a_query(fleet: GatewayFleet) -> None:
    models = [SMALL, {"id": "whisper", "alias": "small"}]
    fleet.controller.change(models=models, replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway()
    sound = bytes(range(256)) * 12_000
    form = aiohttp.FormData()
    form.add_field("file", io.BytesIO(sound), filename="model", content_type="audio/wav")
    form.add_field("model", "whisper")
    form.add_field("language", "whisper")
    url = f"{gateway.url}/v1/audio/transcriptions"
    async with fleet.http.post(url, headers=bearer(USER), data=form) as answer:
        assert answer.status == 200, await answer.text()
    came = fleet.one.came[0]
    assert came.body.count(b"whisper") == 1, "only the field is changed"
    assert b'name="model"\r\n\r\nsmall\r\n' in came.body
    assert sound in came.body
    assert int(came.headers["Content-Length"]) == len(came.body)
    async with fleet.http.get(f"{gateway.url}/v1/things?x=1&model=whisper&y=2", headers=bearer(USER)) as answer:
        assert answer.status == 200
    assert fleet.one.came[1].query == "x=1&model=small&y=2"
    assert [(row["model"], row["served_by"]) for row in await fleet.receipts(2)] == [("whisper", "small")] * 2
