"""WebSockets pass as tunnels where a handler allows it, and as plain requests where it does not."""

from __future__ import annotations

import asyncio

import pytest

from corral.relay import PoolLimits
from tests.support.relay import HeldClock, Served, rig

UPGRADE = (
    b"GET /socket HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)


async def echo(served: Served) -> None:
    asked = await served.request()
    assert asked.get(b"upgrade") == b"websocket"
    assert asked.get(b"connection") == b"Upgrade"
    assert asked.get(b"sec-websocket-key") == b"dGhlIHNhbXBsZSBub25jZQ=="
    await served.send(SWITCH)
    while data := await served.reader.read(65536):
        await served.send(data)


async def test_bytes_pass_both_ways() -> None:
    async with rig(echo) as r:
        r.handler.options["upgrade"] = True
        client = await r.client()
        await client.send(UPGRADE)
        head = await client.head()
        assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
        assert b"\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in head
        assert b"\r\nupgrade: websocket\r\n" in head
        assert b"\r\nconnection: Upgrade\r\n" in head
        assert b"\r\nx-request-id: " in head
        for size in (1, 10, 100_000, 3):
            client.writer.write(b"f" * size)
            assert await client.exactly(size) == b"f" * size
        assert r.server.counters.tunnels == 1
        assert not r.handler.results
        client.close()
        await r.until(lambda: r.handler.results)
        result = r.handler.results[0]
        assert (result.status, result.complete) == (101, True)
        assert r.pool.idle_count(r.upstream.target) == 0


async def test_frames_sent_along_with_either_head_are_not_lost() -> None:
    async def script(served: Served) -> None:
        await served.head()
        await served.send(SWITCH + b"hello")
        assert await served.exactly(5) == b"early"

    async with rig(script) as r:
        r.handler.options["upgrade"] = True
        client = await r.client()
        await client.send(UPGRADE + b"early")
        await client.head()
        assert await client.exactly(5) == b"hello"
        await client.closed()


async def test_an_upstream_that_closes_ends_the_tunnel_and_nothing_is_lost() -> None:
    async def script(served: Served) -> None:
        await served.head()
        await served.send(SWITCH + b"x" * 1_000_000)

    async with rig(script) as r:
        r.handler.options["upgrade"] = True
        client = await r.client()
        await client.send(UPGRADE)
        await client.head()
        assert len(await client.rest()) == 1_000_000
        await r.until(lambda: r.handler.results)


async def test_an_upstream_that_declines_answers_plainly() -> None:
    async def script(served: Served) -> None:
        while True:
            await served.request()
            await served.send(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")

    async with rig(script) as r:
        r.handler.options["upgrade"] = True
        client = await r.client()
        for _ in range(2):
            assert (await client.ask(UPGRADE)).body == b"no"
        assert len(r.upstream.connections) == 1


async def test_where_it_is_not_allowed_the_upgrade_is_dropped() -> None:
    async def script(served: Served) -> None:
        while True:
            asked = await served.request()
            assert asked.get(b"upgrade") is None
            await served.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nplain")

    async with rig(script) as r:
        client = await r.client()
        for _ in range(2):
            assert (await client.ask(UPGRADE)).body == b"plain"
        assert r.handler.requests[0].upgrade == b"websocket"


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket, h2c", b"TLS/1.0"])
async def test_other_protocols_are_never_tunnelled(protocol: bytes) -> None:
    async with rig() as r:
        r.handler.options["upgrade"] = True
        answer = await (await r.client()).ask(UPGRADE.replace(b"WebSocket\r", protocol + b"\r"))
        assert answer.status == 200
        assert r.upstream.connections[0].requests[0].get(b"upgrade") is None
        assert r.handler.requests[0].upgrade == b""


async def test_a_tunnel_slows_down_with_its_slowest_end() -> None:
    sent = 0

    async def script(served: Served) -> None:
        nonlocal sent
        await served.head()
        await served.send(SWITCH)
        while sent < 40_000_000:
            await served.send(b"t" * 50_000)
            sent += 50_000

    async with rig(script) as r:
        r.handler.options["upgrade"] = True
        client = await r.client(limit=4096)
        await client.send(UPGRADE)
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        last = -1
        while last != sent:
            last = sent
            await asyncio.sleep(0.1)
        assert sent < 20_000_000
        client.reader._limit = 2**20  # type: ignore[attr-defined]
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await client.rest()) == 40_000_000


async def test_a_silent_tunnel_is_closed_after_a_while(clock: HeldClock) -> None:
    async with rig(echo, pool_limits=PoolLimits(tunnel_idle_s=0.7)) as r:
        r.handler.options["upgrade"] = True
        client = await r.client()
        await client.send(UPGRADE)
        await client.head()
        for _ in range(5):
            await clock.forward(0.2, r.pool.ticker)  # together longer than a tunnel may be silent, each by far shorter
            await client.send(b"ping")
            assert await client.exactly(4) == b"ping"
        clock.let_go()
        await client.closed()
        await r.until(lambda: r.handler.results)
