"""The relay's fast path: requests take it where they can, and every event on it ends as on the general path."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.contract.http import KnownHead, Patience, PreparedForward, Request, Responder, Target
from corral.relay import Limits, PoolLimits, RelayServer
from corral.relay.fast_path import FastPathConnection, FastPathUpstream
from corral.relay.write_queue import MAX_TURNS
from tests.integration.relay.test_fuzz import CUTS, split, stage
from tests.support.relay import Client, Everything, HeldClock, Rig, Script, Served, answering, ok, quick, rig

POST = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nX-Own: yes\r\n\r\nbody"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Own: no\r\n\r\nhi"


async def warm(r: Rig) -> Client:
    """A client whose first request has been answered: now there is a connection for the next."""
    client = await r.client()
    assert (await client.ask(POST)).status == 200
    return client


@pytest.fixture(params=[True, False], ids=["fast", "general"])
def fast_path_on(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def then(*after: Script) -> Script:
    """The first request of the first connection is answered, the second meets `after`; other connections are fine."""

    async def script(served: Served) -> None:
        if served.number > 1:
            await ok(served)
        await served.request()
        await served.send(OK)
        for step in after:
            await step(served)

    return script


async def test_a_warm_request_flies() -> None:
    async with rig(answering(OK), fast_path_on=True) as r:
        client = await warm(r)
        for number in range(1, 4):
            answer = await client.ask(POST.replace(b"4\r\n", b"%d\r\n" % (3 + number)) + b"x" * (number - 1))
            assert (answer.status, answer.body, answer.get(b"x-own")) == (200, b"hi", b"no")
            assert r.handler.fast_path_requests == number
        assert len(r.upstream.connections) == 1
        bodies = [asked.body for asked in r.upstream.connections[0].requests]
        assert bodies == [b"body", b"body", b"bodyx", b"bodyxx"]
        counters = r.server.counters
        assert (counters.requests, counters.upstream_reuses, counters.upstream_connects) == (4, 3, 1)
        assert counters.bytes_relayed == sum(result.bytes_sent for result in r.handler.results)


async def test_heads_may_change_after_the_length() -> None:
    """As with servers that write the date there, and clients that count."""
    dated = [OK.replace(b"X-Own: no", b"Date: %d" % second) for second in range(6)]
    async with rig(answering(*dated), fast_path_on=True) as r:
        client = await r.client()
        for _ in range(6):
            for request in (POST, POST.replace(b"yes", b"now")):
                await r.until(lambda: r.server.running == 0)
                assert (await client.ask(request)).status == 200
        assert r.handler.fast_path_requests >= 8  # the first of each kind is read in earnest


def traced(number: int, name: bytes = b"traceparent", *, flags: bytes = b"01") -> tuple[bytes, bytes]:
    """A request with a trace id of its own, and its header's value."""
    value = b"00-%032x-%016x-%b" % (number + 1, number + 1, flags)
    return POST.replace(b"X-Own", name + b": " + value + b"\r\nX-Own"), value


async def test_requests_that_differ_in_their_trace_fly_too(fast_path_on: bool) -> None:
    async with rig(ok, fast_path_on=fast_path_on) as r:
        client = await warm(r)
        sent = [POST, *(traced(n, name)[0] for n, name in enumerate([b"traceparent", b"Traceparent"] * 3)), POST]
        for request in sent:
            assert (await client.ask(request)).status == 200
        (served,) = r.upstream.connections
        seen = [asked.get(b"traceparent") for asked in served.requests]
        assert seen == [None, None, *(traced(n)[1] for n in range(6)), None]
        assert {asked.get(b"x-own") for asked in served.requests} == {b"yes"}
        assert r.handler.fast_path_requests == (len(sent) if fast_path_on else 0)


@pytest.mark.parametrize("name", ["refused", "no content", "two pieces"])
async def test_a_trace_is_kept_where_a_request_falls_back(name: str) -> None:
    answers = {
        "refused": b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno",
        "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
        "two pieces": OK.replace(b"Length: 2", b"Length: 3"),
    }

    async def rest(served: Served) -> None:
        await served.request()
        await served.send(answers[name])
        await asyncio.sleep(0.002)  # so that the rest is read by itself; nothing depends on it
        if name == "two pieces":
            await served.send(b"!")

    async with rig(then(rest), fast_path_on=True) as r:
        client = await warm(r)
        request, value = traced(7)
        assert (await client.ask(request)).status in (404, 204, 200)
        handled = r.handler.requests[-1]
        assert isinstance(handled, Request), "the general path ended it"
        assert (b"traceparent", value) in handled.headers
        assert r.upstream.connections[0].requests[-1].get(b"traceparent") == value


