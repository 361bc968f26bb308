"""The short way, in a straight line: a request that came in one piece, to a connection that is there, and its answer
that comes in one piece, or in chunks, to the client. No task, no coroutine, no request object and no timer of its own.

It is taken where the server has a `Shortcut`, by requests of HTTP/1.1 whose client keeps its connection, with a
Content-Length and a body that arrived with the head, while an idle connection to the errand's target exists; and it
ends with a whole answer below 400 with a Content-Length, or with the last chunk of a 200. Everything else is left to
the general way (`connection.py`, `exchange.py`, `upstream.py`): before a request has been sent by handling it there
from the start, afterwards, also in the middle of a stream, by letting an `Exchange` join it, so that every trouble,
every slow client and every client that leaves meets one set of rules.

There and back are written out at length, one after the other: at this pace every call shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

from corral.contract.http import Shortcut, Tap, Target
from corral.kit.log import get_log
from corral.kit.transports import abort
from corral.relay.body import WholeBody
from corral.relay.chunked import are_whole_chunks
from corral.relay.connection import IDLE, ClientConnection
from corral.relay.exchange import Exchange
from corral.relay.fields import Malformed
from corral.relay.head import END_OF_HEAD, AnswerHead, PooledErrand, RequestHead
from corral.relay.shapes import Shape
from corral.relay.upstream import EVENTS, NOTHING, Upstream
from corral.relay.wheel import NEVER

if TYPE_CHECKING:
    from corral.relay.pool import UpstreamPool
    from corral.relay.server import RelayServer

log = get_log(__name__)

_monotonic = time.monotonic
_CHUNKED_AND_ID = b"transfer-encoding: chunked\r\nx-request-id: "

# A request on its short way, held by the upstream's connection until the answer comes: the client's connection, where
# to, the body, the request's id, since when. A bare tuple, because one is made for every request.
Flight: TypeAlias = "tuple[QuickConnection, PooledErrand, bytes, bytes, float]"


def may_depart(head: RequestHead) -> bool:
    return (
        bool(head.minor) and head.keep and not (head.chunked or head.expects or head.upgrade or head.method == b"HEAD")
    )


def may_arrive(head: AnswerHead) -> bool:
    return head.simple and head.reusable and head.status < 400


class QuickConnection(ClientConnection):
    """A client's connection that tries the short way first."""

    __slots__ = ("_decide", "_shape", "done", "flying", "streamed", "tap")

    def __init__(self, server: RelayServer, shortcut: Shortcut) -> None:
        super().__init__(server)
        # What it decides on, and for, is what it got from us.
        self._decide = cast(Callable[[RequestHead, bytes], PooledErrand | None], shortcut.decide)
        self.done = shortcut.done
        self.tap = shortcut.tap
        self.streamed = shortcut.streamed
        self._shape: Shape[RequestHead] | None = None  # of the heads this client sends
        self.flying: QuickUpstream | None = None  # has our request, and nobody else waits for its answer

    def data_received(self, data: bytes) -> None:
        if self.flying is not None:  # a client that does not wait for its answer
            self.flying.land_elsewhere()
        elif self.exchange is None and not self._buffer and not self.paused and not self._closing:
            shape, tail = self._shape, None
            if shape is not None and data.startswith(shape.before):
                if shape.with_id:
                    tail = shape.expect_with_id(data)
                else:
                    tail = shape.tails.get(len(data))
                    if tail is not None and not data.startswith(tail[1], shape.at):
                        tail = None
            if tail is None:
                shape, tail = self.server.shapes.recognise(data, shape)
                self._shape = shape
            if shape is not None and tail is not None:
                digits, _, body_at, request_id = tail
                body = data[body_at:]
                try:
                    errand = self._decide(shape.head, body)
                except Exception:
                    log.exception("a shortcut failed; the request goes the general way")
                    errand = None
                if errand is not None:
                    self._depart(errand, body, digits, request_id)
                    return
        super().data_received(data)

    def _depart(self, errand: PooledErrand, body: bytes, digits: bytes, request_id: bytes) -> None:
        server = self.server
        pool = server.pool
        server.running += 1
        server.counters.requests += 1
        request_id = errand.head.request_id or request_id or server.id_form % next(server.id_numbers)
        lane = errand.lane
        if lane is None or not lane.idle:
            lane = errand.lane = pool.lane(errand.target)
            if lane is None or not lane.idle:
                self.carry_on(errand, body, request_id, None, _monotonic())
                return
        # Those too old to be used are not here: the wheel's tick that makes them so takes them out.
        upstream: QuickUpstream = lane.idle.pop()  # type: ignore[assignment]  # the pool makes no others
        upstream.flight = (self, errand, body, request_id, _monotonic())
        self.flying = upstream
        self._due = IDLE
        pool.counters.upstream_reuses += 1
        wire = b"".join((errand.wire, digits, b"\r\nx-request-id: ", request_id, b"\r\n\r\n", body))
        outbox = self.outbox
        if outbox.queue:
            outbox.queue.append((upstream.transport, wire))
        else:
            outbox.write(upstream.transport, wire)

    def carry_on(
        self, errand: PooledErrand, body: bytes, request_id: bytes, upstream: QuickUpstream | None, started: float
    ) -> None:
        """The general way, from here. With an upstream, the request is on its way there."""
        self.flying = None
        self._deadline = NEVER
        self._due = IDLE
        head = errand.head
        whole = WholeBody(body)
        exchange = self.exchange = Exchange(self, head, whole, request_id)
        request = self.describe(head, whole, request_id)
        stream = None if upstream is None else upstream.stream
        if stream is not None:
            request.extra["tap"] = stream.tap
        shortcut = self.server.shortcut
        assert shortcut is not None
        coro = shortcut.carry_on(errand, request, exchange, _monotonic() - started)
        if upstream is None:
            exchange.run(coro)
        else:
            exchange.carry_on(upstream, started, coro, has_begun=stream is not None)

    # What can happen meanwhile.

    def _client_left(self) -> None:
        if self.flying is not None:
            self.flying.land_elsewhere()
        super()._client_left()

    def pause_writing(self) -> None:
        if self.flying is not None and self.flying.stream is not None:
            self.flying.land_elsewhere()  # the general way slows the upstream down
        super().pause_writing()

    def is_idle(self) -> bool:
        return self.exchange is None and self.flying is None

    def check(self, now: float) -> None:
        if self.flying is not None and now >= self._deadline:
            self._deadline = NEVER  # it was for the time between two requests
        super().check(now)


