"""Slow clients and slow upstreams: nobody's bytes pile up in the relay, and nobody waits for somebody else."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from collections.abc import AsyncIterator

import psutil
import pytest

from corral.contract.http import ClientGone, Patience, Request, Responder
from corral.relay import Limits, PoolLimits
from corral.relay.upstream import UpstreamConnection
from tests.support.relay import Client, Everything, HeldClock, Rig, Served, ok, quick, rig

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
BIG = 40_000_000  # far more than socket buffers hold


async def slow_client(r, **options) -> Client:  # type: ignore[no-untyped-def]
    """One that does not read until asked to: its own buffer is small, the kernel's does the rest."""
    client: Client = await r.client(limit=4096, **options)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    return client


def resume(client: Client) -> None:
    client.reader._limit = 2**20  # type: ignore[attr-defined]
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]


@pytest.mark.parametrize("framing", ["length", "chunked", "eof"])
async def test_a_slow_client_slows_the_upstream_down(framing: str, clock: HeldClock) -> None:
    sent = 0

    async def script(served: Served) -> None:
        nonlocal sent
        await served.request()
        head = {"length": b"Content-Length: %d\r\n" % BIG, "chunked": b"Transfer-Encoding: chunked\r\n", "eof": b""}
        await served.send(b"HTTP/1.1 200 OK\r\n%b\r\n" % head[framing])
        while sent < BIG:
            piece = b"x" * 50_000
            await served.send(b"%x\r\n%b\r\n" % (len(piece), piece) if framing == "chunked" else piece)
            sent += len(piece)
        if framing == "chunked":
            await served.send(b"0\r\n\r\n")
        if framing != "eof":
            await served.request()

    async with rig(script, pool_limits=PoolLimits(patience=Patience(first_byte_s=5, idle_s=0.2))) as r:
        client = await slow_client(r)
        await client.send(GET)
        await r.until(lambda: r.upstream.connections)
        last = -1
        while last != sent:  # until the upstream is stuck
            last = sent
            await asyncio.sleep(0.15)
        assert sent < BIG / 2
        conn = next(iter(r.server._connections))
        assert conn.transport.get_write_buffer_size() < 2_000_000
        await r.until(lambda: all(isinstance(each, UpstreamConnection) and each._is_paused for each in r.pool._open))
        await clock.forward(0.4, r.pool.ticker)  # longer than the upstream may be silent: it is not the one who waits
        resume(client)
        answer = await client.answer()
        assert len(answer.body) == BIG
        await r.until(lambda: r.handler.results)
        assert r.handler.results[0].complete


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_slow_upstream_slows_the_upload_down(framing: str, clock: HeldClock) -> None:
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        served.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await gate.wait()
        served.reader._limit = 2**20  # type: ignore[attr-defined]
        served.writer.transport.resume_reading()  # type: ignore[attr-defined]
        asked = await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n%08d" % len(asked.body))
        await served.request()

    async with rig(script, limits=Limits(timeouts=quick(body_idle_s=0.2))) as r:
        client = await r.client()
        if framing == "length":
            await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % BIG)
        else:
            await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = 0

        async def upload() -> None:
            nonlocal sent
            while sent < BIG:
                piece = b"y" * 50_000
                await client.send(b"%x\r\n%b\r\n" % (len(piece), piece) if framing == "chunked" else piece)
                sent += len(piece)
            if framing == "chunked":
                await client.send(b"0\r\n\r\n")

        async with asyncio.TaskGroup() as group:
            group.create_task(upload())
            last = -1
            while last != sent:
                last = sent
                await asyncio.sleep(0.15)
            assert sent < BIG / 2
            await r.until(lambda: all(conn._pause_reasons for conn in r.server._connections))
            await clock.forward(
                0.4, r.server.ticker
            )  # longer than a body may pause: the client is not the one who waits
            gate.set()
        assert (await client.answer()).body == b"%08d" % BIG


async def test_a_handler_that_streams_waits_for_a_slow_client() -> None:
    made = 0

    class Streams:
        async def handle(self, request: Request, responder: Responder) -> None:
            async def pieces() -> AsyncIterator[bytes]:
                nonlocal made
                while made < BIG:
                    made += 50_000
                    yield b"z" * 50_000

            await responder.stream(200, (), pieces())

    async with rig(handler=Streams()) as r:
        client = await slow_client(r)
        await client.send(GET)
        await r.until(lambda: made)
        last = -1
        while last != made:
            last = made
            await asyncio.sleep(0.1)
        assert made < BIG / 2
        resume(client)
        assert len((await client.answer()).body) == BIG