async def test_a_trace_is_sent_with_a_request_that_finds_no_idle_connection() -> None:
    async with rig(ok, fast_path_on=True) as r:
        client = await warm(r)
        request, value = traced(7)
        for upstream in list(r.pool._open):
            upstream.discard()
        await r.until(lambda: not r.pool._open)
        assert (await client.ask(request)).status == 200
        assert r.upstream.connections[-1].requests[-1].get(b"traceparent") == value


async def test_two_traces_are_both_passed_on() -> None:
    """That is for their reader to judge; none is lost."""
    async with rig(ok, fast_path_on=True) as r:
        client = await warm(r)
        request = traced(7)[0].replace(b"X-Own", b"traceparent: 00-other\r\nX-Own")
        for _ in range(3):
            assert (await client.ask(request)).status == 200
        for asked in r.upstream.connections[0].requests[1:]:
            assert sorted(asked.all(b"traceparent")) == sorted([traced(7)[1], b"00-other"])


async def test_many_clients_fly_at_once() -> None:
    async with rig(ok, fast_path_on=True) as r:
        clients = [await warm(r) for _ in range(20)]
        for _ in range(3):
            for client in clients:
                await client.send(POST)
            for client in clients:
                assert (await client.answer()).body == b"POST /a HTTP/1.1"
        assert r.handler.fast_path_requests > 20


ANSWERS = {
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    "until the end": b"HTTP/1.1 200 OK\r\nX: y\r\n\r\nhi",
    "refused": b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno",
    "nothing": b"HTTP/1.1 204 No Content\r\n\r\n",
    "early hints": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
    "last": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
    "too much": OK + b"HTTP/1.1 200 OK\r\n",
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "old": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    "nonsense": b"no answer at all\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nhi",
    "nul": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: \x00\r\n\r\nhi",
}


