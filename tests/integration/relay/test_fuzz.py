"""Random splits change nothing; random bytes break nothing. Over real sockets, on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.contract.http import Patience, Request, Responder
from corral.relay import Limits, PoolLimits
from tests.support.relay import Client, HeldClock, Rig, Served, quick, rig

TOKEN = st.text("abcXYZ019-_!#", min_size=1, max_size=8).map(str.encode)
VALUE = st.text('abc XYZ\t;=,"é', max_size=20).map(lambda text: text.strip().encode("latin-1"))
BODY = st.binary(max_size=60)
CUTS = st.lists(st.integers(1, 40), max_size=30)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    method = draw(st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"]))
    path = b"/" + draw(st.text("abc/?=&%2F.~", max_size=12)).encode()
    headers = draw(st.lists(st.tuples(TOKEN.map(lambda name: b"x-" + name), VALUE), max_size=4))
    lines = [b"%b %b HTTP/1.1" % (method, path), b"Host: h"] + [b"%b: %b" % pair for pair in headers]
    body = draw(BODY)
    match draw(st.sampled_from(["none", "length", "chunked"])):
        case "none":
            tail = b""
        case "length":
            lines.append(
                draw(st.sampled_from([b"Content-Length: %d", b"content-length: %d", b"CONTENT-LENGTH:%d"])) % len(body)
            )
            tail = body
        case _:
            lines.append(b"Transfer-Encoding: chunked")
            sizes = draw(st.lists(st.integers(1, 20), max_size=5))
            tail = chunk(body, sizes) + b"0\r\n" + draw(st.sampled_from([b"", b"t: v\r\n"])) + b"\r\n"
    lines.insert(
        draw(st.integers(1, len(lines))), draw(st.sampled_from([b"A: b", b"Connection: keep-alive", b"TE: x"]))
    )
    return b"\r\n".join(lines) + b"\r\n\r\n" + tail


def chunk(body: bytes, sizes: list[int]) -> bytes:
    out = b""
    for size in [*sizes, len(body)]:
        piece, body = body[:size], body[size:]
        if piece:
            out += b"%x%b\r\n%b\r\n" % (len(piece), b";e=1" if size % 3 == 0 else b"", piece)
    return out


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    pieces = []
    for cut in cuts:
        pieces.append(data[:cut])
        data = data[cut:]
    return [piece for piece in [*pieces, data] if piece]


class Notes:
    """Notes what each request was, and answers with it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    async def handle(self, request: Request, responder: Responder) -> None:
        body = await request.body.read(1000)
        self.seen.append((request.method, request.path, tuple(request.headers), body))
        await responder.send(200, (), b"%d" % len(self.seen))


class Stage:
    """One relay for all examples of a test: only connections are new. What the loop complains about is kept."""

    def __init__(self, runner: asyncio.Runner, made: Rig, complaints: list[dict[str, Any]]) -> None:
        self.rig = made
        self.run = runner.run
        self.complaints = complaints


@contextlib.contextmanager
def stage(**options: Any) -> Iterator[Stage]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        complaints: list[dict[str, Any]] = []
        runner.get_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        entered = rig(**options)
        made = runner.run(entered.__aenter__())
        try:
            yield Stage(runner, made, complaints)
        finally:
            runner.run(entered.__aexit__(None, None, None))
        assert complaints == []


async def feed(client: Client, pieces: list[bytes]) -> None:
    for piece in pieces:
        client.writer.write(piece)
        await asyncio.sleep(0)  # give each piece its own segment


