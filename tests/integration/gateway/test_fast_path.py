"""The gateway's fast path: the same decisions, errors and counters as on the general path."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from corral.contract.http import Target
from corral.gateway.main import Gateway
from corral.gateway.receipts.metrics import RouteClass, render
from corral.gateway.responses import Response
from corral.gateway.routing.replicas import Route
from corral.gateway.routing.request import RouteRequest
from tests.integration.gateway.conftest import KEYS, LIMITED, USER, VIEWER, OpenGateway
from tests.integration.gateway.scripted_controller import ScriptedController, key
from tests.support.relay import Client, Served, Upstream, answering

OK = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n{"choices":1}'
CHAT = {"model": "small", "messages": [{"role": "user", "content": "hi\n"}]}


@dataclass
class Slow:
    """A router without `route_now`."""

    target: Target = field(default_factory=Target)
    requests: list[RouteRequest] = field(default_factory=list)

    async def route(self, request: RouteRequest) -> Route | Response:
        self.requests.append(request)
        return Route(self.target, b"/replicas/p1" + request.request.path, b"signed.token")


class Immediate(Slow):
    """A router that also chooses without waiting."""

    def route_now(self, request: RouteRequest) -> Route | None:
        self.requests.append(request)
        return Route(self.target, b"/replicas/p1" + request.request.path, b"signed.token")


def post(secret: str, body: bytes, *, path: bytes = b"/v1/chat/completions", more: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %b\r\n" % (path, secret.encode())
    return head + b"X-Corral-Client: 6.6.6.6\r\n%bContent-Length: %d\r\n\r\n%b" % (more, len(body), body)


@dataclass
class Setup:
    gateway: Gateway
    upstream: Upstream
    router: Slow
    controller: ScriptedController
    clients: list[Client] = field(default_factory=list)

    async def client(self) -> Client:
        port = int(self.gateway.url.rpartition(":")[2])
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        self.clients.append(client)
        return client

    @property
    def fast_path_requests(self) -> int:
        """Requests that ended on the fast path."""
        return len(self.gateway.metrics.routes[RouteClass.INFERENCE].uncounted)


@pytest.fixture(params=[Immediate, Slow], ids=["fast", "general"])
async def setup(
    request: pytest.FixtureRequest, controller: ScriptedController, open_one: OpenGateway
) -> AsyncIterator[Setup]:
    upstream = Upstream(answering(OK))
    await upstream.start()
    router = request.param(upstream.target)
    async with open_one(router=router, body_limit_bytes=2000) as gateway:
        await gateway.views.run_once()
        made = Setup(gateway, upstream, router, controller)
        yield made
        for client in made.clients:
            client.abort()
    await upstream.stop()


async def test_warm_requests_are_served_and_counted(setup: Setup) -> None:
    client = await setup.client()
    for number in range(5):
        body = json.dumps({**CHAT, "stream": number == 3, "n": number}).encode()
        answer = await client.ask(post(USER, body))
        assert (answer.status, answer.body, answer.get(b"content-type")) == (200, b'{"choices":1}', b"application/json")
        asked = setup.upstream.connections[0].requests[-1]
        assert (asked.start, asked.body) == (b"POST /replicas/p1/v1/chat/completions HTTP/1.1", body)
        assert asked.all(b"authorization") == [b"Bearer signed.token"]
        assert asked.all(b"x-corral-client") == []
        assert asked.get(b"x-request-id") == answer.get(b"x-request-id")
        routed = setup.router.requests[-1]
        assert (routed.model, routed.client.key_id) == ("small", f"id-{USER}")
        assert routed.body == body
    assert setup.fast_path_requests == (4 if isinstance(setup.router, Immediate) else 0)
    lines = render(setup.gateway.metrics, now=0.0).decode().splitlines()
    assert 'corral_gateway_requests_total{route="inference",status="200"} 5.0' in lines
    assert 'corral_gateway_requests_in_flight{route="inference"} 0.0' in lines
    assert 'corral_gateway_request_seconds_count{route="inference"} 5.0' in lines
    assert 'corral_gateway_first_byte_seconds_count{route="inference"} 0.0' in lines, "none was a stream"


REFUSED = {
    "unknown key": (post("ck_nobody", json.dumps(CHAT).encode()), 401),
    "may not": (post(VIEWER, json.dumps(CHAT).encode()), 403),
    "not its model": (post(LIMITED, b'{"model":"org/large"}'), 404),
    "no model": (post(USER, b'{"messages":[]}'), 400),
    "empty model": (post(USER, b'{"model":""}'), 400),
    "two models": (post(USER, b'{"model":"small","model":"org/large"}'), 400),
    "two models, one in disguise": (post(USER, b'{"model":"small","mod\\u0065l":"org/large"}'), 400),
    "no JSON": (post(USER, b'{"model":"small"'), 400),
    "too large": (post(USER, b'{"model":"small","x":"' + b"x" * 2000 + b'"}'), 413),
    "multipart": (post(USER, b'{"model":"small"}', more=b"Content-Type: multipart/form-data; boundary=b\r\n"), 400),
    "no such route": (post(USER, b'{"purpose":"none"}', path=b"/v1/nothing"), 404),
}


@pytest.mark.parametrize("name", list(REFUSED))
async def test_refusals_are_the_general_ones(setup: Setup, name: str) -> None:
    request, status = REFUSED[name]
    client = await setup.client()
    good = post(LIMITED if name == "not its model" else USER, json.dumps(CHAT).encode())
    for _ in range(2):
        assert (await client.ask(good)).status == 200
    answer = await client.ask(request)
    assert answer.status == status
    assert json.loads(answer.body)["error"]["message"]
    assert (await client.ask(good)).status == 200
    assert len(setup.upstream.connections[0].requests) == 3
    assert setup.gateway.metrics.routes[RouteClass.INFERENCE].in_flight == 0


async def test_a_revoked_key_is_refused_as_soon_as_the_view_says_so(setup: Setup) -> None:
    client = await setup.client()
    request = post(USER, json.dumps(CHAT).encode())
    for _ in range(3):
        assert (await client.ask(request)).status == 200
    setup.controller.change(keys=[row for row in KEYS if row["id"] != f"id-{USER}"])
    await setup.gateway.views.run_once()
    assert (await client.ask(request)).status == 401
    setup.controller.change(keys=list(KEYS))
    await setup.gateway.views.run_once()
    assert (await client.ask(request)).status == 200


async def test_a_key_expires_between_two_requests(setup: Setup) -> None:
    setup.controller.server_time = 5_000.0
    setup.controller.change(keys=[key("ck_brief", "inference", expires_at=9_000.0)])
    await setup.gateway.views.run_once()
    client = await setup.client()
    request = post("ck_brief", json.dumps(CHAT).encode())
    for _ in range(3):
        assert (await client.ask(request)).status == 200
    fleet = setup.gateway.views.fleet
    setup.gateway.views._clock_offset_s += 4_001.0  # an hour later, with the same view
    assert (await client.ask(request)).status == 401
    assert setup.gateway.views.fleet is fleet


async def test_a_replica_that_fails_is_told_and_logged(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    async def refuses(served: Served) -> None:
        await served.request()
        await served.send(OK)
        await served.request()
        await served.send(b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\nno")
        await served.request()
        await served.send(b"nonsense\r\n\r\n")

    setup.upstream._script = refuses
    client = await setup.client()
    request = post(USER, json.dumps(CHAT).encode())
    with caplog.at_level(logging.INFO), capture_logs() as logs:
        assert [(await client.ask(request)).status for _ in range(3)] == [200, 429, 502]
    counts = setup.gateway.metrics.routes[RouteClass.INFERENCE]
    counts.count_finished()
    assert (counts.by_status, counts.in_flight) == ({200: 1, 429: 1, 502: 1}, 0)
    lines = [(line["status"], line["key"]) for line in logs if line["event"] == "request"]
    assert lines == [(429, f"id-{USER}"), (502, f"id-{USER}")]


EVENT = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'


async def test_streams_take_as_long_as_they_take(setup: Setup) -> None:
    """Counted from the request, not from the moment of the fallback."""

    async def stream(served: Served) -> None:
        await served.request()
        await served.send(OK)
        await served.request()
        await asyncio.sleep(0.15)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        await served.send(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT))

    setup.upstream._script = stream
    client = await setup.client()
    request = post(USER, json.dumps(CHAT).encode())
    assert [(await client.ask(request)).body for _ in range(2)] == [b'{"choices":1}', EVENT]
    counts = setup.gateway.metrics.routes[RouteClass.INFERENCE]
    counts.count_finished()
    assert counts.seconds.total_s >= 0.15
    assert counts.first_byte.total_s >= 0.15
    assert sum(counts.first_byte.counts) == 1


async def test_where_every_request_is_logged_none_goes_unlogged(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    client = await setup.client()
    request = post(USER, json.dumps(CHAT).encode())
    with caplog.at_level(logging.DEBUG, logger="corral.gateway.http.handler"):
        for _ in range(3):
            assert (await client.ask(request)).status == 200
        assert setup.fast_path_requests == 0
