"""A client that leaves stops the work for it at once; a client that lingers does not stop anybody else's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from corral.contract.http import ClientGone, Request, Responder, Target
from tests.support.relay import Client, Everything, Served, answering, rig

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def leave(client: Client, way: str) -> None:
    match way:
        case "half-close":  # an answer is pending: the end of the stream is how a client says that it has left
            client.writer.write_eof()
        case "close":
            client.close()
        case "reset":
            sock = client.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.abort()


WAYS = ["half-close", "close", "reset"]


@pytest.mark.parametrize("way", WAYS)
async def test_leaving_before_the_answer_closes_the_upstream(way: str) -> None:
    async def script(served: Served) -> None:
        await served.request()
        await served.head()

    async with rig(script) as r:
        client = await r.client()
        await client.send(GET)
        await r.until(lambda: r.upstream.connections and r.upstream.connections[0].requests)
        leave(client, way)
        await r.until(lambda: r.upstream.ended)
        await r.until(lambda: r.handler.results)
        result = r.handler.results[0]
        assert (result.status, result.complete, result.client_gone) == (0, False, True)
        assert r.pool.idle_count(r.upstream.target) == 0
        assert r.server.counters.clients_gone == 1


@pytest.mark.parametrize("way", WAYS)
async def test_leaving_in_the_middle_of_a_stream_closes_the_upstream(way: str) -> None:
    async def script(served: Served) -> None:
        await served.request()
        await served.send(CHUNKED + b"2\r\nok\r\n")
        await served.head()

    async with rig(script) as r:
        client = await r.client()
        await client.send(GET)
        await client.head()
        await client.exactly(7)
        leave(client, way)
        await r.until(lambda: r.upstream.ended)
        await r.until(lambda: r.handler.results)
        result = r.handler.results[0]
        assert (result.status, result.complete, result.client_gone) == (200, False, True)


async def test_leaving_is_noticed_though_the_client_never_reads() -> None:
    """Much is on its way to the client when it half-closes: the upstream must not wait for that to drain."""

    async def script(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n")
        while True:
            await served.send(b"x" * 65536)

    async with rig(script) as r:
        client = await r.client(limit=1024)
        await client.send(GET)
        await client.head()
        client.writer.write_eof()
        await r.until(lambda: r.upstream.ended and r.handler.results)
        assert r.handler.results[0].client_gone


async def test_leaving_while_connecting_stops_the_connecting() -> None:
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    fillers = []
    try:
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
            fillers.append(filler)
        async with rig() as r:
            r.handler.target = Target(host="127.0.0.1", port=full.getsockname()[1])
            client = await r.client()
            await client.send(GET)
            await r.until(lambda: r.pool._connecting)
            client.close()
            await r.until(lambda: r.handler.results)
            assert r.handler.results[0].client_gone
            await r.until(lambda: not r.pool._connecting)
    finally:
        for sock in (full, *fillers):
            sock.close()


async def test_leaving_in_the_middle_of_an_upload_closes_the_upstream() -> None:
    async def script(served: Served) -> None:
        await served.request()

    async with rig(script) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nab")
        await r.until(lambda: r.upstream.connections)
        client.close()
        await r.until(lambda: r.upstream.ended)
        await r.until(lambda: r.handler.results)
        assert r.handler.results[0].client_gone


async def test_a_handler_that_reads_the_body_is_told() -> None:
    told: list[BaseException] = []

    class Reads:
        async def handle(self, request: Request, responder: Responder) -> None:
            try:
                await request.body.read(1000)
            except ClientGone as gone:
                told.append(gone)
                raise

    async with rig(handler=Reads()) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nab")
        await r.until(lambda: r.server.running)
        client.close()
        await r.until(lambda: told)
        await r.until(lambda: not r.server.running)


async def test_a_handler_that_waits_for_something_else_is_cancelled() -> None:
    cleaned: list[str] = []

    class Waits:
        async def handle(self, request: Request, responder: Responder) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cleaned.append("cancelled")
                raise
            finally:
                await asyncio.sleep(0)  # cleaning up may take a moment
                cleaned.append("cleaned")

    async with rig(handler=Waits()) as r:
        client = await r.client()
        await client.send(GET)
        await r.until(lambda: r.server.running)
        client.close()
        await r.until(lambda: not r.server.running)
        assert cleaned == ["cancelled", "cleaned"]
        assert r.server.counters.clients_gone == 1
        assert r.server.counters.handler_failures == 0


async def test_a_streaming_handler_has_its_iterator_closed() -> None:
    closed: list[str] = []
    raised: list[BaseException] = []

    class Streams:
        async def handle(self, request: Request, responder: Responder) -> None:
            async def pieces() -> AsyncIterator[bytes]:
                try:
                    yield b"one"
                    await asyncio.Event().wait()  # the next event may be long in coming
                finally:
                    closed.append("closed")

            try:
                await responder.stream(200, (), pieces())
            except ClientGone as gone:
                raised.append(gone)
                raise

    async with rig(handler=Streams()) as r:
        client = await r.client()
        await client.send(GET)
        await client.head()
        assert await client.exactly(8) == b"3\r\none\r\n"
        client.close()
        await r.until(lambda: raised)
        assert closed == ["closed"]


async def test_leaving_after_the_answer_lets_the_handler_finish_its_notes() -> None:
    notes: list[str] = []
    gate = asyncio.Event()

    class Notes(Everything):
        async def handle(self, request: Request, responder: Responder) -> None:
            await super().handle(request, responder)
            await gate.wait()
            notes.append("written")

    async with rig(handler=Notes()) as r:
        client = await r.client()
        await client.ask(GET)
        client.close()
        await r.until(lambda: not r.server._connections)
        gate.set()
        await r.until(lambda: notes)
        assert r.handler.results[0].complete


async def test_a_connection_closed_by_us_lets_the_handler_finish_its_notes() -> None:
    notes: list[str] = []
    gate = asyncio.Event()

    class Notes(Everything):
        async def handle(self, request: Request, responder: Responder) -> None:
            await super().handle(request, responder)
            await gate.wait()
            notes.append("written")

    async with rig(handler=Notes()) as r:
        client = await r.client()
        await client.ask(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        await client.closed()  # at once, not when the handler returns
        assert not notes
        gate.set()
        await r.until(lambda: notes)


async def test_answering_a_client_that_has_left_is_an_error_the_handler_sees() -> None:
    raised: list[BaseException] = []
    gate = asyncio.Event()

    class Late:
        async def handle(self, request: Request, responder: Responder) -> None:
            try:
                await gate.wait()
            except asyncio.CancelledError:
                try:
                    await responder.send(200, (), b"late")
                except ClientGone as gone:
                    raised.append(gone)
                result = await responder.relay(Target(host="127.0.0.1", port=1))
                assert (result.client_gone, result.status) == (True, 0)

    async with rig(handler=Late()) as r:
        client = await r.client()
        await client.send(GET)
        await r.until(lambda: r.server.running)
        client.close()
        await r.until(lambda: not r.server.running)
        assert len(raised) == 1


async def test_one_client_leaving_does_not_touch_another() -> None:
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        asked = await served.request()
        await served.send(CHUNKED + b"1\r\na\r\n")
        await gate.wait()
        await served.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(asked.start), asked.start))
        await served.request()

    async with rig(script) as r:
        leaving, staying = await r.client(), await r.client()
        await leaving.send(GET)
        await staying.send(b"GET /stay HTTP/1.1\r\nHost: a\r\n\r\n")
        for client in (leaving, staying):
            await client.head()
            await client.exactly(6)
        leaving.close()
        await r.until(lambda: r.handler.results)
        gate.set()
        assert (await staying.chunked())[0] == b"GET /stay HTTP/1.1"


async def test_an_idle_client_may_close_at_any_time() -> None:
    async with rig(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")) as r:
        for way in WAYS:
            client = await r.client()
            await client.ask(GET)
            leave(client, way)
        await r.until(lambda: not r.server._connections)
        assert r.server.counters.clients_gone == 0
        assert r.pool.idle_count(r.upstream.target) == 1
