"""Upstreams that refuse, break, stall or talk nonsense: the client gets a clear answer, nobody gets a wrong one."""

from __future__ import annotations

import asyncio
import socket

import pytest

from corral.contract.http import Patience, Request, Responder, Target, UpstreamFailed
from corral.relay import PoolLimits
from tests.support.processes import free_port
from tests.support.relay import WAIT_S, Everything, HeldClock, Served, answering, ok, rig

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Catches(Everything):
    """Relays, and keeps the failure, which it passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[UpstreamFailed] = []

    async def handle(self, request: Request, responder: Responder) -> None:
        try:
            await super().handle(request, responder)
        except UpstreamFailed as failure:
            self.failures.append(failure)
            raise


async def test_a_refused_connection_is_502_and_the_client_stays() -> None:
    handler = Catches()
    async with rig(handler=handler) as r:
        handler.target = Target(host="127.0.0.1", port=free_port())
        client = await r.client()
        for _ in range(2):
            answer = await client.ask(GET)
            assert (answer.status, answer.get(b"connection")) == (502, None)
            assert answer.body == b'{"error":{"code":502,"message":"the upstream failed","type":"server_error"}}'
        failure = handler.failures[0]
        assert (failure.refused, failure.timed_out, failure.resendable) == (True, False, True)
        assert r.server.counters.upstream_connect_failures == 2
        assert r.server.counters.upstream_retries == 2  # a refused connection is tried once more


async def test_a_refused_connection_lets_the_handler_pick_another() -> None:
    class Second(Everything):
        async def handle(self, request: Request, responder: Responder) -> None:
            try:
                await responder.relay(Target(host="127.0.0.1", port=free_port()))
            except UpstreamFailed:
                await super().handle(request, responder)

    async with rig(handler=Second()) as r:
        client = await r.client()
        assert (await client.ask(GET)).status == 200
        await client.send(
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nab"
        )  # a streamed body is still whole
        await r.until(lambda: len(r.handler.requests) == 2 and len(r.upstream.connections) == 2)
        await client.send(b"cd")
        assert (await client.answer()).status == 200
        assert r.upstream.connections[1].requests[0].body == b"abcd"


async def test_connecting_has_a_deadline() -> None:
    handler = Catches()
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    fillers = []
    try:
        for _ in range(4):  # a full backlog answers nothing at all
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
            fillers.append(filler)
        async with rig(handler=handler, pool_limits=PoolLimits(connect_s=0.2)) as r:
            handler.target = Target(host="127.0.0.1", port=full.getsockname()[1])
            answer = await (await r.client()).ask(GET)
            assert answer.status == 504
            assert (handler.failures[0].refused, handler.failures[0].timed_out) == (True, True)
    finally:
        for sock in (full, *fillers):
            sock.close()


async def test_a_kept_connection_that_turns_out_closed_is_replaced_once() -> None:
    """The upstream closes after each answer without saying so: what keep-alive timeouts look like."""

    async def script(served: Served) -> None:
        await served.request()
        await served.send(OK)
        if served.number == 1:
            await served.head()  # the second request on the first connection: close without a byte

    async with rig(script) as r:
        client = await r.client()
        assert (await client.ask(GET)).body == b"ok"
        assert (await client.ask(b"POST /y HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc")).body == b"ok"
        assert len(r.upstream.connections) == 2
        assert r.upstream.connections[1].requests[0].body == b"abc"
        assert r.server.counters.upstream_retries == 1


async def test_a_new_connection_that_closes_before_a_byte_is_not_tried_again() -> None:
    handler = Catches()

    async def script(served: Served) -> None:
        await served.request()

    async with rig(script, handler=handler) as r:
        handler.target = r.upstream.target
        assert (await (await r.client()).ask(GET)).status == 502
        assert len(r.upstream.connections) == 1
        assert (handler.failures[0].refused, handler.failures[0].resendable) == (False, True)


async def test_a_kept_connection_that_breaks_after_a_byte_is_not_tried_again() -> None:
    async def script(served: Served) -> None:
        await served.request()
        await served.send(OK)
        await served.request()
        await served.send(b"HTTP/1.1 20")

    async with rig(script) as r:
        client = await r.client()
        assert (await client.ask(GET)).status == 200
        assert (await client.ask(GET)).status == 502
        assert len(r.upstream.connections) == 1


async def test_only_one_retry() -> None:
    async def script(served: Served) -> None:
        await served.request()
        if served.number == 1:
            await served.send(OK)
            await served.head()

    async with rig(script) as r:
        client = await r.client()
        assert (await client.ask(GET)).status == 200
        assert (await client.ask(GET)).status == 502
        assert len(r.upstream.connections) == 2


MALFORMED = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "binary": b"\x00\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    "bad status": b"HTTP/1.1 2000 OK\r\n\r\n",
    "status zero": b"HTTP/1.1 099 X\r\n\r\n",
    "HTTP/2": b"HTTP/2 200 OK\r\n\r\n",
    "lone LF": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "same length twice": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
    "length and chunked": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "gzip, chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad length": b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nok",
    "folded": b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "NUL": b"HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n",
    "bad first chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n0\r\n\r\n",
    "101 nobody asked for": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    "endless interim answers": b"HTTP/1.1 103 Early Hints\r\n\r\n" * 40,
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
    "too many fields": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300 + b"Content-Length: 0\r\n\r\n",
    "chunked and junk behind": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
    "chunked and empty line behind": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_answer_is_502_and_its_connection_is_never_used_again(name: str) -> None:
    async with rig(answering(MALFORMED[name])) as r:
        client = await r.client()
        for turn in range(2):
            answer = await client.ask(GET)
            assert answer.status == 502, answer
            assert r.pool.idle_count(r.upstream.target) == 0
            assert len(r.upstream.connections) == turn + 1
        assert r.server.counters.upstream_failures == 2


async def test_more_than_the_length_is_cut_and_the_connection_is_never_used_again() -> None:
    async with rig(answering(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")) as r:
        client = await r.client()
        for turn in range(2):
            assert (await client.ask(GET)).body == b"ok"
            await r.until(lambda: r.pool.idle_count(r.upstream.target) == 0)
            assert len(r.upstream.connections) == turn + 1


@pytest.mark.parametrize("method", [b"HEAD", b"GET"])
async def test_a_body_where_none_may_be_is_cut(method: bytes) -> None:
    status = b"200 OK" if method == b"HEAD" else b"304 Not Modified"
    async with rig(answering(b"HTTP/1.1 %b\r\nContent-Length: 4\r\n\r\nevil" % status)) as r:
        client = await r.client()
        for turn in range(2):
            await client.ask(method + b" / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert len(r.upstream.connections) == turn + 1


async def test_bytes_on_an_idle_connection_end_it() -> None:
    """They were meant for nobody, so they must not wait for the next client."""
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(OK)
        await gate.wait()
        await served.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await served.closed()

    async with rig(script) as r:
        client = await r.client()
        assert (await client.ask(GET)).body == b"ok"
        assert r.pool.idle_count(r.upstream.target) == 1
        gate.set()
        await r.until(lambda: r.pool.idle_count(r.upstream.target) == 0)
        assert (await client.ask(GET)).body == b"ok"


async def test_a_closed_idle_connection_leaves_the_pool_at_once() -> None:
    async def script(served: Served) -> None:
        await served.request()
        await served.send(OK)

    async with rig(script) as r:
        client = await r.client()
        assert (await client.ask(GET)).body == b"ok"
        await r.until(lambda: r.pool.idle_count(r.upstream.target) == 0)
        assert r.server.counters.upstream_open == 0


BROKEN = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "chunked, later nonsense": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_answer_that_breaks_off_breaks_the_clients_connection(name: str) -> None:
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(BROKEN[name])
        await gate.wait()
        if "nonsense" in name:
            await served.send(b"zz\r\n")
            await served.closed()

    async with rig(script) as r:
        client = await r.client()
        await client.send(GET)
        await client.head()
        got = await client.exactly(5)
        gate.set()
        got += await client.rest()
        assert b"hello" in got
        assert b"0\r\n\r\n" not in got
        await r.until(lambda: r.handler.results)
        result = r.handler.results[0]
        assert (result.status, result.complete, result.client_gone) == (200, False, False)
        await r.until(lambda: not r.server._connections)
        counters = r.server.counters
        assert (counters.upstream_failures, counters.handler_failures, counters.clients_gone) == (1, 0, 0)


async def test_an_http_1_0_client_is_reset_when_an_answer_breaks_off() -> None:
    """Where only the end of the stream ends the answer, a plain close would pass the part off as the whole."""
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await gate.wait()

    async with rig(script) as r:
        client = await r.client()
        await client.send(b"GET / HTTP/1.0\r\n\r\n")
        await client.head()
        assert await client.exactly(5) == b"hello"
        gate.set()
        with pytest.raises(ConnectionResetError):
            await client.reader.read()


async def test_a_reset_in_an_answer_that_ends_with_the_connection_is_no_end() -> None:
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\n\r\nhello")
        await gate.wait()
        sock = served.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        served.abort()

    async with rig(script) as r:
        client = await r.client()
        await client.send(GET)
        await client.head()
        assert await client.exactly(10) == b"5\r\nhello\r\n"
        gate.set()
        assert await client.rest() == b""  # no last chunk
        await r.until(lambda: r.handler.results)
        assert not r.handler.results[0].complete


async def test_an_answer_before_the_body_is_sent_is_passed_on_and_both_connections_close() -> None:
    async def script(served: Served) -> None:
        await served.head()
        await served.send(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno")
        await served.rest()

    async with rig(script) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nab")
        answer = await client.answer()
        assert (answer.status, answer.body, answer.get(b"connection")) == (401, b"no", b"close")
        await client.closed()
        assert r.pool.idle_count(r.upstream.target) == 0


async def test_a_streamed_body_is_spent_when_the_upstream_breaks() -> None:
    handler = Catches()

    async def script(served: Served) -> None:
        await served.head()
        await served.exactly(2)

    async with rig(script, handler=handler) as r:
        handler.target = r.upstream.target
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nab")
        answer = await client.answer()
        assert (answer.status, answer.get(b"connection")) == (502, b"close")
        assert not handler.failures[0].resendable


# Patience


async def test_the_first_byte_has_a_deadline(clock: HeldClock) -> None:
    handler = Catches()

    async def script(served: Served) -> None:
        await served.request()
        clock.let_go()
        await served.closed()

    limits = PoolLimits(patience=Patience(first_byte_s=0.05, idle_s=None))
    async with rig(script, handler=handler, pool_limits=limits) as r:
        handler.target = r.upstream.target
        client = await r.client()
        answer = await client.ask(GET)
        assert (answer.status, answer.get(b"connection")) == (504, None)
        assert (handler.failures[0].timed_out, handler.failures[0].refused) == (True, False)
        assert len(r.upstream.connections) == 1  # a silent upstream may be at work: never asked twice
        assert r.server.counters.upstream_timeouts == 1


async def test_the_first_byte_counts_from_the_end_of_the_request(clock: HeldClock) -> None:
    limits = PoolLimits(patience=Patience(first_byte_s=0.2, idle_s=None))
    async with rig(ok, pool_limits=limits) as r:
        client = await r.client()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 8\r\n\r\n")
        await r.until(lambda: r.upstream.connections)
        for _ in range(8):
            await clock.forward(0.06, r.pool.ticker)
            await client.send(b"x")
        assert (await client.answer()).status == 200


async def test_silence_between_bytes_has_a_deadline() -> None:
    async def script(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        await served.closed()

    async with rig(script, pool_limits=PoolLimits(patience=Patience(idle_s=0.05))) as r:
        client = await r.client()
        await client.send(GET)
        await client.head()
        assert await client.rest() == b"2\r\nok\r\n"
        await r.until(lambda: r.handler.results)
        assert not r.handler.results[0].complete


async def test_a_half_head_has_the_deadline_of_silence() -> None:
    async def script(served: Served) -> None:
        await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\n")
        await served.closed()

    async with rig(script, pool_limits=PoolLimits(patience=Patience(idle_s=0.05))) as r:
        assert (await (await r.client()).ask(GET)).status == 504


async def test_a_relay_may_bring_its_own_patience() -> None:
    async def script(served: Served) -> None:
        await served.request()
        await served.closed()

    async with rig(script, pool_limits=PoolLimits(send_stall_s=0.1)) as r:
        r.handler.options = {"patience": Patience(first_byte_s=0.05)}
        assert (await (await r.client()).ask(GET)).status == 504


async def test_without_a_deadline_silence_is_not_death() -> None:
    async def script(served: Served) -> None:
        await served.request()
        await asyncio.sleep(0.3)  # many ticks of the clock that would end it
        await served.send(OK)
        await served.request()

    async with rig(script, pool_limits=PoolLimits(idle_s=0.05, send_stall_s=0.05, max_age_s=0.05)) as r:
        assert (await (await r.client()).ask(GET)).body == b"ok"


# The pool


async def test_idle_connections_are_closed_after_a_while(clock: HeldClock) -> None:
    async with rig(pool_limits=PoolLimits(idle_s=0.05)) as r:
        await (await r.client()).ask(GET)
        assert r.pool.idle_count(r.upstream.target) == 1
        clock.let_go()
        await r.until(lambda: r.upstream.ended)
        assert r.pool.idle_count(r.upstream.target) == 0


async def test_old_connections_are_closed_even_when_used() -> None:
    async with rig(pool_limits=PoolLimits(max_age_s=0.1)) as r:
        client = await r.client()
        async with asyncio.timeout(WAIT_S):
            while len(r.upstream.connections) < 3:
                assert (await client.ask(GET)).status == 200


async def test_no_more_idle_connections_are_kept_than_allowed() -> None:
    gate = asyncio.Event()

    async def script(served: Served) -> None:
        await served.request()
        await gate.wait()
        await served.send(OK)
        await served.request()

    async with rig(script, pool_limits=PoolLimits(idle_per_target=2)) as r:
        clients = [await r.client() for _ in range(5)]
        for client in clients:
            await client.send(GET)
        await r.until(lambda: len(r.upstream.connections) == 5)
        gate.set()
        for client in clients:
            assert (await client.answer()).status == 200
        assert r.pool.idle_count(r.upstream.target) == 2
        await r.until(lambda: r.server.counters.upstream_open == 2)
