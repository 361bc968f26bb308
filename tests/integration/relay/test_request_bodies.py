"""Bodies of requests: passed on whole and at their pace, or read by the handler, within limits."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from corral.contract.http import BodyTooLarge, Request, Responder, Target
from tests.support.relay import Client, Served, rig

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Reads:
    """Reads the body whole and answers with its length; or relays it after reading."""

    def __init__(self, limit: int = 1 << 20, *, relay: bool = False) -> None:
        self.limit = limit
        self.relay = relay
        self.target = Target()
        self.bodies: list[bytes] = []

    async def handle(self, request: Request, responder: Responder) -> None:
        body = await request.body.read(self.limit)
        self.bodies.append(body)
        if self.relay:
            await responder.relay(self.target)
        else:
            await responder.send(200, ((b"x-declared", str(request.body.length).encode()),), b"%d" % len(body))


@pytest.mark.parametrize("size", [1, 5, 64])
async def test_a_body_in_small_pieces_is_streamed(size: int) -> None:
    body = bytes(range(200))
    async with rig() as r:
        client = await r.client()
        await client.send(b"POST /up HTTP/1.1\r\nHost: a\r\nContent-Length: 200\r\n\r\n")
        for at in range(0, len(body), size):
            await client.send(body[at : at + size])
        assert (await client.answer()).status == 200
        assert r.upstream.connections[0].requests[0].body == body


async def test_a_chunked_body_is_framed_anew_and_its_trailers_are_dropped() -> None:
    async with rig() as r:
        client = await r.client()
        await client.send(b"POST /up HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        await r.until(lambda: r.upstream.connections)  # on its way before it is whole
        await client.send(b"3;name=value\r\nabc\r\n")
        await client.send(b"0A\r\n0123456789\r\n0\r\nX-Corral-Admin: yes\r\n\r\n")
        assert (await client.answer()).status == 200
        asked = r.upstream.connections[0].requests[0]
        assert asked.body == b"abc0123456789"
        assert asked.get(b"transfer-encoding") == b"chunked"
        assert (await client.ask(b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n")).body == b"GET /next HTTP/1.1"


async def test_a_short_chunked_body_that_is_all_there_gets_a_length() -> None:
    async with rig() as r:
        await (await r.client()).ask(
            b"POST /up HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        )
        asked = r.upstream.connections[0].requests[0]
        assert (asked.body, asked.get(b"content-length"), asked.get(b"transfer-encoding")) == (b"abc", b"3", None)


@pytest.mark.parametrize(("method", "length"), [(b"POST", b"0"), (b"GET", None), (b"DELETE", None)])
async def test_an_empty_body_is_said_where_one_is_expected(method: bytes, length: bytes | None) -> None:
    async with rig() as r:
        await (await r.client()).ask(method + b" / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        assert r.upstream.connections[0].requests[0].get(b"content-length") == length


async def test_a_slow_upload_gets_a_connection_of_its_own() -> None:
    """A kept connection may be closed under it, and a body half sent cannot be sent again."""

    async def script(served: Served) -> None:
        while True:
            await served.request()
            await served.send(OK)

    async with rig(script) as r:
        client = await r.client()
        await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert r.pool.idle_count(r.upstream.target) == 1
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nab")
        await r.until(lambda: len(r.upstream.connections) == 2)
        await client.send(b"cd")
        assert (await client.answer()).status == 200
        assert r.pool.idle_count(r.upstream.target) == 2


# Expect: 100-continue


async def test_expect_is_answered_when_the_body_is_wanted_and_not_passed_on() -> None:
    async with rig() as r:
        client = await r.client()
        await client.send(b"POST /1 HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 4\r\n\r\n")
        assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"body")
        assert (await client.answer()).status == 200
        asked = r.upstream.connections[0].requests[0]
        assert (asked.body, asked.get(b"expect")) == (b"body", None)
        assert (await client.ask(b"GET /2 HTTP/1.1\r\nHost: a\r\n\r\n")).status == 200


async def test_expect_is_answered_once_when_a_handler_reads() -> None:
    async with rig(handler=Reads()) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
        assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"bo")
        await r.until(lambda: next(iter(r.server._connections))._body.received == 2)  # type: ignore[union-attr]
        await client.send(b"dy")
        assert (await client.head()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_expect_without_a_body_or_with_the_body_sent_along_gets_no_100() -> None:
    async with rig(handler=Reads()) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 200 OK\r\n")
        assert await client.exactly(1) == b"0"
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi")
        assert (await client.head()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_expect_refused_by_a_handler_closes_the_connection() -> None:
    """The client may or may not send the body now: what comes next cannot be known to be a request."""
    async with rig(handler=Reads(limit=3)) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 400\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.get(b"connection")) == (413, b"close")
        await client.closed()


async def test_http_1_0_clients_get_no_100() -> None:
    async with rig(handler=Reads()) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
        await r.until(lambda: r.server.running)
        await client.send(b"body")
        assert (await client.head()).startswith(b"HTTP/1.1 200 OK\r\n")


# Bodies in handlers


async def read_all(client: Client, framing: bytes, *pieces: bytes) -> bytes:
    await client.send(b"POST / HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % framing)
    for piece in pieces:
        await client.send(piece)
    return (await client.answer()).body


async def test_a_handler_reads_a_body_whole() -> None:
    handler = Reads()
    async with rig(handler=handler) as r:
        client = await r.client()
        assert await read_all(client, b"Content-Length: 6", b"abc", b"def") == b"6"
        assert (
            await read_all(client, b"Transfer-Encoding: chunked", b"3\r\nabc\r\n", b"3\r\ndef\r\n", b"0\r\n\r\n")
            == b"6"
        )
        assert handler.bodies == [b"abcdef", b"abcdef"]


async def test_a_body_that_was_read_is_relayed_as_it_was() -> None:
    handler = Reads(relay=True)
    async with rig(handler=handler) as r:
        handler.target = r.upstream.target
        client = await r.client()
        await read_all(client, b"Transfer-Encoding: chunked", b"3\r\nabc\r\n", b"3\r\ndef\r\n0\r\n\r\n")
        asked = r.upstream.connections[0].requests[0]
        assert (asked.body, asked.get(b"content-length")) == (b"abcdef", b"6")


async def test_a_declared_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    async with rig(handler=Reads(limit=10)) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 11\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.get(b"connection")) == (413, b"close")
        assert answer.body == b'{"error":{"code":413,"message":"the body is too large","type":"invalid_request_error"}}'


async def test_a_chunked_body_over_the_limit_is_refused_when_it_is_known() -> None:
    async with rig(handler=Reads(limit=10)) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n12345678\r\n")
        await client.send(b"8\r\n12345678\r\n")
        assert (await client.answer()).status == 413
        await client.closed()


async def test_an_answer_to_an_unfinished_upload_survives_the_bytes_on_their_way() -> None:
    """Closing at once would make the kernel reset the connection, and the client would never read the 413."""
    async with rig(handler=Reads(limit=10)) as r:
        client = await r.client()
        client.writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3000000\r\n\r\n" + b"x" * 3_000_000)
        assert (await client.answer()).status == 413


async def test_a_handler_may_answer_body_too_large_itself() -> None:
    class Polite:
        async def handle(self, request: Request, responder: Responder) -> None:
            try:
                await request.body.read(3)
            except BodyTooLarge:
                await responder.send(400, (), b"shorter, please")

    async with rig(handler=Polite()) as r:
        answer = await (await r.client()).ask(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nabcd")
        assert (answer.status, answer.body) == (400, b"shorter, please")


async def test_a_handler_reads_pieces_as_they_arrive() -> None:
    pieces: list[bytes] = []

    class Pieces:
        async def handle(self, request: Request, responder: Responder) -> None:
            async for piece in request.body.chunks():
                pieces.append(piece)
            await responder.send(200, (), b"done")

    async with rig(handler=Pieces()) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\nabc")
        await r.until(lambda: pieces == [b"abc"])
        await client.send(b"def")
        assert (await client.answer()).body == b"done"
        assert pieces == [b"abc", b"def"]
        await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert len(pieces) == 2


async def test_an_unread_body_that_is_all_here_does_not_cost_the_connection() -> None:
    class Ignores:
        async def handle(self, request: Request, responder: Responder) -> None:
            await responder.send(200, (), request.path)

    async with rig(handler=Ignores()) as r:
        client = await r.client()
        for path in (b"/1", b"/2"):
            answer = await client.ask(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc" % path)
            assert (answer.body, answer.get(b"connection")) == (path, None)


async def test_an_echo_reads_and_writes_at_once() -> None:
    class Echo:
        async def handle(self, request: Request, responder: Responder) -> None:
            async def upper() -> AsyncIterator[bytes]:
                async for piece in request.body.chunks():
                    yield piece.upper()

            await responder.stream(200, (), upper())

    async with rig(handler=Echo()) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        await client.head()
        for _ in range(3):
            await client.send(b"3\r\nabc\r\n")
            assert await client.exactly(8) == b"3\r\nABC\r\n"
        await client.send(b"0\r\n\r\n")
        assert await client.exactly(5) == b"0\r\n\r\n"
