"""The exchange of calls over real sockets: bodies of every framing, connections that are used again, damage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from corral.client import Client, Endpoint, http_exchange
from corral.client.errors import BrokenAnswer, ConnectFailed, Disconnected, NotHttp
from corral.client.http_exchange import Answer, HttpExchange
from corral.kit.errors import Invalid, OutcomeUnknown, Unreachable
from tests.support.waiting import until


class Script:
    """Answers each request with the next bytes; `b""` closes the connection instead. A connection is also closed when
    no answers are left."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((line[15:] for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), b"0")
                self.requests.append(head + await reader.readexactly(int(length)))
                answer = self.answers.pop(0)
                if not answer:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.closed += 1


@asynccontextmanager
async def scripted(*answers: bytes) -> AsyncIterator[tuple[Script, HttpExchange]]:
    script = Script(*answers)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    exchange = HttpExchange(script.url + "/corral", None, {"Authorization": "Bearer k"})
    try:
        async with server:
            yield script, exchange
    finally:
        await exchange.close()
        await until(lambda: script.closed == script.connections, "all connections are closed")


async def get(exchange: HttpExchange, method: str = "GET", body: bytes | None = None, timeout_s: float = 20) -> Answer:
    return await exchange.request(method, "/api/nodes?a=b%20c", body=body, timeout_s=timeout_s)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (OK, 200, b"[]"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"[]"),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", 204, b""),
        (b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", 302, b""),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
        (b"HTTP/1.0 503\r\n\r\nnot now", 503, b"not now"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
            b"4;a=b\r\nfour\r\n00B\r\n and\r\neleve\r\n0\r\nx: y\r\n\r\n",
            200,
            b"four and\r\neleve",
        ),
    ],
)
async def test_answers_of_every_framing_are_read(answer: bytes, status: int, body: bytes) -> None:
    async with scripted(answer) as (script, exchange):
        found = await get(exchange)
        assert (found.status, found.body) == (status, body)
        assert script.requests == [
            b"GET /corral/api/nodes?a=b%20c HTTP/1.1\r\n"
            + f"Host: {script.url.removeprefix('http://')}\r\n".encode()
            + b"Authorization: Bearer k\r\nAccept-Encoding: identity\r\n\r\n"
        ]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"SSH-2.0-OpenSSH\r\n", NotHttp),
        (b"\x15\x03\x01\x00\x02\x02\x46", NotHttp),  # a TLS alert
        (b"HTTP/1.1 20 OK\r\n\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\nname : x\r\n\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", NotHttp),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * http_exchange.MAX_HEAD_BYTES + b"\r\n\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (http_exchange.MAX_HEAD_BYTES // 5) + b"\r\n", NotHttp),
        (b"HTTP/1.1 200 OK\r\nContent-Le", BrokenAnswer),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", BrokenAnswer),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nA fen\r\n", BrokenAnswer),
        (b"", Disconnected),
    ],
)
async def test_damaged_answers_are_errors(answer: bytes, expected: type[Exception]) -> None:
    async with scripted(answer) as (_, exchange):
        with pytest.raises(expected):
            await get(exchange)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n32\r\n" + b"x" * 50 + b"\r\n33\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101,
    ],
)
async def test_an_answer_without_bounds_is_refused(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_exchange, "MAX_BODY_BYTES", 100)
    async with scripted(answer) as (_, exchange):
        with pytest.raises(NotHttp, match="longer than"):
            await get(exchange)


async def test_a_connection_is_used_again_but_not_for_a_request_that_must_not_be_sent_twice() -> None:
    async with scripted(OK, OK, OK, OK) as (script, exchange):
        await get(exchange)
        await get(exchange)
        assert script.connections == 1
        await get(exchange, "POST", b"{}")
        assert script.connections == 2
        assert script.requests[2].endswith(b"Content-Length: 2\r\n\r\n{}")
        await get(exchange, "POST")
        assert script.requests[3].endswith(b"Content-Length: 0\r\n\r\n")


async def test_a_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    async with scripted(OK, b"", OK) as (script, exchange):
        await get(exchange)
        assert (await get(exchange)).body == b"[]"
        assert (script.connections, len(script.requests)) == (2, 3)
    async with scripted(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", OK) as (script, exchange):
        await get(exchange)
        await get(exchange)
        assert script.connections == 2


async def test_a_change_without_an_answer_is_sent_once_and_its_outcome_is_unknown() -> None:
    async with scripted(b"", OK) as (script, _):
        async with Client(Endpoint(script.url, "k")) as client:
            with pytest.raises(OutcomeUnknown, match="may or may not have been done"):
                await client.nodes.drain("attic")
            script.answers[:] = [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort"]
            with pytest.raises(Unreachable, match="broke in the middle of the answer"):
                await client.nodes.list()
        assert [request.split()[0] for request in script.requests] == [b"POST", b"GET"]


async def test_a_silent_server_is_given_up_in_time_and_its_connection_is_closed() -> None:
    async with scripted(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", OK) as (script, exchange):
        with pytest.raises(TimeoutError):
            await get(exchange, timeout_s=0.2)
        await until(lambda: script.closed == 1, "the connection is closed")


async def test_a_name_without_an_address_and_a_key_that_no_header_can_hold() -> None:
    exchange = HttpExchange("http://no-such-host.invalid:1", None, {})
    with pytest.raises(ConnectFailed):
        await get(exchange)
    with pytest.raises(ConnectFailed):
        await get(HttpExchange(f"http://{'x' * 70}.example:1", None, {}))
    with pytest.raises(Invalid, match="check the key"):
        await get(HttpExchange("http://127.0.0.1:1", None, {"Authorization": "Bearer a\r\nb: c"}))
