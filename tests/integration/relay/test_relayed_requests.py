"""Requests reach the upstream as they were meant: bodies whole, headers cleaned, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from corral.contract.http import BodyTooLarge, Request, Responder, Strip, Target
from corral.relay import Limits
from tests.support.relay import Client, Everything, Served, ok, quick, rig

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


async def test_path_method_headers_and_body_arrive_unchanged() -> None:
    async with rig() as r:
        client = await r.client()
        await client.ask(
            b"PUT /a%20b/../c?q=1&r=%2F HTTP/1.1\r\nHost: Example.com:8080\r\nX-Mixed-Case: A  b\r\n"
            b"X-Twice: 1\r\nX-Twice: 2\r\nX-Latin: \xe9\r\nX-Empty:\r\nContent-Length: 4\r\n\r\nbody"
        )
        asked = r.upstream.connections[0].requests[0]
        assert asked.start == b"PUT /a%20b/../c?q=1&r=%2F HTTP/1.1"
        assert asked.body == b"body"
        assert asked.headers[:6] == [
            (b"host", b"Example.com:8080"),
            (b"x-mixed-case", b"A  b"),
            (b"x-twice", b"1"),
            (b"x-twice", b"2"),
            (b"x-latin", b"\xe9"),
            (b"x-empty", b""),
        ]
        assert asked.get(b"content-length") == b"4"


async def test_a_handler_sees_lower_case_names_and_its_peer() -> None:
    async with rig() as r:
        client = await r.client()
        await client.ask(b"GET /p?q HTTP/1.1\r\nHost: a\r\nX-Thing:  Value \t\r\nConnection: close\r\n\r\n")
        request: Request = r.handler.requests[0]
        assert list(request.headers) == [(b"host", b"a"), (b"x-thing", b"Value")]
        assert (request.method, request.path, request.route) == (b"GET", b"/p?q", b"/p")
        assert request.header(b"x-thing") == b"Value"
        assert request.header(b"connection") is None
        assert request.peer == client.writer.get_extra_info("sockname")
        assert (request.secure, request.http_version, request.body.length) == (False, "1.1", 0)


async def test_hop_by_hop_headers_of_requests_are_removed() -> None:
    async with rig() as r:
        client = await r.client()
        await client.ask(
            b"GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\n"
            b"Proxy-Connection: x\r\nProxy-Authorization: secret\r\nTE: trailers\r\nTrailer: x\r\n"
            b"HTTP2-Settings: AAA\r\nUpgrade: foo\r\nX-End: 2\r\n\r\n"
        )
        asked = r.upstream.connections[0].requests[0]
        assert [name for name, _ in asked.headers] == [b"host", b"x-end", b"x-request-id"]


async def test_upgrade_h2c_is_dropped_and_does_not_hide_the_body() -> None:
    async with rig() as r:
        client = await r.client()
        await client.send(
            b"POST /1 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\nContent-Length: 27\r\n\r\nGET /evil HTTP/1.1\r\nA: b\r\n\r"
        )
        await client.send(b"\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n"[1:])
        assert (await client.answer()).body == b"POST /1 HTTP/1.1"
        assert (await client.answer()).body == b"GET /2 HTTP/1.1"
        first = r.upstream.connections[0].requests[0]
        assert first.body == b"GET /evil HTTP/1.1\r\nA: b\r\n\r"
        assert first.get(b"upgrade") is None
        assert first.get(b"connection") is None


async def test_a_chunked_upgrade_body_is_still_a_body() -> None:
    async with rig() as r:
        client = await r.client()
        await client.ask(
            b"POST /1 HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3\r\nabc\r\n0\r\n\r\n"
        )
        assert r.upstream.connections[0].requests[0].body == b"abc"


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


async def test_pipelined_requests_are_answered_one_at_a_time_and_in_order() -> None:
    running = 0
    most = 0

    class Slow(Everything):
        async def handle(self, request: Request, responder: Responder) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            await super().handle(request, responder)
            running -= 1

    async with rig(handler=Slow()) as r:
        client = await r.client()
        await client.send(
            b"".join(
                b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (n, n % 7, b"x" * (n % 7))
                for n in range(50)
            )
        )
        for number in range(50):
            assert (await client.answer()).body == b"POST /%d HTTP/1.1" % number
        assert most == 1


async def test_a_thousand_pipelined_requests_do_not_nest() -> None:
    class Now:
        async def handle(self, request: Request, responder: Responder) -> None:
            await responder.send(200, (), request.path)

    async with rig(handler=Now()) as r:
        client = await r.client()
        client.writer.write(b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(3000)))
        for number in range(3000):
            assert (await client.answer()).body == b"/%d" % number


async def test_reading_pauses_when_a_client_runs_far_ahead() -> None:
    gate = asyncio.Event()

    class Waits(Everything):
        async def handle(self, request: Request, responder: Responder) -> None:
            await gate.wait()
            await super().handle(request, responder)

    async with rig(handler=Waits(), limits=Limits(pipelined_bytes=1000, timeouts=quick())) as r:
        client = await r.client()
        one = b"GET /%08d HTTP/1.1\r\nHost: a\r\nX-Pad: " + b"p" * 3000 + b"\r\n\r\n"
        client.writer.write(b"".join(one % number for number in range(2000)))  # 6 MB: more than the kernel will hold
        await r.until(lambda: r.server.running == 1)
        conn = next(iter(r.server._connections))
        await r.until(lambda: conn._holds)
        held = len(conn._buffer)
        assert held < 1_000_000
        gate.set()
        for number in range(2000):
            assert (await client.answer()).body == b"GET /%08d HTTP/1.1" % number


async def test_connection_close_is_honoured_and_what_follows_is_ignored() -> None:
    async with rig() as r:
        client = await r.client()
        await client.send(b"GET /1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = await client.answer()
        assert (answer.body, answer.get(b"connection")) == (b"GET /1 HTTP/1.1", b"close")
        await client.closed()
        assert len(r.handler.requests) == 1


async def test_empty_lines_before_a_request_are_forgiven() -> None:
    async with rig() as r:
        client = await r.client()
        for _ in range(2):
            assert (await client.ask(b"\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n")).status == 200
        await client.send(b"\r\n")
        assert (await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")).status == 200


async def test_an_absolute_target_is_served_when_host_agrees() -> None:
    async with rig() as r:
        client = await r.client()
        answer = await client.ask(b"GET http://a:80/x?y HTTP/1.1\r\nHost: a:80\r\n\r\n")
        assert answer.body == b"GET /x?y HTTP/1.1"
        assert (await client.ask(b"GET http://b/x HTTP/1.1\r\nHost: a:80\r\n\r\n")).status == 400


async def test_a_sane_request_id_is_kept_and_any_other_replaced() -> None:
    async with rig() as r:
        client = await r.client()
        answer = await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\nX-Request-ID: req-1.2:3\r\n\r\n")
        assert answer.get(b"x-request-id") == b"req-1.2:3"
        assert r.upstream.connections[0].requests[0].all(b"x-request-id") == [b"req-1.2:3"]
        assert r.handler.requests[0].request_id == "req-1.2:3"
        seen = set()
        for bad in (b"", b"X-Request-Id: a b\r\n", b"X-Request-Id: %b\r\n" % (b"x" * 129), b"X-Request-Id: \xff\r\n"):
            answer = await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\n%b\r\n" % bad)
            made = answer.get(b"x-request-id")
            assert made is not None
            assert 8 <= len(made) <= 40
            assert r.upstream.connections[0].requests[-1].all(b"x-request-id") == [made]
            seen.add(made)
        assert len(seen) == 4


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


# What a handler changes


async def test_a_handler_changes_method_path_and_body() -> None:
    async with rig() as r:
        r.handler.options = {"method": b"POST", "path": b"/other?x", "body": b"new"}
        await (await r.client()).ask(b"GET /x HTTP/1.1\r\nHost: a\r\nX-A: 1\r\n\r\n")
        asked = r.upstream.connections[0].requests[0]
        assert (asked.start, asked.body) == (b"POST /other?x HTTP/1.1", b"new")
        assert (asked.get(b"host"), asked.get(b"x-a")) == (b"a", b"1")


async def test_a_handler_strips_and_adds_headers() -> None:
    strip = Strip(names=[b"Authorization"], prefixes=[b"X-Corral-"])
    async with rig() as r:
        r.handler.options = {"strip": strip, "add": ((b"authorization", b"Bearer ours"),)}
        client = await r.client()
        for _ in range(2):
            await client.ask(
                b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer theirs\r\nX-Corral-Gateway: x\r\n"
                b"x-corral-client: y\r\nX-Corralled: z\r\n\r\n"
            )
            asked = r.upstream.connections[0].requests[-1]
            assert asked.all(b"authorization") == [b"Bearer ours"]
            assert [name for name, _ in asked.headers] == [b"host", b"x-corralled", b"authorization", b"x-request-id"]


async def test_a_handler_replaces_all_headers() -> None:
    async with rig() as r:
        r.handler.options = {
            "headers": [(b"x-own", b"1"), (b"connection", b"close"), (b"content-length", b"99"), (b"te", b"x")]
        }
        await (await r.client()).ask(b"POST / HTTP/1.1\r\nHost: a\r\nX-A: 1\r\nContent-Length: 2\r\n\r\nhi")
        asked = r.upstream.connections[0].requests[0]
        assert [name for name, _ in asked.headers] == [b"host", b"x-own", b"x-request-id", b"content-length"]
        assert (asked.get(b"host"), asked.body) == (b"a", b"hi")
        r.handler.options = {"headers": [(b"host", b"b")]}
        await (await r.client()).ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert r.upstream.connections[0].requests[1].all(b"host") == [b"b"]


@pytest.mark.parametrize("bad", [b"a\r\nX-Evil: 1", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_handler_cannot_write_a_line_break_into_a_header(bad: bytes) -> None:
    async with rig() as r:
        client = await r.client()
        for options in (
            {"add": ((b"x-a", bad),)},
            {"headers": [(b"x-a", bad)]},
            {"response_headers": ((b"x-a", bad),)},
        ):
            r.handler.options = options
            answer = await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert answer.status == 500
            assert b"Evil" not in b"".join(name for name, _ in answer.headers)


async def test_many_clients_at_once_each_get_their_own_answer() -> None:
    async def one(client: Client, number: int) -> None:
        for turn in range(20):
            path = b"/%d/%d" % (number, turn)
            body = path * (turn % 5)
            answer = await client.ask(
                b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (path, len(body), body)
            )
            assert answer.body == b"POST %b HTTP/1.1" % path

    async with rig(ok) as r, asyncio.TaskGroup() as group:
        for number in range(30):
            group.create_task(one(await r.client(), number))


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