@pytest.fixture(params=[4, -1], ids=["at-once", "together"])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Up to so many requests under way, bytes are written at once."""
    monkeypatch.setattr("corral.relay.write_queue._FEW", request.param)
    value: int = request.param
    return value


def test_random_splits_of_a_request_stream_change_nothing(few: int) -> None:
    handler = Notes()
    with stage(handler=handler) as s:

        @settings(max_examples=150)
        @given(st.lists(requests(), min_size=1, max_size=4), CUTS)
        def check(stream: list[bytes], cuts: list[int]) -> None:
            async def serve(pieces: list[bytes]) -> list[tuple[Any, ...]]:
                handler.seen = []
                client = await s.rig.client()
                await feed(client, pieces)
                for number in range(len(stream)):
                    answer = await client.answer()
                    assert (answer.status, answer.body) == (200, b"%d" % (number + 1))
                client.close()
                return handler.seen

            whole = s.run(serve([b"".join(stream)]))
            assert s.run(serve(split(b"".join(stream), cuts))) == whole
            assert s.run(serve(stream)) == whole

        check()


@st.composite
def garbage(draw: st.DrawFn) -> bytes:
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(st.binary(min_size=1, max_size=200))
    data = bytearray(b"".join(draw(st.lists(requests(), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.integers(0, 3)):
            case 0:
                data[at] = draw(st.integers(0, 255))
            case 1:
                del data[at : at + draw(st.integers(1, 5))]
            case 2:
                data[at:at] = draw(
                    st.sampled_from([b"\r", b"\n", b"\0", b" ", b":", b"\r\n", b"0", b"\r\n\r\n", b"\xff"])
                )
            case _:
                data[at:at] = data[: draw(st.integers(0, len(data)))]
        if not data:
            return b"\0"
    return bytes(data)


def test_random_garbage_gets_an_answer_or_a_close_and_nothing_else(few: int) -> None:
    handler = Notes()
    with stage(handler=handler, limits=Limits(head_bytes=2000, timeouts=quick(linger_s=0.05))) as s:

        @settings(max_examples=400)
        @given(garbage(), CUTS)
        def check(data: bytes, cuts: list[int]) -> None:
            async def serve() -> bytes:
                client = await s.rig.client()
                await feed(client, split(data, cuts))
                with contextlib.suppress(OSError):
                    client.writer.write_eof()
                return await client.rest()

            out = s.run(serve())
            for status in statuses(out):
                assert status in (100, 200, 400, 408, 413, 417, 431, 501, 505), out
            assert s.run(good(s.rig)) == 200
            assert s.complaints == []

        check()
        assert s.rig.server.counters.handler_failures == 0


def statuses(out: bytes) -> list[int]:
    """Of a stream of answers with lengths; it must consist of nothing else."""
    found: list[int] = []
    while out:
        head, separator, out = out.partition(b"\r\n\r\n")
        if not separator:
            return found  # cut in the middle by the client's own leaving
        assert head.startswith(b"HTTP/1.1 "), head
        found.append(int(head[9:12]))
        for line in head.split(b"\r\n"):
            if line.startswith(b"content-length: "):
                out = out[int(line[16:]) :]
    return found


async def good(made: Rig) -> int:
    client = await made.client()
    answer = await client.ask(b"GET /good HTTP/1.1\r\nHost: a\r\n\r\n")
    client.close()
    return answer.status


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """An answer, and its body."""
    body = draw(st.binary(max_size=80))
    lines = [draw(st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.1 404", b"HTTP/1.1 503 Try \xe9 later"])), b"X-A: b"]
    interim = draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n"]))
    if draw(st.booleans()):
        lines.insert(1, b"Content-Length: %d" % len(body))
        return interim + b"\r\n".join(lines) + b"\r\n\r\n" + body, body
    lines.append(b"Transfer-Encoding: chunked")
    framed = chunk(body, draw(st.lists(st.integers(1, 20), max_size=5)))
    return interim + b"\r\n".join(lines) + b"\r\n\r\n" + framed + b"0\r\n\r\n", body


class Upstreams:
    """What the scripted upstream is to say next."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    async def script(self, served: Served) -> None:
        while True:
            await served.request()
            for piece in self.pieces:
                await served.send(piece)
                await asyncio.sleep(0)


def test_random_splits_of_answers_change_nothing(few: int) -> None:
    says = Upstreams()
    with stage(script=says.script) as s:

        @settings(max_examples=150)
        @given(answers(), CUTS, st.sampled_from([b"1.1", b"1.0"]))
        def check(answer: tuple[bytes, bytes], cuts: list[int], version: bytes) -> None:
            async def ask() -> bytes:
                client = await s.rig.client()
                got = await client.ask(b"GET / HTTP/%b\r\nHost: a\r\n\r\n" % version)
                client.close()
                return got.body

            says.pieces = split(answer[0], cuts)
            assert s.run(ask()) == answer[1]

        check()
        assert s.rig.server.counters.upstream_failures == 0
        assert len(s.rig.upstream.connections) == 1


def test_random_garbage_from_an_upstream_never_reaches_the_next_client(few: int, clock: HeldClock) -> None:
    says = Upstreams()

    async def script(served: Served) -> None:
        asked = await served.request()
        if asked.start.startswith(b"GET /good"):
            await served.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood")
            await served.request()
            return
        for piece in says.pieces:
            await served.send(piece)
            await asyncio.sleep(0)
        if says.pieces[-1][-1] % 2:  # some linger, some close
            await served.request()

    async def ask(made: Rig) -> bytes:
        client = await made.client()
        await client.send(b"GET /bad HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        out = await client.rest()
        client.close()
        return out

    limits = PoolLimits(patience=Patience(0.2, 0.2))
    with stage(script=script, pool_limits=limits) as s:

        @settings(max_examples=150)
        @given(st.one_of(st.binary(min_size=1, max_size=120), mutated()), CUTS)
        def check(data: bytes, cuts: list[int]) -> None:
            says.pieces = split(data, cuts)
            clock.let_go()  # some of it looks like the beginning of something
            out = s.run(ask(s.rig))
            assert out.startswith(b"HTTP/1.1 "), out
            clock.hold()
            for _ in range(2):
                assert s.run(body_of_good(s.rig)) == b"good"
            assert s.complaints == []

        check()


async def body_of_good(made: Rig) -> bytes:
    client = await made.client()
    answer = await client.ask(b"GET /good HTTP/1.1\r\nHost: a\r\n\r\n")
    client.close()
    return answer.body


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(answers())[0])
    at = draw(st.integers(0, len(data) - 1))
    match draw(st.integers(0, 2)):
        case 0:
            data[at] = draw(st.integers(0, 255))
        case 1:
            data[at:at] = draw(st.sampled_from([b"\r", b"\n", b"\0", b" ", b"\r\n", b"0", b"\r\n\r\n"]))
        case _:
            data += draw(answers())[0]
    return bytes(data)
