"""Everything that is not the gateway's reaches the controller, with our word about the client and nobody else's."""

from __future__ import annotations

import asyncio
import io

import aiohttp
import pytest

from corral.gateway.main import Gateway
from tests.integration.gateway.conftest import ADMIN, USER, OpenGateway, bearer
from tests.integration.gateway.raw_client import connected, exchange
from tests.integration.gateway.scripted_controller import GATEWAY_KEY, ScriptedController
from tests.support.waiting import until


async def test_claims_of_clients_are_replaced_by_ours(
    gateway: Gateway, controller: ScriptedController, http: aiohttp.ClientSession
) -> None:
    forged = {
        "X-Corral-Gateway": "ck_forged",
        "X-Corral-Client": "198.51.100.1",
        "x-corral-anything": "1",
        "X-Forwarded-For": "198.51.100.1",
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Host": "evil.example",
        "Forwarded": "for=198.51.100.1",
        "X-Real-IP": "198.51.100.1",
        "Cookie": "session=abc",
        "X-CSRF-Token": "t",
        **bearer(ADMIN),
    }
    async with http.post(f"{gateway.url}/api/nodes?x=1%20y", headers=forged, data=b"body") as answer:
        assert answer.status == 200
        assert (await answer.json())["bytes"] == 4
    seen = controller.seen[-1]
    assert (seen.method, seen.path, seen.body) == ("POST", "/api/nodes?x=1%20y", b"body")
    assert seen.values("X-Corral-Gateway") == [GATEWAY_KEY]
    assert seen.values("X-Corral-Client") == ["127.0.0.1"]
    assert seen.values("X-Forwarded-Proto") == ["http"]
    assert seen.values("X-Forwarded-Host") == [f"127.0.0.1:{gateway.port}"]
    assert seen.values("Authorization") == [f"Bearer {ADMIN}"]
    assert seen.values("Cookie") == ["session=abc"]
    assert seen.values("X-CSRF-Token") == ["t"]
    for name in ("X-Corral-Anything", "X-Forwarded-For", "Forwarded", "X-Real-IP"):
        assert seen.values(name) == []


async def test_nothing_a_client_hides_in_its_head_survives(gateway: Gateway, controller: ScriptedController) -> None:
    await exchange(
        gateway.port,
        b"GET /api/x HTTP/1.1\r\nHost: h\r\nConnection: close, x-corral-gateway\r\n"
        b"X-CORRAL-GATEWAY: one\r\nx-corral-gateway: two\r\nX-Corral-Client:three\r\n\r\n",
    )
    assert controller.seen[-1].values("x-corral-gateway") == [GATEWAY_KEY]
    assert controller.seen[-1].values("x-corral-client") == ["127.0.0.1"]


@pytest.mark.parametrize(("given", "kept"), [("r-17", True), ("bad id\x01".strip("\x01"), False)])
async def test_a_request_id_goes_from_end_to_end(
    gateway: Gateway, controller: ScriptedController, http: aiohttp.ClientSession, given: str, kept: bool
) -> None:
    async with http.get(f"{gateway.url}/api/x", headers={"X-Request-Id": given}) as answer:
        returned = answer.headers.getall("X-Request-Id")
    assert controller.seen[-1].values("X-Request-Id") == returned
    assert (returned == [given]) == kept


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_the_controllers_health_stands_under_its_name(
    gateway: Gateway, controller: ScriptedController, http: aiohttp.ClientSession, path: str
) -> None:
    async with http.get(f"{gateway.url}/controller{path}") as answer:
        assert answer.status == 200
    assert controller.seen[-1].path == path


