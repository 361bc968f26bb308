"""What handlers may do, and what becomes of those that do it wrong."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from corral.contract.http import Request, Responder, Target, UpstreamFailed
from tests.support.relay import Rig, Served, rig
from tests.support.waiting import DEADLINE_S

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


class Does:
    def __init__(self, action: Callable[[Request, Responder], Awaitable[object]]) -> None:
        self._action = action

    async def handle(self, request: Request, responder: Responder) -> None:
        await self._action(request, responder)


async def test_send_answers_whole() -> None:
    async def action(request: Request, responder: Responder) -> None:
        await responder.send(201, ((b"x-a", b"b"), (b"set-cookie", b"1"), (b"set-cookie", b"2")), b"hello")

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(GET)
            assert (answer.start, answer.body) == (b"HTTP/1.1 201 Created", b"hello")
            assert answer.all(b"set-cookie") == [b"1", b"2"]
            assert (answer.get(b"x-a"), answer.get(b"content-length")) == (b"b", b"5")
            assert answer.get(b"x-request-id")


async def test_send_to_head_has_the_length_and_no_body() -> None:
    async def action(request: Request, responder: Responder) -> None:
        await responder.send(200, (), b"hello")

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(b"HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (answer.status, answer.get(b"content-length")) == (200, b"5")


@pytest.mark.parametrize("status", [204, 304])
async def test_send_without_a_body(status: int) -> None:
    async def action(request: Request, responder: Responder) -> None:
        await responder.send(status, (), b"")

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(GET)
            assert (answer.status, answer.get(b"content-length")) == (status, None)


async def events(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_stream_is_chunked_and_the_connection_stays() -> None:
    async def action(request: Request, responder: Responder) -> None:
        await responder.stream(200, ((b"content-type", b"text/event-stream"),), events(b"one", b"", b"two"))

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(GET)
            assert answer.raw_body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
            assert answer.get(b"content-type") == b"text/event-stream"
        answer = await client.ask(b"HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answer.status == 200
        assert (await client.ask(GET)).body == b"onetwo"


async def test_stream_to_http_1_0_ends_with_the_connection() -> None:
    async def action(request: Request, responder: Responder) -> None:
        await responder.stream(200, (), events(b"one", b"two"))

    async with rig(handler=Does(action)) as r:
        answer = await (await r.client()).ask(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (answer.body, answer.get(b"connection")) == (b"onetwo", b"close")


async def test_a_stream_of_known_length() -> None:
    async def action(request: Request, responder: Responder) -> None:
        await responder.stream(200, (), events(b"one", b"", b"two"), length=6)

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(GET)
            assert (answer.status, answer.body, answer.get(b"content-length")) == (200, b"onetwo", b"6")
            assert answer.get(b"transfer-encoding") is None
            answer = await client.ask(b"HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (answer.status, answer.get(b"content-length")) == (200, b"6")


@pytest.mark.parametrize("length", [5, 7])
async def test_a_stream_of_another_length_than_announced_is_cut(length: int) -> None:
    async def action(request: Request, responder: Responder) -> None:
        await responder.stream(200, (), events(b"one", b"two"), length=length)

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        await client.send(GET)
        received = await client.rest()
        assert b"content-length: %d\r\n" % length in received
        assert len(received.partition(b"\r\n\r\n")[2]) < length
        assert r.server.counters.handler_failures == 1


async def test_a_stream_that_fails_half_way_breaks_the_connection() -> None:
    async def action(request: Request, responder: Responder) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            raise RuntimeError("secret detail")

        await responder.stream(200, (), pieces())

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        await client.send(GET)
        await client.head()
        assert await client.rest() == b"3\r\none\r\n"
        assert r.server.counters.handler_failures == 1


FAILURES: dict[str, BaseException] = {
    "error": RuntimeError("secret detail"),
    "cancelled": asyncio.CancelledError("secret detail"),
    "base": BaseException("secret detail"),
    "group": ExceptionGroup("secret detail", [ValueError("secret detail")]),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_handler_that_fails_is_500_and_says_nothing_of_why(name: str) -> None:
    async def action(request: Request, responder: Responder) -> None:
        if request.path == b"/later":
            await asyncio.sleep(0)
        raise FAILURES[name]

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for path in (b"/at-once", b"/later"):
            answer = await client.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path)
            assert answer.status == 500
            assert answer.body == b'{"error":{"code":500,"message":"internal error","type":"server_error"}}'
            assert b"secret" not in b"".join(value for _, value in answer.headers)
        assert r.server.counters.handler_failures == 2


async def test_a_handler_that_returns_without_an_answer_is_500() -> None:
    async def action(request: Request, responder: Responder) -> None:
        return

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for _ in range(2):
            assert (await client.ask(GET)).status == 500
        assert r.server.counters.handler_failures == 2


async def test_a_handler_that_fails_after_its_answer_does_not_harm_it() -> None:
    async def action(request: Request, responder: Responder) -> None:
        await responder.send(200, (), b"fine")
        raise RuntimeError("afterwards")

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for _ in range(2):
            assert (await client.ask(GET)).body == b"fine"


async def test_a_second_answer_is_refused() -> None:
    errors: list[str] = []

    async def action(request: Request, responder: Responder) -> None:
        await responder.send(200, (), b"first")
        for attempt in (
            responder.send(200, (), b"second"),
            responder.stream(200, (), events(b"second")),
            responder.relay(Target()),
        ):
            try:
                await attempt
            except RuntimeError as error:
                errors.append(str(error))

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        assert (await client.ask(GET)).body == b"first"
        assert (await client.ask(GET)).body == b"first"
        assert len(errors) == 6


async def test_a_responder_kept_beyond_its_request_cannot_answer_the_next() -> None:
    kept: list[Responder] = []
    errors: list[str] = []

    async def action(request: Request, responder: Responder) -> None:
        for old in kept:
            try:
                await old.send(200, (), b"evil")
            except RuntimeError as error:
                errors.append(str(error))
        kept.append(responder)
        await responder.send(200, (), b"fine")

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for _ in range(3):
            assert (await client.ask(GET)).body == b"fine"
        assert len(errors) == 3


@pytest.mark.parametrize("bad", [b"a\r\nEvil: 1", b"a\nb", b"\0"])
async def test_line_breaks_in_headers_of_answers_are_refused(bad: bytes) -> None:
    async def action(request: Request, responder: Responder) -> None:
        if request.path == b"/send":
            await responder.send(200, ((b"x", bad),), b"")
        else:
            await responder.stream(200, ((b"x", bad),), events(b"x"))

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for path in (b"/send", b"/stream"):
            assert (await client.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path)).status == 500


# A handler runs like any coroutine of asyncio's


async def relayed(r: Rig) -> bytes:
    return (await (await r.client()).ask(GET)).body


async def test_timeouts_around_a_relay() -> None:
    limits: list[asyncio.Timeout] = []

    async def script(served: Served) -> None:
        await served.request()
        limits[-1].reschedule(asyncio.get_running_loop().time())  # now, when the upstream is at work
        await served.closed()

    async def action(request: Request, responder: Responder) -> None:
        try:
            async with asyncio.timeout(None) as limit:
                limits.append(limit)
                await responder.relay(r.upstream.target)
        except TimeoutError:
            await responder.send(503, (), b"too slow")

    async with rig(script, handler=Does(action)) as r:
        client = await r.client()
        for turn in range(2):
            assert (await client.ask(GET)).body == b"too slow"
            assert len(r.upstream.connections) == turn + 1  # the connection was given up with the wait
        assert r.pool.idle_count(r.upstream.target) == 0


async def test_a_timeout_in_the_middle_of_an_answer_breaks_the_connection() -> None:
    limits: list[asyncio.Timeout] = []

    async def script(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        await served.closed()

    async def action(request: Request, responder: Responder) -> None:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            await responder.relay(r.upstream.target)

    async with rig(script, handler=Does(action)) as r:
        client = await r.client()
        await client.send(GET)
        await client.head()
        assert await client.exactly(7) == b"2\r\nok\r\n"
        limits[0].reschedule(asyncio.get_running_loop().time())
        await client.closed()


async def test_a_relay_in_a_task_of_its_own() -> None:
    async def action(request: Request, responder: Responder) -> None:
        if request.path == b"/wait-for":
            await asyncio.wait_for(responder.relay(r.upstream.target), DEADLINE_S)
        elif request.path == b"/task":
            await asyncio.create_task(responder.relay(r.upstream.target))
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(responder.relay(r.upstream.target))
                group.create_task(asyncio.sleep(0.01))

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for path in (b"/wait-for", b"/task", b"/group") * 2:
            assert (await client.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path)).body == b"GET %b HTTP/1.1" % path


async def test_leaving_stops_a_relay_in_a_task_of_its_own() -> None:
    async def script(served: Served) -> None:
        await served.request()
        await served.head()

    async def action(request: Request, responder: Responder) -> None:
        await asyncio.create_task(responder.relay(r.upstream.target))

    async with rig(script, handler=Does(action)) as r:
        client = await r.client()
        await client.send(GET)
        await r.until(lambda: r.upstream.connections and r.upstream.connections[0].requests)
        client.close()
        await r.until(lambda: r.upstream.ended)


async def test_reading_the_body_in_a_task_of_its_own() -> None:
    async def action(request: Request, responder: Responder) -> None:
        body = await asyncio.wait_for(request.body.read(100), 5)
        await responder.send(200, (), body)

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\nabc")
        await r.until(lambda: r.server.running)
        await client.send(b"def")
        assert (await client.answer()).body == b"abcdef"


async def test_a_handler_may_wait_before_between_and_after() -> None:
    done: list[str] = []

    async def action(request: Request, responder: Responder) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        await asyncio.to_thread(lambda: None)
        result = await responder.relay(r.upstream.target)
        assert result.complete
        await asyncio.sleep(0.001)
        done.append("done")

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for _ in range(3):
            assert (await client.ask(GET)).status == 200
        await r.until(lambda: len(done) == 3)


async def test_the_next_request_waits_until_the_handler_returns() -> None:
    gate = asyncio.Event()
    seen: list[bytes] = []

    async def action(request: Request, responder: Responder) -> None:
        seen.append(request.path)
        await responder.send(200, (), request.path)
        if request.path == b"/1":
            await gate.wait()

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        await client.send(b"GET /1 HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await client.answer()).body == b"/1"
        await asyncio.sleep(0.02)
        assert seen == [b"/1"]
        gate.set()
        assert (await client.answer()).body == b"/2"


async def test_what_one_request_binds_the_next_does_not_see() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    seen: list[str] = []

    async def action(request: Request, responder: Responder) -> None:
        seen.append(variable.get())
        variable.set(request.path.decode())
        await responder.relay(r.upstream.target)
        seen.append(variable.get())
        await asyncio.sleep(0)
        seen.append(variable.get())

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for number in range(3):
            await client.ask(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number)
        await r.until(lambda: len(seen) == 9)
        assert seen == [word for number in range(3) for word in ("unset", f"/{number}", f"/{number}")]


async def test_a_handler_is_the_current_task_and_has_a_name() -> None:
    names: list[str] = []

    async def action(request: Request, responder: Responder) -> None:
        task = asyncio.current_task()
        assert task is not None
        names.append(task.get_name())
        await responder.send(200, (), b"")
        assert asyncio.current_task() is task
        assert not task.done()

    async with rig(handler=Does(action)) as r:
        assert await relayed(r) == b""
        assert names == ["relay-request"]


async def test_a_handler_that_catches_a_failure_tries_several_targets() -> None:
    tried: list[bool] = []

    async def action(request: Request, responder: Responder) -> None:
        for target in (Target(host="127.0.0.1", port=1), Target(unix_path="/nowhere"), r.upstream.target):
            try:
                await responder.relay(target)
                return
            except UpstreamFailed as failure:
                tried.append(failure.refused)

    async with rig(handler=Does(action)) as r:
        assert await relayed(r) == b"GET /x HTTP/1.1"
        assert tried == [True, True]


async def test_notes_are_found_again_by_requests_with_the_same_headers() -> None:
    found: list[object] = []

    async def action(request: Request, responder: Responder) -> None:
        found.append(request.notes.get("key"))
        request.notes["key"] = request.header(b"authorization")
        request.extra["mine"] = True
        await responder.send(200, (), b"")

    async with rig(handler=Does(action)) as r:
        client = await r.client()
        for path, key in ((b"/1", b"a"), (b"/2", b"a"), (b"/3", b"b"), (b"/4", b"a")):
            await client.ask(
                b"POST %b HTTP/1.1\r\nHost: h\r\nAuthorization: %b\r\nContent-Length: 0\r\n\r\n" % (path, key)
            )
        assert found == [None, b"a", None, b"a"]