@pytest.mark.parametrize("name", list(ANSWERS))
@pytest.mark.parametrize("pieces", [1, 2, 30])
async def test_any_answer_is_passed_on_as_on_the_general_path(name: str, pieces: int) -> None:
    """Byte for byte, and so is what the upstream gets."""

    async def play(served: Served) -> None:
        await served.request()
        raw = ANSWERS[name]
        for start in range(0, len(raw), -(-len(raw) // pieces)):
            await served.send(raw[start : start + -(-len(raw) // pieces)])
            await asyncio.sleep(0.002)  # so that each piece is read by itself; nothing depends on it
        served.writer.write_eof()

    seen = []
    for is_on in (True, False):
        async with rig(then(play), fast_path_on=is_on) as r:
            client = await warm(r)
            await client.send(POST)
            hint = await client.head() if name == "early hints" else b""
            answer = await client.answer(b"POST")
            headers = [(key, b"id" if key == b"x-request-id" else value) for key, value in answer.headers]
            requests = [(asked.start, asked.body, len(asked.headers)) for asked in r.upstream.connections[0].requests]
            failures = r.server.counters.upstream_failures
            seen.append((hint, answer.start, headers, answer.raw_body, requests, failures))
    assert seen[0] == seen[1]


FROM_A_RELAY = {
    "ours": b"HTTP/1.1 200 OK\r\nx-a: b\r\ncontent-length: 2\r\nx-request-id: %b\r\n\r\nhi",
    "written otherwise": b"HTTP/1.1 200 OK\r\nx-a: b\r\nContent-Length: 2\r\nx-request-id: %b\r\n\r\nhi",
    "with a line for us alone": b"HTTP/1.1 200 OK\r\nKeep-Alive: 5\r\nx-a: b\r\ncontent-length: 2\r\n"
    b"x-request-id: %b\r\n\r\nhi",
    "with more behind the id": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-request-id: %b\r\nx-a: b\r\n\r\nhi",
}
_IDS: dict[str, Callable[[bytes], bytes]] = {
    "the same": lambda own: own,
    "as long": lambda own: b"z" * len(own),
    "longer": lambda own: own + b"1",
    "shorter": lambda own: own[:-1],
}


@pytest.mark.parametrize("form", list(FROM_A_RELAY))
@pytest.mark.parametrize("other_id", list(_IDS))
async def test_an_answer_with_an_id_of_its_own_gets_ours(form: str, other_id: str, fast_path_on: bool) -> None:
    """What comes from a relay like this one may be passed on as it is, but only where that makes no difference."""

    async def serve(served: Served) -> None:
        for turn in range(6):  # forms are known after the first; in between one that is ours
            own = (await served.request()).get(b"x-request-id") or b""
            form_now, id_now = (form, _IDS[other_id](own)) if turn % 3 else ("ours", own)
            await served.send(FROM_A_RELAY[form_now] % id_now)

    async with rig(serve, fast_path_on=fast_path_on) as r:
        client = await r.client()
        for _ in range(6):
            answer = await client.ask(POST)
            sent = r.upstream.connections[0].requests[-1].get(b"x-request-id")
            assert answer.headers == [(b"x-a", b"b"), (b"content-length", b"2"), (b"x-request-id", sent)]
            assert (answer.status, answer.raw_body) == (200, b"hi")
        if fast_path_on:
            assert r.handler.fast_path_requests == 5


def mask(head: bytes) -> bytes:
    return re.sub(rb"(x-request-id: )[^\r]+", rb"\1id", head)


async def test_a_connection_gone_stale_is_replaced(fast_path_on: bool) -> None:
    async def leave(served: Served) -> None:
        await served.request()
        served.abort()

    async with rig(then(leave), fast_path_on=fast_path_on) as r:
        client = await warm(r)
        assert (await client.ask(POST)).body == b"POST /a HTTP/1.1"
        assert r.server.counters.upstream_retries == 1
        assert len(r.upstream.connections) == 2
        assert r.handler.results[-1].complete


async def test_a_half_answer_is_cut(fast_path_on: bool) -> None:
    async def half(served: Served) -> None:
        await served.request()
        await served.send(OK[:-1])

    async with rig(then(half), fast_path_on=fast_path_on) as r:
        client = await warm(r)
        await client.send(POST)
        assert (await client.rest()).endswith(b"\r\n\r\nh")
        await r.until(lambda: len(r.handler.results) == 2)
        assert not r.handler.results[1].complete


async def silent(served: Served) -> None:
    await served.request()
    await served.rest()


async def test_a_silent_upstream_is_given_up(fast_path_on: bool, clock: HeldClock) -> None:
    handler = Everything()
    async with rig(then(silent), handler=handler, pool_limits=PoolLimits(idle_s=0.4), fast_path_on=fast_path_on) as r:
        client = await warm(r)
        clock.let_go()
        handler.options["patience"] = Patience(first_byte_s=0.1)
        answer = await client.ask(POST)
        assert (answer.status, answer.body) == (
            504,
            b'{"error":{"code":504,"message":"the upstream did not answer","type":"server_error"}}',
        )
        assert r.server.counters.upstream_timeouts == 1


@pytest.mark.parametrize("leave", ["half-close", "abort"])
async def test_a_client_that_leaves_stops_the_upstream(fast_path_on: bool, leave: str) -> None:
    async with rig(then(silent), fast_path_on=fast_path_on) as r:
        client = await warm(r)
        await client.send(POST)
        await r.until(lambda: len(r.upstream.connections[0].requests) == 2)
        if leave == "abort":
            client.abort()
        else:
            client.writer.write_eof()
        await r.until(lambda: r.server.running == 0)
        assert r.server.counters.clients_gone == 1
        assert r.handler.results[-1].client_gone
        await r.until(lambda: r.server.counters.upstream_open == 0)


async def test_requests_sent_ahead_are_answered_in_order(fast_path_on: bool) -> None:
    release = asyncio.Event()

    async def slow(served: Served) -> None:
        asked = await served.request()
        await release.wait()
        await served.send(OK.replace(b"hi", asked.body[:2]))
        await ok(served)

    async with rig(then(slow), fast_path_on=fast_path_on) as r:
        client = await warm(r)
        await client.send(POST)
        await r.until(lambda: len(r.upstream.connections[0].requests) == 2)
        await client.send(POST.replace(b"/a", b"/b") + POST.replace(b"/a", b"/c")[:50])
        release.set()
        assert (await client.answer()).body == b"bo"
        assert (await client.answer()).body == b"POST /b HTTP/1.1"
        await client.send(POST.replace(b"/a", b"/c")[50:])
        assert (await client.answer()).body == b"POST /c HTTP/1.1"


async def test_a_server_that_leaves_says_so_in_the_answer(fast_path_on: bool) -> None:
    release = asyncio.Event()

    async def slow(served: Served) -> None:
        await served.request()
        await release.wait()
        await served.send(OK)

    async with rig(then(slow), fast_path_on=fast_path_on) as r:
        client = await warm(r)
        await client.send(POST)
        await r.until(lambda: len(r.upstream.connections[0].requests) == 2)
        draining = asyncio.create_task(r.server.drain(5))
        await r.until(lambda: r.server.draining)
        release.set()
        answer = await client.answer()
        assert (answer.body, answer.get(b"connection")) == (b"hi", b"close")
        await client.closed()
        assert await draining == 0


async def test_a_pool_that_closes_ends_what_is_under_way(fast_path_on: bool) -> None:
    async with rig(then(silent), fast_path_on=fast_path_on) as r:
        client = await warm(r)
        await client.send(POST)
        await r.until(lambda: len(r.upstream.connections[0].requests) == 2)
        await r.pool.close()
        assert (await client.answer()).status == 502


async def test_a_server_that_is_cut_off_ends_what_is_under_way(fast_path_on: bool) -> None:
    async with rig(then(silent), fast_path_on=fast_path_on) as r:
        client = await warm(r)
        await client.send(POST)
        await r.until(lambda: r.server.running == 1)
        await r.server.close()
        assert r.server.running == 0
        assert await client.rest() == b""


async def test_waiting_for_an_answer_is_not_idleness(fast_path_on: bool, clock: HeldClock) -> None:
    async def slow(served: Served) -> None:
        await served.request()
        await clock.forward(0.3, r.server.ticker)  # longer than clients may be idle
        await served.send(OK)

    async with rig(then(slow), limits=Limits(timeouts=quick(keep_alive_s=0.1)), fast_path_on=fast_path_on) as r:
        client = await warm(r)
        assert (await client.ask(POST)).body == b"hi"
        clock.let_go()
        await client.closed()  # now it is


async def test_the_next_head_has_its_own_deadline(fast_path_on: bool, clock: HeldClock) -> None:
    """Also where the connection has never been on the general path."""
    timeouts = quick(head_s=0.2, keep_alive_s=30.0)
    async with rig(answering(OK), limits=Limits(timeouts=timeouts), fast_path_on=fast_path_on) as r:
        await warm(r)
        client = await r.client()
        assert (await client.ask(POST)).status == 200
        await client.send(POST[:20])
        clock.let_go()
        assert (await client.answer()).status == 408
        assert r.server.counters.client_timeouts == 1


async def test_a_client_that_takes_nothing_slows_the_upstream_down(fast_path_on: bool) -> None:
    """Its next answers wait until it has taken the one before."""
    large = b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 9_000_000
    async with rig(answering(OK, large, OK), fast_path_on=fast_path_on) as r:
        client = await warm(r)
        await client.send(POST + POST)
        await r.until(lambda: len(r.upstream.connections[0].requests) >= 2)
        assert len((await client.answer()).body) == 9_000_000
        assert (await client.answer()).body == b"hi"


async def test_a_client_becomes_slow_while_another_handler_writes() -> None:
    """Any task that writes what was collected for many clients may find its buffer full. No stream ends of it."""
    go = asyncio.Event()

    async def streams(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await go.wait()
        await served.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async with rig(then(streams), fast_path_on=True) as r:
        client = await warm(r)
        await client.send(POST)
        head = await client.head()
        assert b"chunked" in head
        (conn,) = r.server._connections
        assert isinstance(conn, FastPathConnection)
        await r.until(lambda: conn.pending_upstream is not None and conn.pending_upstream.stream is not None)
        conn.pause_writing()  # in this test's task, as in that of a handler
        await r.until(lambda: conn.exchange is not None)  # the general path has it
        go.set()
        conn.resume_writing()
        body, _ = await client.chunked()
        assert body == b"onetwo"


class Failing(Everything):
    def decide(self, head: KnownHead, body: bytes, traceparent: bytes) -> PreparedForward | None:
        raise ValueError("cannot say")


async def test_a_fast_path_that_fails_leaves_the_request_to_the_general_path() -> None:
    async with rig(answering(OK), handler=Failing(), fast_path_on=True) as r:
        client = await warm(r)
        assert (await client.ask(POST)).body == b"hi"
        assert len(r.handler.results) == 2


class Dawdling(Everything):
    """Waits before it relays what has been sent already: against the rules."""

    async def handle_prepared(
        self, forward: PreparedForward, request: Request, responder: Responder, elapsed_s: float
    ) -> None:
        await asyncio.sleep(0)
        await super().handle_prepared(forward, request, responder, elapsed_s)


async def test_a_request_is_never_sent_a_second_time_for_a_handler_that_waits() -> None:
    chunked = ANSWERS["chunked"].replace(b" 200 ", b" 202 ")  # not for the fast path
    async with rig(answering(OK, chunked), handler=Dawdling(), fast_path_on=True) as r:
        client = await r.client()
        assert (await client.ask(POST)).status == 200  # nothing was under way yet: it may
        assert (await client.ask(POST)).status == 500
        assert [len(served.requests) for served in r.upstream.connections] == [2]
        assert r.server.counters.handler_failures == 1


class Wire:
    """A transport that only notes what is done with it."""

    def __init__(self) -> None:
        self.written = b""
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, _name: str) -> None:
        return None


async def turn(step: Callable[..., object], *arguments: object) -> None:
    """As the loop does it: in no task."""
    asyncio.get_running_loop().call_soon(step, *arguments)
    await asyncio.sleep(0)


async def test_a_client_that_became_slow_meanwhile_holds_the_upstream() -> None:
    handler = Everything()
    handler.target = Target(host="h", port=1)
    server = RelayServer(handler, Limits(), fast_path=handler)
    there, here = Wire(), Wire()
    upstream, conn = FastPathUpstream(server.pool, handler.target), FastPathConnection(server, handler)
    upstream.connection_made(there)  # type: ignore[arg-type]
    conn.connection_made(here)  # type: ignore[arg-type]
    assert server.pool.give_back(upstream)
    assert server.templates.find(POST) is None  # once; from now on it is known
    conn.data_received(POST)
    server.write_queue.flush()
    assert there.written.endswith(b"\r\n\r\nbody")
    conn.pause_writing()
    await turn(upstream.data_received, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
    held = not there.reading
    await turn(conn.resume_writing)
    assert (held, there.reading) == (True, True)
    await turn(upstream.data_received, b"0\r\n\r\n")
    server.write_queue.flush()
    assert here.written.endswith(b"\r\n\r\n2\r\nhi\r\n0\r\n\r\n")
    assert (server.running, conn.exchange) == (0, None)
    for protocol in (conn, upstream):
        await turn(protocol.connection_lost, None)


# Equivalence.

SAFE = st.text("abcXYZ 019;=,", max_size=12).map(lambda text: text.strip().encode())
SELDOM_CUT = st.integers(0, 3).flatmap(lambda n: st.just([]) if n else CUTS)
BODIES = st.integers(0, 130).map(lambda size: b"b" * size) | st.binary(max_size=40)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    spelling = draw(st.sampled_from([b"Content-Length: %d", b"content-length: %d", b"CONTENT-LENGTH:%d"]))
    body = draw(BODIES)
    lines = [b"Host: h", spelling % len(body), b"X-A: " + draw(SAFE)]
    lines += draw(st.lists(st.sampled_from([b"Connection: keep-alive", b"TE: x", b"X-Request-Id: mine"]), max_size=2))
    method = draw(st.sampled_from([b"POST", b"POST", b"PUT", b"GET"]))
    return b"\r\n".join([method + b" /p HTTP/1.1", *draw(st.permutations(lines))]) + b"\r\n\r\n" + body


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    body = draw(BODIES)
    status = draw(st.sampled_from([b"200 OK", b"200 OK", b"200 OK", b"201 Made", b"302 Found", b"404 No", b"500 Oh"]))
    lines = [b"X-B: " + draw(SAFE), *draw(st.lists(st.sampled_from([b"Date: now", b"Vary: *"]), max_size=2))]
    if draw(st.integers(0, 5)):
        lines.append(draw(st.sampled_from([b"Content-Length: %d", b"content-length: %d"])) % len(body))
        rest = body
    else:
        lines.append(b"Transfer-Encoding: chunked")
        rest = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
    return b"\r\n".join([b"HTTP/1.1 " + status, *draw(st.permutations(lines))]) + b"\r\n\r\n" + rest


class Echo:
    """Plays the next answer in its pieces, and keeps what it was asked, byte for byte."""

    def __init__(self) -> None:
        self.next: list[list[bytes]] = []
        self.asked: list[bytes] = []

    async def serve(self, served: Served) -> None:
        while True:
            head = await served.head()
            length = re.search(rb"content-length: (\d+)", head)
            self.asked.append(mask(head) + (await served.exactly(int(length[1])) if length else b""))
            for piece in self.next.pop(0):
                await served.send(piece)
                await asyncio.sleep(0)


@pytest.fixture
def both() -> Iterator[list[tuple[Any, Echo]]]:
    """The same relay twice: with the fast path, and without."""
    echoes = Echo(), Echo()
    with stage(script=echoes[0].serve, fast_path_on=True) as short, stage(script=echoes[1].serve) as general:
        yield [(short, echoes[0]), (general, echoes[1])]
        assert short.rig.handler.fast_path_requests >= 20  # or nothing was compared


def test_both_paths_are_the_same_byte_for_byte(both: list[tuple[Any, Echo]]) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.tuples(requests(), answers(), SELDOM_CUT, SELDOM_CUT), min_size=1, max_size=5))
    def check(talk: list[tuple[bytes, bytes, list[int], list[int]]]) -> None:
        async def play(made: Rig, echo: Echo) -> tuple[list[Any], list[bytes]]:
            echo.asked.clear()
            echo.next = [split(answer, cuts) for _, answer, _, cuts in talk]
            client = await made.client()
            heard: list[Any] = []
            for request, _, cuts, _ in talk:
                for piece in split(request, cuts):
                    client.writer.write(piece)
                    await asyncio.sleep(0)
                answer = await client.answer(request.split(b" ")[0])
                heads = [(name, b"id" if name == b"x-request-id" else value) for name, value in answer.headers]
                heard.append((answer.start, heads, answer.raw_body))
            client.close()
            await client.closed()
            return heard, list(echo.asked)

        results = [s.run(play(s.rig, echo)) for s, echo in both]
        assert results[0] == results[1]

    check()


@pytest.mark.parametrize(("gap_s", "held"), [(0.0001, True), (0.001, False), (0.02, False)])
async def test_only_the_pieces_of_a_quick_stream_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, gap_s: float, held: bool
) -> None:
    """A token that an engine paces is passed on when it comes."""
    now = 1000.0
    monkeypatch.setattr("corral.relay.fast_path._monotonic", lambda: now)
    monkeypatch.setattr("corral.relay.write_queue._FEW", -1)
    monkeypatch.setattr("corral.relay.write_queue.HOLD_S", 60.0)
    handler = Everything()
    handler.target = Target(host="h", port=1)
    server = RelayServer(handler, Limits(), fast_path=handler)
    there, here = Wire(), Wire()
    upstream, conn = FastPathUpstream(server.pool, handler.target), FastPathConnection(server, handler)
    upstream.connection_made(there)  # type: ignore[arg-type]
    conn.connection_made(here)  # type: ignore[arg-type]
    assert server.pool.give_back(upstream)
    assert server.templates.find(POST) is None  # once; from now on it is known
    conn.data_received(POST)
    server.write_queue.flush()
    pieces = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *(b"2\r\n%02d\r\n" % n for n in range(6))]
    for piece in pieces:
        upstream.data_received(piece)
        for _ in range(MAX_TURNS + 2):
            await asyncio.sleep(0)
        now += gap_s
    # The head and two chunks show how quick it is.
    assert here.written.endswith(b"2\r\n01\r\n" if held else pieces[-1])
    upstream.data_received(b"0\r\n\r\n")
    for _ in range(MAX_TURNS + 2):
        await asyncio.sleep(0)
    assert here.written.endswith(b"".join([*pieces[1:], b"0\r\n\r\n"]))
    assert (server.running, conn.exchange) == (0, None)
    for protocol in (conn, upstream):
        await turn(protocol.connection_lost, None)