async def test_events_pass_as_they_come(gateway: Gateway, controller: ScriptedController) -> None:
    async with connected(gateway.port) as (reader, writer), asyncio.timeout(20):
        writer.write(b"GET /api/events HTTP/1.1\r\nHost: h\r\nAccept: text/event-stream\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"text/event-stream" in head
        for number in range(3):  # each is read before the next is sent
            controller.stream.put_nowait(f"event: node\ndata: {number}\n\n".encode())
            await reader.readuntil(f"data: {number}\n\n".encode())
        assert controller.streams_open == 1
    # The client has left, so the controller's stream ends too, long before it has something more to say.
    await until(lambda: controller.streams_open == 0, "the controller's stream ended")


async def test_websockets_pass_on_their_routes_only(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async with http.ws_connect(f"{gateway.url}/ws/echo") as socket:
        await socket.send_str("hello")
        assert (await socket.receive(timeout=60)).data == "echo hello"
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await http.ws_connect(f"{gateway.url}/api/echo")
    assert caught.value.status == 200  # an ordinary answer: nobody switched protocols


async def test_a_controller_that_is_down_is_told_and_comes_back(
    gateway: Gateway, controller: ScriptedController, http: aiohttp.ClientSession
) -> None:
    await controller.stop()
    for _ in range(3):
        async with http.get(f"{gateway.url}/api/nodes", headers=bearer(ADMIN)) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "2"
            assert answer.headers["X-Request-Id"]
            error = (await answer.json())["error"]
    assert (error["code"], error["type"]) == (503, "unavailable")
    assert "controller cannot be reached" in error["message"]
    # What needs no controller is served from the last view.
    async with http.get(f"{gateway.url}/v1/models", headers=bearer(USER)) as answer:
        assert answer.status == 200
        assert [model["id"] for model in (await answer.json())["data"]] == ["small", "org/large"]
    async with http.get(f"{gateway.url}/readyz") as answer:
        assert answer.status == 200
    await until(lambda: not gateway.metrics.view.controller_reachable, "the loss is seen")
    await controller.start()
    async with http.get(f"{gateway.url}/api/nodes") as answer:
        assert answer.status == 200
    await until(lambda: gateway.metrics.view.controller_reachable, "the return is seen")


async def test_a_controller_that_dies_while_it_answers_is_told(
    gateway: Gateway, controller: ScriptedController, http: aiohttp.ClientSession
) -> None:
    waiting = asyncio.ensure_future(http.get(f"{gateway.url}/hang"))
    await until(lambda: controller.hanging == 1, "the controller has the request")
    await controller.stop()
    async with await waiting as answer:
        assert answer.status == 502
        assert "may have happened" in (await answer.json())["error"]["message"]


async def test_a_controller_that_hangs_is_given_up(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> None:
    async with open_one(controller_first_byte_s=0.1) as gateway, http.get(f"{gateway.url}/hang") as answer:
        assert answer.status == 504
        assert (await answer.json())["error"]["type"] == "unavailable"


async def test_a_slow_reader_slows_the_controller_down(gateway: Gateway, controller: ScriptedController) -> None:
    size = 200 * 1024 * 1024
    async with connected(gateway.port) as (reader, writer), asyncio.timeout(50):
        writer.write(f"GET /big/{size} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        steady = -1
        while controller.sent != steady:  # until nothing moves any more
            steady = controller.sent
            await asyncio.sleep(0.3)
        assert controller.sent < 20 * 1024 * 1024
        left = size
        while left:
            left -= len(await reader.readexactly(min(left, 1 << 20)))
    assert controller.sent == size


async def test_bodies_are_streamed_to_the_controller(
    gateway: Gateway, controller: ScriptedController, http: aiohttp.ClientSession
) -> None:
    body = bytes(range(256)) * 40_000
    async with http.post(f"{gateway.url}/api/upload", data=io.BytesIO(body)) as answer:
        assert (await answer.json())["bytes"] == len(body)
    assert controller.seen[-1].body == body


async def test_a_body_that_stops_coming_is_told(controller: ScriptedController, open_one: OpenGateway) -> None:
    async with open_one(client_body_idle_s=0.2) as gateway:
        await gateway.views.run_once()
        for path, kind in (("/api/x", "invalid"), ("/v1/completions", "invalid_request_error")):
            head = f"POST {path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {USER}\r\nContent-Length: 10\r\n\r\n"
            answer = await exchange(gateway.port, head.encode() + b"abc")
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert f'"type":"{kind}"'.encode() in answer
