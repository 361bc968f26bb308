"""Listening, limits on connections, leaving in order."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from corral.contract.http import Request, Responder
from corral.relay import Limits
from tests.support.relay import WAIT_S, Everything, Served, ok, quick, rig

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_connections_over_the_limit_are_told_so() -> None:
    async with rig(limits=Limits(connections=2, timeouts=quick())) as r:
        first, second = await r.client(), await r.client()
        for client in (first, second):
            assert (await client.ask(GET)).status == 200
        third = await r.client()
        await third.send(GET)
        answer = await third.answer()
        assert (answer.status, answer.get(b"retry-after"), answer.get(b"connection")) == (503, b"1", b"close")
        await third.closed()
        assert (await first.ask(GET)).status == 200  # those inside are not disturbed
        second.close()
        await r.until(lambda: len(r.server._connections) == 1)
        assert (await (await r.client()).ask(GET)).status == 200
        assert r.server.counters.connections_refused == 1
        assert r.server.counters.connections_open == 2


async def test_far_over_the_limit_connections_are_just_closed() -> None:
    async with rig(limits=Limits(connections=1, refusals=1, timeouts=quick(linger_s=5))) as r:
        await (await r.client()).ask(GET)
        told, closed = await r.client(), await r.client()
        assert (await told.answer()).status == 503
        assert await closed.rest() == b""


async def test_draining_lets_answers_finish_and_takes_nothing_new() -> None:
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(CHUNKED + b"2\r\nok\r\n")
        await gate.wait()
        await served.send(b"0\r\n\r\n")
        await served.request()

    async with rig(script) as r:
        idle, busy = await r.client(), await r.client()
        await busy.send(GET)
        await busy.head()
        await busy.exactly(7)
        draining = asyncio.create_task(r.server.drain(10))
        await idle.closed()
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the kernel likes
            await asyncio.open_connection("127.0.0.1", r.port)
        assert not draining.done()
        gate.set()
        assert await busy.exactly(5) == b"0\r\n\r\n"
        await busy.closed()
        assert await draining == 0


async def test_an_answer_begun_while_draining_says_close() -> None:
    gate = asyncio.Event()

    class Waits(Everything):
        async def handle(self, request: Request, responder: Responder) -> None:
            await gate.wait()
            await super().handle(request, responder)

    async with rig(handler=Waits()) as r:
        client = await r.client()
        await client.send(GET + GET)
        await r.until(lambda: r.server.running)
        draining = asyncio.create_task(r.server.drain(10))
        await asyncio.sleep(0)
        gate.set()
        answer = await client.answer()
        assert (answer.status, answer.get(b"connection")) == (200, b"close")
        await client.closed()
        assert await draining == 0


async def test_draining_cuts_what_outlasts_its_grace() -> None:
    async def script(served: Served) -> None:
        await served.request()
        await served.send(CHUNKED + b"2\r\nok\r\n")
        await served.head()

    async with rig(script) as r:
        client = await r.client()
        await client.send(GET)
        await client.head()
        assert await r.server.drain(0.05) == 1
        assert await client.rest() == b"2\r\nok\r\n"
        await r.until(lambda: r.upstream.ended)
        assert r.server.running == 0


async def test_closing_waits_for_handlers_to_clean_up() -> None:
    cleaned: list[str] = []

    class Cleans:
        async def handle(self, request: Request, responder: Responder) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.02)
                cleaned.append("yes")

    async with rig(handler=Cleans()) as r:
        client = await r.client()
        await client.send(GET)
        await r.until(lambda: r.server.running)
        await r.server.close()
        assert cleaned == ["yes"]


async def test_closing_does_not_wait_for_ever_for_a_stubborn_handler() -> None:
    gate = asyncio.Event()

    class Stubborn:
        async def handle(self, request: Request, responder: Responder) -> None:
            while not gate.is_set():
                try:
                    await gate.wait()
                except asyncio.CancelledError:
                    continue

    async with rig(handler=Stubborn()) as r:
        client = await r.client()
        await client.send(GET)
        await r.until(lambda: r.server.running)
        async with asyncio.timeout(WAIT_S):
            await r.server.close(patience_s=0.05)
        assert r.server.running == 1
        gate.set()


async def test_two_servers_share_a_port() -> None:
    async with rig() as one, rig() as two:
        port = await one.server.listen("127.0.0.1", 0, reuse_port=True)
        assert await two.server.listen("127.0.0.1", port, reuse_port=True) == port
        await one.server.drain(1)
        one.port = two.port = port
        assert (await (await two.client()).ask(GET)).status == 200  # the successor has the port to itself


async def test_a_port_in_use_is_an_error() -> None:
    async with rig() as r:
        with pytest.raises(OSError, match="ddress already in use"):
            await r.server.listen("127.0.0.1", r.port)


async def test_a_server_listens_on_several_addresses() -> None:
    async with rig(ok) as r:
        ports = [await r.server.listen("127.0.0.1", 0) for _ in range(2)]
        for port in (r.port, *ports):
            r.port = port
            assert (await (await r.client()).ask(GET)).status == 200


async def test_counters_add_up() -> None:
    async with rig() as r:
        clients = [await r.client() for _ in range(3)]
        for _ in range(4):
            for client in clients:
                assert (await client.ask(GET)).status == 200
        counters = r.server.counters
        assert (counters.connections, counters.connections_open, counters.requests) == (3, 3, 12)
        assert counters.upstream_connects + counters.upstream_reuses == 12
        assert counters.bytes_relayed == sum(result.bytes_sent for result in r.handler.results) > 12 * 50
        assert r.server.running == 0


async def test_retiring_sends_nobody_away_and_says_of_each_answer_that_it_is_the_last() -> None:
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(CHUNKED + b"2\r\nok\r\n")
        await gate.wait()
        await served.send(b"0\r\n\r\n")
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with rig(script, limits=Limits()) as r:
        idle, busy = await r.client(), await r.client()
        await busy.send(GET)
        assert b"connection: close" not in await busy.head()  # it was begun before
        await busy.exactly(7)
        descriptors = r.server.descriptors()
        assert len(descriptors) == 1
        retiring = asyncio.create_task(r.server.retire(20))
        await r.until(lambda: r.server.retiring)
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the kernel likes
            await (await r.client()).ask(GET)
        gate.set()
        assert await busy.exactly(5) == b"0\r\n\r\n"
        assert (await busy.ask(GET)).get(b"connection") == b"close"  # one more, which says so
        assert not retiring.done()
        assert (await idle.ask(GET)).get(b"connection") == b"close"
        await idle.closed()
        await retiring


async def test_retiring_is_over_when_its_time_is() -> None:
    async with rig() as r:
        idle = await r.client()
        await idle.ask(GET)
        await r.server.retire(0.05)
        assert (await idle.ask(GET)).status == 200  # whoever called may still wait, or cut


async def test_a_socket_that_listens_already_is_taken_over() -> None:
    async with rig() as old, rig() as new:
        (descriptor,) = old.server.descriptors()
        taken = socket.socket(fileno=os.dup(descriptor))
        port = await new.server.listen_on(taken)
        await old.server.retire(5)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
