"""Answers pass through whole, whatever frames them, and end where they end."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from corral.contract.http import Headers, Request, Responder, UpstreamFailed
from tests.support.relay import Everything, Served, answering, rig

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


async def test_an_answer_with_a_length_passes_and_both_connections_stay() -> None:
    async with rig(answering(b"HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 5\r\n\r\nhello")) as r:
        client = await r.client()
        for _ in range(3):
            answer = await client.ask(GET)
            assert (answer.start, answer.body) == (b"HTTP/1.1 200 OK", b"hello")
            assert answer.get(b"content-type") == b"text/x"
            assert answer.get(b"connection") is None
        assert len(r.upstream.connections) == 1
        result = r.handler.results[0]
        assert (result.status, result.complete, result.client_gone) == (200, True, False)
        assert 0 < result.first_byte_s <= result.total_s < 5


async def test_a_head_answer_ends_with_its_head_whatever_length_it_names() -> None:
    async with rig(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(b"HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (answer.status, answer.get(b"content-length")) == (200, b"500")
        assert len(r.upstream.connections) == 1


async def test_a_chunked_head_answer_ends_with_its_head() -> None:
    async with rig(answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(b"HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n")
            assert answer.status == 200
            assert answer.get(b"transfer-encoding") is None


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_204_and_304_answers_have_no_body(status: bytes) -> None:
    async with rig(answering(b"HTTP/1.1 %b\r\nETag: x\r\n\r\n" % status)) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(GET)
            assert answer.start == b"HTTP/1.1 " + status
            assert answer.get(b"etag") == b"x"
        assert len(r.upstream.connections) == 1


async def test_a_304_keeps_the_length_it_speaks_of_and_a_204_has_none() -> None:
    script = answering(
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
    )
    async with rig(script) as r:
        client = await r.client()
        assert (await client.ask(GET)).get(b"content-length") == b"7"
        assert (await client.ask(GET)).get(b"content-length") is None


async def test_an_answer_that_ends_with_the_connection_becomes_chunked() -> None:
    async with rig(answering(b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\n\r\nhello world", close=True)) as r:
        client = await r.client()
        for _ in range(2):  # the client's connection stays, the upstream's cannot
            answer = await client.ask(GET)
            assert answer.body == b"hello world"
            assert answer.get(b"transfer-encoding") == b"chunked"
        assert len(r.upstream.connections) == 2
        assert all(result.complete for result in r.handler.results)


async def test_an_http_1_0_client_gets_such_an_answer_until_the_connection_closes() -> None:
    async with rig(answering(b"HTTP/1.1 200 OK\r\n\r\nhello world", close=True)) as r:
        client = await r.client()
        answer = await client.ask(b"GET /x HTTP/1.0\r\n\r\n")
        assert (answer.body, answer.get(b"transfer-encoding")) == (b"hello world", None)
        assert answer.get(b"connection") == b"close"


async def test_chunks_pass_through_byte_for_byte() -> None:
    body = b"5;ext=1\r\nhello\r\n1\r\n!\r\n0\r\nx-trailer: t\r\n\r\n"
    async with rig(answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(GET)
            assert (answer.body, answer.raw_body) == (b"hello!", body)
        assert len(r.upstream.connections) == 1


async def test_an_http_1_0_client_gets_a_chunked_answer_without_chunks() -> None:
    body = b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n"
    async with rig(answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)) as r:
        client = await r.client()
        answer = await client.ask(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (answer.body, answer.get(b"transfer-encoding")) == (b"hello!", None)
        assert r.pool.idle_count(r.upstream.target) == 1


async def test_an_http_1_0_client_may_keep_the_connection_when_the_length_is_known() -> None:
    async with rig(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert (answer.body, answer.get(b"connection")) == (b"ok", b"keep-alive")
        answer = await client.ask(b"GET /x HTTP/1.0\r\n\r\n")
        assert answer.get(b"connection") == b"close"
        await client.closed()
        assert r.upstream.connections[0].requests[0].get(b"host") == b"127.0.0.1:%d" % r.upstream.target.port


async def test_an_answer_in_pieces_reaches_the_client_as_it_comes() -> None:
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(3):
            await served.send(b"2\r\nn%d\r\n" % number)
            await gate.wait()
            gate.clear()
        await served.send(b"0\r\n\r\n")
        await served.request()

    async with rig(script) as r:
        client = await r.client()
        await client.send(GET)
        await client.head()
        for number in range(3):
            assert await client.exactly(7) == b"2\r\nn%d\r\n" % number
            gate.set()
        assert await client.exactly(5) == b"0\r\n\r\n"


@pytest.mark.parametrize(
    "reads",
    [
        [b"2\r\nab\r\n", b"2\r\ncd\r\n3\r\nefg\r\n", b"1\r\nh\r\n", b"0\r\n\r\n"],
        [b"2\r\nab\r\n", b"4\r\nc", b"def\r\n", b"2\r\ngh\r\n", b"0\r\n\r\n"],
        # The middle of a chunk that looks like a chunk, and like the last one.
        [b"2\r\nab\r\n", b"f\r\n", b"2\r\nxy\r\n", b"5\r\n", b"0\r\n\r\n", b"\r\n", b"1\r\nz\r\n", b"0\r\n\r\n"],
        [b"2\r\nab\r\n", b"2\r\ncd\r\n0\r\n\r\n"],
        [b"2\r\nab\r\n", b"A\r\n0123456789\r\n", b"2;x=y\r\ncd\r\n", b"0\r\nx-t: u\r\n\r\n"],
    ],
)
async def test_chunks_may_come_whole_together_or_torn(reads: list[bytes]) -> None:
    """Whole ones are passed on without counting; from the first other one on they are counted."""
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        for _ in range(2):
            await served.request()
            await served.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for read in reads:
                await gate.wait()
                gate.clear()
                await served.send(read)

    async with rig(script) as r:
        client = await r.client()
        for _ in range(2):  # the second shows that the first ended where it ends
            await client.send(GET)
            await client.head()
            for read in reads:
                gate.set()
                assert await client.exactly(len(read)) == read
        await r.until(lambda: len(r.handler.results) == 2)
        assert all(result.complete for result in r.handler.results)
        assert len(r.upstream.connections) == 1


async def test_a_chunk_longer_than_it_says_breaks_the_answer_off() -> None:
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        await gate.wait()
        await served.send(b"2\r\nabc\r\n")
        await served.closed()

    async with rig(script) as r:
        client = await r.client()
        await client.send(GET)
        await client.head()
        assert await client.exactly(7) == b"2\r\nab\r\n"
        gate.set()
        await client.closed()
        assert not r.handler.results[0].complete


@pytest.mark.parametrize("size", [1, 3, 7])
async def test_a_head_that_comes_in_small_pieces(size: int) -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"

    async def script(served: Served) -> None:
        while True:
            await served.request()
            for at in range(0, len(whole), size):
                await served.send(whole[at : at + size])
                await asyncio.sleep(0)

    async with rig(script) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(GET)
            assert (answer.body, answer.get(b"x-a")) == (b"hello", b"b")


async def test_interim_answers_do_not_end_the_exchange() -> None:
    """100 is swallowed, 103 is passed on, and the next client never gets what belongs to the first."""
    first = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfirst"
    )
    second = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecond"
    async with rig(answering(first, second)) as r:
        client = await r.client()
        await client.send(GET)
        assert await client.head() == b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        assert (await client.answer()).body == b"first"
        assert (await client.ask(GET)).body == b"second"
        assert len(r.upstream.connections) == 1


async def test_an_interim_answer_alone_leaves_the_exchange_open() -> None:
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await gate.wait()
        await served.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfinal")
        await served.request()

    async with rig(script) as r:
        client, other = await r.client(), await r.client()
        await client.send(GET)
        await r.until(lambda: r.upstream.connections and r.upstream.connections[0].requests)
        assert r.pool.idle_count(r.upstream.target) == 0
        await other.send(GET)
        await r.until(lambda: len(r.upstream.connections) == 2)  # it did not get the busy connection
        gate.set()
        assert (await client.answer()).body == b"final"
        assert (await other.answer()).body == b"final"


async def test_http_1_0_clients_get_no_interim_answers() -> None:
    script = answering(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    async with rig(script) as r:
        client = await r.client()
        await client.send(b"GET /x HTTP/1.0\r\n\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_hop_by_hop_headers_of_answers_are_removed() -> None:
    script = answering(
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Private\r\nKeep-Alive: timeout=5\r\nX-Private: 1\r\n"
        b"Upgrade: h2c\r\nTrailer: x\r\nProxy-Authenticate: y\r\nX-Request-Id: theirs\r\nX-Public: 2\r\n"
        b"Content-Length: 2\r\n\r\nok"
    )
    async with rig(script) as r:
        answer = await (await r.client()).ask(b"GET / HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine\r\n\r\n")
        assert answer.headers == [(b"x-public", b"2"), (b"content-length", b"2"), (b"x-request-id", b"mine")]


async def test_repeated_headers_keep_their_order() -> None:
    script = answering(b"HTTP/1.1 200 OK\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nContent-Length: 0\r\n\r\n")
    async with rig(script) as r:
        assert (await (await r.client()).ask(GET)).all(b"set-cookie") == [b"a", b"b"]


async def test_the_reason_and_unknown_statuses_pass() -> None:
    async with rig(answering(b"HTTP/1.1 599 Very Own\r\nContent-Length: 0\r\n\r\n")) as r:
        assert (await (await r.client()).ask(GET)).start == b"HTTP/1.1 599 Very Own"


async def test_an_upstream_that_says_close_is_not_used_again() -> None:
    async with rig(answering(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(GET)
            assert (answer.body, answer.get(b"connection")) == (b"ok", None)  # that was for us, not for the client
        assert len(r.upstream.connections) == 2


@pytest.mark.parametrize(("header", "connections"), [(b"", 2), (b"Connection: keep-alive\r\n", 1)])
async def test_an_http_1_0_upstream_is_used_again_only_if_it_says_so(header: bytes, connections: int) -> None:
    async with rig(answering(b"HTTP/1.0 200 OK\r\n%bContent-Length: 2\r\n\r\nok" % header)) as r:
        client = await r.client()
        for _ in range(2):
            assert (await client.ask(GET)).start == b"HTTP/1.1 200 OK"
        assert len(r.upstream.connections) == connections


class Notes:
    def __init__(self) -> None:
        self.heads: list[tuple[int, Headers]] = []
        self.pieces: list[bytes] = []

    def head(self, status: int, headers: Headers) -> None:
        self.heads.append((status, headers))

    def data(self, chunk: bytes) -> None:
        self.pieces.append(chunk)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nX-A: b\r\nContent-Length: 10\r\n\r\nhellohello",
        b"HTTP/1.1 200 OK\r\nX-A: b\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: b\r\n\r\nhellohello",
    ],
)
async def test_a_tap_sees_the_body_without_framing(raw: bytes) -> None:
    async with rig(answering(raw, close=True)) as r:
        notes = r.handler.options["tap"] = Notes()
        assert (await (await r.client()).ask(GET)).body == b"hellohello"
        assert notes.heads == [(200, ((b"x-a", b"b"),))]
        assert b"".join(notes.pieces) == b"hellohello"


@pytest.mark.parametrize("method", ["head", "data"])
async def test_a_tap_that_fails_does_not_harm_the_answer(method: str) -> None:
    class Bad(Notes):
        def head(self, status: int, headers: Headers) -> None:
            if method == "head":
                raise RuntimeError("tap")

        def data(self, chunk: bytes) -> None:
            raise RuntimeError("tap")

    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n5\r\nhello\r\n0\r\n\r\n"
    async with rig(answering(raw)) as r:
        r.handler.options["tap"] = Bad()
        client = await r.client()
        for _ in range(2):
            assert (await client.ask(GET)).body == b"hellohello"


async def test_headers_of_ours_replace_those_of_the_upstream() -> None:
    async with rig(answering(b"HTTP/1.1 200 OK\r\nX-A: theirs\r\nX-B: theirs\r\nContent-Length: 0\r\n\r\n")) as r:
        r.handler.options["response_headers"] = ((b"x-a", b"ours"), (b"vary", b"origin"))
        answer = await (await r.client()).ask(GET)
        assert answer.all(b"x-a") == [b"ours"]
        assert (answer.get(b"x-b"), answer.get(b"vary")) == (b"theirs", b"origin")


async def test_large_answers_pass_unchanged() -> None:
    body = bytes(range(256)) * 8192  # 2 MiB
    chunked = b"".join(
        b"%x\r\n%b\r\n" % (len(body[i : i + 50_000]), body[i : i + 50_000]) for i in range(0, len(body), 50_000)
    )
    script = answering(
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % chunked,
    )
    async with rig(script) as r:
        client = await r.client()
        assert (await client.ask(GET)).body == body
        assert (await client.ask(GET)).body == body
        assert len(r.upstream.connections) == 1


async def test_a_raw_tap_sees_what_passes_framing_and_all() -> None:
    class Raw(Notes):
        raw = True

    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    async with rig(answering(raw)) as r:
        notes = r.handler.options["tap"] = Raw()
        client = await r.client()
        assert (await client.ask(GET)).body == b"hello"
        assert b"".join(notes.pieces) == b"5\r\nhello\r\n0\r\n\r\n"


@pytest.mark.parametrize("whole", [True, False])
async def test_an_answer_that_is_unwanted_is_not_passed_on(whole: bool) -> None:
    """The handler may ask another one; the connection is kept where all of the answer is known to have come."""
    head = b"HTTP/1.1 410 Gone\r\nX-Why: moved\r\nContent-Length: 5\r\n\r\n"

    async def gone(served: Served) -> None:
        await served.request()
        await served.send(head + (b"gone!" if whole else b""))
        with contextlib.suppress(asyncio.IncompleteReadError):
            await served.request()
            await served.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    seen: list[tuple[int, Headers]] = []

    def unwanted(status: int, headers: Headers) -> bool:
        seen.append((status, headers))
        return True

    class Twice(Everything):
        async def handle(self, request: Request, responder: Responder) -> None:
            with pytest.raises(UpstreamFailed) as failed:
                await responder.relay(self.target, unwanted=unwanted)
            assert (failed.value.refused, failed.value.resendable, failed.value.status) == (True, True, 410)
            if whole:
                await responder.relay(self.target, unwanted=unwanted)
            else:
                await responder.send(503, (), b"nobody")

    async with rig(gone, handler=Twice()) as r:
        answer = await (await r.client()).ask(GET)
        assert (answer.status, answer.body) == ((200, b"ok") if whole else (503, b"nobody"))
        assert seen == [(410, ((b"x-why", b"moved"),))]
        assert len(r.upstream.connections) == 1


@pytest.mark.parametrize("reads", [True, False])
async def test_the_body_of_an_unwanted_answer_is_waited_for_only_where_it_is_read(reads: bool) -> None:
    """A worker explains the errors of its engine and needs their text; a gateway only has to ask another replica."""
    failed, complete = asyncio.Event(), asyncio.Event()

    async def gone(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 410 Gone\r\nContent-Length: 5\r\n\r\ngo")
        if not reads:
            await failed.wait()
        with contextlib.suppress(ConnectionError):
            await served.send(b"ne!")
        complete.set()

    class Reader(Everything):
        async def handle(self, request: Request, responder: Responder) -> None:
            with pytest.raises(UpstreamFailed) as failure:
                await responder.relay(self.target, unwanted=lambda *_: True, reads_unwanted=reads)
            failed.set()
            assert failure.value.answer == (b"gone!" if reads else b"")
            await responder.send(503, (), b"nobody")

    async with rig(gone, handler=Reader()) as r:
        answer = await (await r.client()).ask(GET)
        assert (answer.status, answer.body) == (503, b"nobody")
        await asyncio.wait_for(complete.wait(), 30)


async def test_a_body_may_be_handed_over_as_a_view() -> None:
    async with rig(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")) as r:
        body = bytes(range(256)) * 40_000
        r.handler.options["body"] = memoryview(body)
        client = await r.client()
        for _ in range(2):  # on a new connection, and on a kept one
            assert (await client.ask(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi")).status == 200
            assert r.upstream.connections[0].requests[-1].body == body