class Stream:
    """A chunked answer on its short way."""

    __slots__ = ("bytes_sent", "first_byte_s", "head", "tap")

    def __init__(self, head: AnswerHead, first_byte_s: float, tap: Tap | None) -> None:
        self.head = head
        self.first_byte_s = first_byte_s
        self.tap = tap
        self.bytes_sent = 0

    def show_head(self) -> None:
        try:
            if self.tap is not None:
                self.tap.head(self.head.status, self.head.fields.headers)
        except Exception:
            self.drop_tap()

    def show(self, data: bytes) -> None:
        try:
            if self.tap is not None:
                self.tap.data(data)
        except Exception:
            self.drop_tap()

    def drop_tap(self) -> None:
        """It failed: the answer goes on without it."""
        log.exception("a tap failed; the answer goes on without it")
        self.tap = None


class QuickUpstream(Upstream):
    """A connection to an upstream that can serve a request on its short way."""

    __slots__ = ("_idle_for_s", "_most_idle", "_shape", "flight", "stream")

    def __init__(self, pool: UpstreamPool, target: Target) -> None:
        super().__init__(pool, target)
        self._most_idle = pool.limits.idle_per_target
        self._idle_for_s = pool.limits.idle_s
        self._shape: Shape[AnswerHead] | None = None  # of the heads that come here
        self.flight: Flight | None = None
        self.stream: Stream | None = None  # the flight's answer, once it has begun

    def data_received(self, data: bytes) -> None:
        flight, stream = self.flight, self.stream
        if flight is None:
            super().data_received(data)
            return
        if stream is not None:
            conn = flight[0]
            if self._mode != EVENTS or not are_whole_chunks(data) or conn.server.draining:
                self._stream_on(flight, stream, data)
                return
            # A token: as in `Upstream.data_received`, with few calls.
            if stream.tap is not None:
                try:
                    stream.tap.data(data)
                except Exception:
                    stream.drop_tap()
            wheel = self._wheel
            self._deadline = wheel.now + self._idle_s + wheel.tick_s
            stream.bytes_sent += len(data)
            conn.outbox.write(conn.transport, data)  # last: a client that takes no more sends the rest the general way
            return
        conn, errand, _, request_id, started = flight
        shape, tail, out = self._shape, None, b""
        if shape is not None and data.startswith(shape.before):
            if shape.is_ours:
                tail = shape.tails.get(len(data) - len(request_id))
                if tail is not None and data.startswith(tail[1] + request_id + END_OF_HEAD, shape.at):
                    out = data  # the next hop has answered with the id that it got
                else:
                    tail = None
            elif not shape.with_id:
                tail = shape.tails.get(len(data))
                if tail is not None and not data.startswith(tail[1], shape.at):
                    tail = None
        if tail is None:
            shape, tail = self._pool.shapes.recognise(data, shape)
            self._shape = shape
        server = conn.server
        if shape is not None and tail is not None and not conn.paused and not server.draining:
            head = shape.head
            if not out:
                digits, _, body_at, _ = tail
                out = b"".join((head.start, digits, b"\r\nx-request-id: ", request_id, b"\r\n\r\n", data[body_at:]))
            outbox = conn.outbox
            if outbox.queue:
                outbox.queue.append((conn.transport, out))
            else:
                outbox.write(conn.transport, out)
            self._let_go(conn)
            sent = len(out)
            self._pool.counters.bytes_relayed += sent
            conn.done(errand, request_id, head.status, started, _monotonic(), sent, data)
            return
        if tail is None and not conn.paused and not server.draining and self._start_stream(flight, data):
            return
        self.land_elsewhere()
        super().data_received(data)

    def _let_go(self, conn: QuickConnection) -> None:
        """The answer is whole: both connections are there for the next request."""
        self.flight = None
        conn.flying = None
        server = conn.server
        server.running -= 1
        conn._deadline = server.wheel.now + server.keep_alive_s
        idle = self.lane.idle
        if len(idle) < self._most_idle and self._stall_at == NEVER:
            idle.append(self)
            self._deadline = self._wheel.now + self._idle_for_s
        else:
            self._go_idle(False)

    # Streams.

    def _start_stream(self, flight: Flight, data: bytes) -> bool:
        """False: this is no stream for the short way; nothing has been done."""
        raw, found, rest = data.partition(END_OF_HEAD)
        if not found or len(raw) > self._pool.limits.head_bytes:
            return False
        conn, errand, _, request_id, started = flight
        try:
            head, length, _ = self._pool.heads.read(raw)
            if not head.chunked or head.status != 200 or not head.reusable or length is not None:
                return False
            self._mode = EVENTS
            done = bool(rest) and self._scan(rest)
        except Malformed:
            self._mode = NOTHING
            return False  # the general way says what is wrong
        stream = Stream(head, _monotonic() - started, conn.tap(errand))
        stream.show_head()
        if rest:
            stream.show(rest)
        out = b"".join((head.wire, _CHUNKED_AND_ID, request_id, END_OF_HEAD, rest))
        if done:
            self._end_stream(flight, stream, out)
            return True
        patience = errand.patience or self._pool.limits.patience
        self._idle_s = NEVER if patience.idle_s is None else patience.idle_s
        self.stream = stream
        self._pass_on(conn, stream, out)
        return True

    def _stream_on(self, flight: Flight, stream: Stream, data: bytes) -> None:
        conn = flight[0]
        if conn.server.draining:  # the connection may have to be closed at the end
            self.land_elsewhere()
            super().data_received(data)
            return
        try:
            done = self._scan(data)
        except Malformed as bad:
            self.land_elsewhere()
            self._broke(bad.reason)
            return
        stream.show(data)
        if done:
            self._end_stream(flight, stream, data)
        else:
            self._pass_on(conn, stream, data)

    def _pass_on(self, conn: QuickConnection, stream: Stream, out: bytes) -> None:
        """Last thing to do: a client that takes no more sends the rest the general way."""
        wheel = self._wheel
        self._deadline = wheel.now + self._idle_s + wheel.tick_s
        stream.bytes_sent += len(out)
        conn.outbox.write(conn.transport, out)

    def _end_stream(self, flight: Flight, stream: Stream, out: bytes) -> None:
        conn, errand, _, request_id, started = flight
        self.stream = None
        self._mode = NOTHING
        self._let_go(conn)
        conn.outbox.write(conn.transport, out)
        sent = stream.bytes_sent + len(out)
        self._pool.counters.bytes_relayed += sent
        conn.streamed(errand, request_id, stream.head.status, started, _monotonic(), sent, stream.tap)

    def join(self, exchange: Exchange, sent_at: float) -> None:
        stream = self.stream
        if stream is None:
            super().join(exchange, sent_at)
            return
        self.stream = None
        self._exchange = exchange
        self._sent = True
        self._sent_at = sent_at
        self._reusable = stream.head.reusable
        self._be_patient(exchange)
        exchange.begun(stream.head.status, stream.bytes_sent, stream.first_byte_s, stream.tap)
        if exchange.conn.paused:
            self.hold()

    def land_elsewhere(self) -> None:
        """The rest is for the general way: it joins here, and whatever comes next comes to it."""
        assert self.flight is not None
        conn, errand, body, request_id, started = self.flight
        self.flight = None
        conn.carry_on(errand, body, request_id, self, started)

    # What can happen meanwhile.

    def waiting_since(self) -> float | None:
        if self.stream is not None:
            return None
        return super().waiting_since() if self.flight is None else self.flight[4]

    def give_up(self, why: str) -> None:
        if self.flight is not None and self.stream is None:
            self.land_elsewhere()
        super().give_up(why)

    def discard(self) -> None:
        if self.flight is None:
            super().discard()
        else:
            abort(self.transport)  # the exchange is told when the connection is lost

    def connection_lost(self, error: Exception | None) -> None:
        if self.flight is not None:
            self.land_elsewhere()
        super().connection_lost(error)

    def eof_received(self) -> None:
        if self.flight is not None:
            self.land_elsewhere()
        super().eof_received()

    def check(self, now: float) -> None:
        if self.flight is not None:
            _, errand, _, _, started = self.flight
            patience = errand.patience or self._pool.limits.patience
            due = NEVER if patience.first_byte_s is None else started + patience.first_byte_s
            if self.stream is not None:
                due = self._deadline
            if now < due and now < self._stall_at:
                return
            self.land_elsewhere()
        super().check(now)