async def test_a_whole_answer_waits_for_a_slow_client_before_the_next_request() -> None:
    began: list[bytes] = []

    class Sends:
        async def handle(self, request: Request, responder: Responder) -> None:
            began.append(request.path)
            await responder.send(200, (), b"w" * 10_000_000)

    async with rig(handler=Sends()) as r:
        client = await slow_client(r)
        await client.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % n for n in range(3)))
        await r.until(lambda: began)
        await asyncio.sleep(0.1)
        assert began == [b"/0"]
        resume(client)
        for _ in range(3):
            assert len((await client.answer()).body) == 10_000_000


async def test_a_body_nobody_asks_for_stays_with_the_client(clock: HeldClock) -> None:
    gate = asyncio.Event()

    class Waits:
        async def handle(self, request: Request, responder: Responder) -> None:
            await gate.wait()
            body = await request.body.read(BIG)
            await responder.send(200, (), b"%d" % len(body))

    async with rig(handler=Waits(), limits=Limits(body_window_bytes=10_000, timeouts=quick(body_idle_s=0.1))) as r:
        client = await r.client()
        body = b"b" * 20_000_000
        client.writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        conn = None
        await r.until(lambda: r.server._connections)
        conn = next(iter(r.server._connections))
        await r.until(lambda: conn._pause_reasons)
        await clock.forward(0.3, r.server.ticker)  # longer than a body may pause, but nobody waits for it
        assert conn._body is not None
        assert conn._body.buffered < 1_000_000
        gate.set()
        assert (await client.answer()).body == b"20000000"


# Stalls


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    async def script(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BIG)
        while True:
            await served.send(b"x" * 65536)

    async with rig(script, limits=Limits(timeouts=quick(write_stall_s=0.2))) as r:
        client = await slow_client(r)
        await client.send(GET)
        await r.until(lambda: r.upstream.ended and r.handler.results)
        assert r.server.counters.client_timeouts == 1
        assert r.handler.results[0].client_gone


