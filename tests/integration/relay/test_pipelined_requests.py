"""Several requests on one connection: one at a time, in order, and no further ahead than we care to hold."""

from __future__ import annotations

import asyncio

from corral.contract.http import Request, Responder
from corral.relay import Limits
from tests.support.relay import Everything, quick, rig


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
        await r.until(lambda: conn._pause_reasons)
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