async def test_a_client_that_takes_a_little_now_and_then_is_not(clock: HeldClock) -> None:
    async with rig(handler=_Big(BIG), limits=Limits(timeouts=quick(write_stall_s=0.3))) as r:
        client = await slow_client(r)
        await client.send(GET)
        for _ in range(10):  # in all longer than the limit, each time far within it
            await clock.forward(0.05, r.server.ticker)
            resume(client)
            await client.exactly(BIG // 12)  # more than the kernel gives out before it asks us for more
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        assert r.server.counters.client_timeouts == 0
        assert r.server._connections


class _Big:
    def __init__(self, size: int) -> None:
        self.size = size
        self.gone = 0

    async def handle(self, request: Request, responder: Responder) -> None:
        try:
            await responder.send(200, (), b"b" * self.size)
        except ClientGone:
            self.gone += 1


async def test_a_closing_connection_does_not_wait_for_ever_for_its_client() -> None:
    handler = _Big(10_000_000)
    async with rig(handler=handler, limits=Limits(timeouts=quick(write_stall_s=0.2))) as r:
        client = await slow_client(r)
        await client.send(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        await r.until(lambda: r.server.counters.client_timeouts == 1)
        await r.until(lambda: not r.server._connections)
        assert handler.gone == 1


async def test_an_upstream_that_takes_nothing_is_given_up() -> None:
    async def script(served: Served) -> None:
        served.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    async with rig(script, pool_limits=PoolLimits(send_stall_s=0.2)) as r:
        client = await r.client()
        body = b"b" * 20_000_000
        client.writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        assert (await client.answer()).status == 504
        assert r.server.counters.upstream_timeouts == 1


# Clocks of clients


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with rig(limits=Limits(timeouts=quick(head_s=0.1))) as r:
        await (await r.client()).closed()


async def test_half_a_head_gets_408(clock: HeldClock) -> None:
    async with rig(limits=Limits(timeouts=quick(head_s=0.1))) as r:
        client = await r.client()
        await client.send(b"GET / HTTP/1.1\r\nHost")
        await r.until(lambda: any(conn._buffer for conn in r.server._connections))
        clock.let_go()
        answer = await client.answer()
        assert (answer.status, answer.get(b"connection")) == (408, b"close")
        await client.closed()
        assert r.server.counters.client_timeouts == 1


async def test_a_head_dripping_in_byte_by_byte_has_one_deadline(clock: HeldClock) -> None:
    async with rig(limits=Limits(timeouts=quick(head_s=0.3))) as r:
        client = await r.client()
        dripping = asyncio.create_task(_drip(client, b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 10_000, 0.02))
        await r.until(lambda: any(conn._buffer for conn in r.server._connections))
        clock.let_go()
        assert (await client.answer()).status == 408
        dripping.cancel()


async def _drip(client: Client, data: bytes, pause_s: float) -> None:
    for at in range(len(data)):
        await client.send(data[at : at + 1])
        await asyncio.sleep(pause_s)


async def test_the_head_of_a_later_request_has_its_own_deadline(clock: HeldClock) -> None:
    async with rig(limits=Limits(timeouts=quick(head_s=0.15))) as r:
        client = await r.client()
        for _ in range(3):
            await clock.forward(0.1, r.server.ticker)
            assert (await client.ask(GET)).status == 200
        await clock.forward(0.3, r.server.ticker)  # idle, not sending a head: another clock
        await client.send(b"GET /")
        clock.let_go()
        assert (await client.answer()).status == 408


async def test_an_idle_connection_is_closed_in_silence() -> None:
    async with rig(limits=Limits(timeouts=quick(keep_alive_s=0.1))) as r:
        client = await r.client()
        assert (await client.ask(GET)).status == 200
        await client.closed()


async def test_a_body_that_stops_coming_gets_408() -> None:
    async with rig(limits=Limits(timeouts=quick(body_idle_s=0.1))) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nab")
        answer = await client.answer()
        assert (answer.status, answer.get(b"connection")) == (408, b"close")
        await r.until(lambda: r.upstream.ended)


async def test_a_body_read_by_a_handler_that_stops_coming_gets_408() -> None:
    class Reads:
        async def handle(self, request: Request, responder: Responder) -> None:
            await request.body.read(1000)

    async with rig(handler=Reads(), limits=Limits(timeouts=quick(body_idle_s=0.1))) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        assert (await client.answer()).status == 408
        await client.closed()


async def test_a_body_of_a_byte_now_and_then_is_cut_off() -> None:
    limits = Limits(timeouts=quick(body_idle_s=5, body_grace_s=0.2, body_floor_bytes_per_s=1000))
    async with rig(limits=limits) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000\r\n\r\n")
        dripping = asyncio.create_task(_drip(client, b"x" * 10_000, 0.02))
        assert (await client.answer()).status == 408
        dripping.cancel()


async def test_a_steady_body_is_not(clock: HeldClock) -> None:
    limits = Limits(timeouts=quick(body_idle_s=5, body_grace_s=0.1, body_floor_bytes_per_s=10))
    async with rig(limits=limits) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 30\r\n\r\n")
        for number in range(10):  # in all far longer than the grace
            await r.until(lambda count=number * 3: _received(r) == count)  # type: ignore[misc]
            await clock.forward(0.06, r.server.ticker)
            await client.send(b"xxx")
        assert (await client.answer()).status == 200


def _received(r: Rig) -> int:
    """How much of the body of the only request there is."""
    (conn,) = r.server._connections
    return conn._body.received if conn._body is not None else -1


async def test_a_slow_client_does_not_slow_others_down() -> None:
    async with rig() as r:
        slow, client = await r.client(), await r.client()
        for at in range(len(GET)):  # byte by byte, and each time others are served while it is at it
            await slow.send(GET[at : at + 1])
            for _ in range(8):
                if at < len(GET) - 1:
                    assert (await client.ask(GET)).status == 200
        assert (await slow.answer()).status == 200


async def test_a_thousand_idle_connections_are_cheap_and_harmless() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    sockets = []
    try:
        async with rig(ok) as r:
            busy = await r.client()
            assert (await busy.ask(GET)).status == 200
            loop = asyncio.get_running_loop()
            gc.collect()
            import socket as plain

            before = _own_memory()
            for _ in range(1000):
                sock = plain.socket()
                sock.setblocking(False)
                sockets.append(sock)
                await loop.sock_connect(sock, ("127.0.0.1", r.port))
            await r.until(lambda: len(r.server._connections) == 1001)
            gc.collect()
            each = (_own_memory() - before) / 1000
            assert each < 16_000, f"{each:.0f} bytes per idle connection"  # the test's own sockets included
            for _ in range(100):
                assert (await busy.ask(GET)).status == 200
            assert len(asyncio.all_tasks()) < 20  # no task per connection
    finally:
        for sock in sockets:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _own_memory() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


async def test_a_half_relayed_pipeline_waits_for_a_slow_client() -> None:
    class Notes(Everything):
        pass

    async def script(served: Served) -> None:
        while True:
            await served.request()
            await served.send(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + b"r" * 3_000_000)

    async with rig(script, handler=Notes()) as r:
        client = await slow_client(r)
        await client.send(GET * 6)
        await r.until(lambda: r.handler.requests)
        await asyncio.sleep(0.2)
        assert len(r.handler.requests) < 6
        resume(client)
        for _ in range(6):
            assert len((await client.answer()).body) == 3_000_000
