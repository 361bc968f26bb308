"""The fast path: relays a request that arrived in one piece on an idle upstream connection, and passes the response
back, whole or chunked. It uses no task, no coroutine, no request object and no timer of its own.

A request takes the fast path where the server has a `FastPath`, the request is HTTP/1.1 with keep-alive, has a
Content-Length and arrived together with its body, and the pool has an idle connection to the target. The request ends
on the fast path with a whole response below 400 that has a Content-Length, or with the last chunk of a 200.

Everything else belongs to the general path (`connection.py`, `exchange.py`, `upstream.py`). A request that `decide` did
not accept starts there. A request that `decide` accepted changes over in one place, `fall_back()`, so that every error,
every slow client and every client that leaves meets one set of rules.

The code for a request and for its response is written out at length: at this rate every function call shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from corral.contract.http import FastPath, PreparedForward, Tap, Target
from corral.kit.log import get_log
from corral.kit.sockets import abort
from corral.relay.body import WholeBody
from corral.relay.connection import IDLE, ClientConnection
from corral.relay.exchange import Exchange
from corral.relay.http1.chunked import is_whole_chunk
from corral.relay.http1.fields import Malformed
from corral.relay.http1.head import END_OF_HEAD, PooledForward, RequestHead, ResponseHead, take_traceparent
from corral.relay.http1.head_templates import MAX_HEAD_BYTES, HeadTemplate
from corral.relay.loop.ticker import NEVER
from corral.relay.response_reader import EVENTS, NOTHING
from corral.relay.taps import drop_tap, show, show_head
from corral.relay.upstream import UpstreamConnection

if TYPE_CHECKING:
    from corral.relay.pool import UpstreamPool
    from corral.relay.server import RelayServer

log = get_log(__name__)

_monotonic = time.monotonic
_CHUNKED_AND_ID = b"transfer-encoding: chunked\r\nx-request-id: "

# A stream whose pieces come this soon one after the other, the third time in a row, is faster than 2,000 tokens a
# second: from the fourth on its pieces may wait for each other (`WriteQueue.hold`). A token that an engine paces never
# waits.
QUICK_S = 0.0005
MIN_QUICK_PIECES = 2

# A request on the fast path, kept by the upstream connection until the response arrives: the client's connection, the
# forward, the body, the request id, the monotonic start time, the client's `traceparent`. A bare tuple, because one is
# made for every request.
PendingRequest: TypeAlias = "tuple[FastPathConnection, PooledForward, bytes, bytes, float, bytes]"


def is_fast_path(head: RequestHead) -> bool:
    return (
        bool(head.minor) and head.keep and not (head.chunked or head.expects or head.upgrade or head.method == b"HEAD")
    )


def is_fast_path_response(head: ResponseHead) -> bool:
    return head.simple and head.reusable and head.status < 400


def fall_back(pending: PendingRequest, upstream: FastPathUpstream | None) -> None:
    """Move a request from the fast path to the general path. This is the only transition between them; it happens once
    per request at most and never in the other direction.

    Without `upstream` the request has not been sent: no connection to its target was idle. With `upstream` it has been
    sent there, and its response may have begun as a stream. An `Exchange` takes over in each case: it starts the
    handler's `handle_prepared`, whose call of `relay` sends the request or joins the response, and from then on the
    bytes of both connections go to the exchange. The handler must reach `relay` before it waits (`Exchange.resume`).
    """
    conn, forward, body, request_id, started, traceparent = pending
    head = forward.head.with_traceparent(traceparent) if traceparent else forward.head
    stream = None
    if upstream is not None:
        upstream.pending = None
        stream = upstream.stream
    conn.pending_upstream = None
    conn._deadline = NEVER
    conn._due = IDLE
    whole = WholeBody(body)
    exchange = conn.exchange = Exchange(conn, head, whole, request_id)
    request = conn.describe(head, whole, request_id)
    if stream is not None:
        request.extra["tap"] = stream.tap
    fast_path = conn.server.fast_path
    assert fast_path is not None
    coro = fast_path.handle_prepared(forward, request, exchange, _monotonic() - started)
    if upstream is None:
        exchange.run(coro)
    else:
        exchange.resume(upstream, started, coro, has_begun=stream is not None)


class RunningForward(NamedTuple):
    """A request that is on the fast path now."""

    forward: PreparedForward
    request_id: bytes
    started: float  # monotonic
    tap: Tap | None  # of a stream that has begun


class FastPathConnection(ClientConnection):
    """A client's connection that tries the fast path first."""

    __slots__ = ("_decide", "_template", "new_tap", "on_response", "on_stream_end", "pending_upstream")

    def __init__(self, server: RelayServer, fast_path: FastPath) -> None:
        super().__init__(server)
        # The heads it gets and the forwards it returns are made by this package.
        self._decide = cast(Callable[[RequestHead, bytes, bytes], PooledForward | None], fast_path.decide)
        self.on_response = fast_path.on_response
        self.new_tap = fast_path.new_tap
        self.on_stream_end = fast_path.on_stream_end
        self._template: HeadTemplate[RequestHead] | None = None  # of the heads this client sends
        self.pending_upstream: FastPathUpstream | None = None  # has our request on the fast path

    def data_received(self, data: bytes) -> None:
        upstream = self.pending_upstream
        if upstream is not None:  # the client sends more before it has its response
            upstream.fall_back()
        elif self.exchange is None and not self._buffer and not self.paused and not self._closing:
            template, tail, message, traceparent = self._template, None, data, b""
            if template is not None and data.startswith(template.before):
                if template.with_id:
                    tail = template.expect_with_id(data)
                else:
                    tail = template.tails.get(len(data))
                    if tail is not None and not data.startswith(tail[1], template.at):
                        tail = None
            if tail is None:
                message, traceparent = take_traceparent(data, MAX_HEAD_BYTES)
                template, tail = self.server.templates.recognise(message, template)
                self._template = template or self._template  # one unusual head is no reason to forget the usual one
            if template is not None and tail is not None:
                digits, _, body_at, request_id = tail
                body = message[body_at:]
                try:
                    forward = self._decide(template.head, body, traceparent)
                    if traceparent and forward is not None and not forward.traceparent:
                        forward = forward.with_traceparent(traceparent, forward.tag)
                except Exception:
                    log.exception("the fast path failed; the request takes the general path")
                    forward = None
                if forward is not None:
                    self._send(forward, body, digits, request_id, traceparent)
                    return
        super().data_received(data)

    def _send(self, forward: PooledForward, body: bytes, digits: bytes, request_id: bytes, traceparent: bytes) -> None:
        server = self.server
        pool = server.pool
        server.running += 1
        server.counters.requests += 1
        request_id = forward.head.request_id or request_id or server.id_form % next(server.id_numbers)
        target_pool = forward.target_pool
        if target_pool is None or not target_pool.idle:
            target_pool = forward.target_pool = pool.find(forward.target)
            if target_pool is None or not target_pool.idle:
                fall_back((self, forward, body, request_id, _monotonic(), traceparent), None)
                return
        # None of them is too old: the tick at which a connection expires takes it out.
        upstream: FastPathUpstream = target_pool.idle.pop()  # type: ignore[assignment]  # the pool makes no others
        upstream.pending = (self, forward, body, request_id, _monotonic(), traceparent)
        self.pending_upstream = upstream
        self._due = IDLE
        pool.counters.upstream_reuses += 1
        wire = b"".join((forward.wire, digits, b"\r\nx-request-id: ", request_id, b"\r\n\r\n", body))
        self.write_queue.write(upstream.transport, wire)

    # Events while a request is on the fast path.

    def _on_client_left(self) -> None:
        if self.pending_upstream is not None:
            self.pending_upstream.fall_back()
        super()._on_client_left()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.pending_upstream is not None:
            # Called while bytes are written, perhaps by the handler of another request: ours could not start there.
            self.loop.call_soon(self._slow_upstream_down)

    def _slow_upstream_down(self) -> None:
        if self.paused and self.pending_upstream is not None and self.pending_upstream.stream is not None:
            self.pending_upstream.fall_back()  # the general path does it

    def is_idle(self) -> bool:
        return self.exchange is None and self.pending_upstream is None

    def running_forward(self) -> RunningForward | None:
        upstream = self.pending_upstream
        if upstream is None or upstream.pending is None:
            return None
        _, forward, _, request_id, started, _ = upstream.pending
        return RunningForward(forward, request_id, started, None if upstream.stream is None else upstream.stream.tap)

    def check(self, now: float) -> None:
        if self.pending_upstream is not None and now >= self._deadline:
            self._deadline = NEVER  # it was for the time between two requests
        super().check(now)


class FastPathStream:
    """A chunked response on the fast path."""

    __slots__ = ("bytes_sent", "first_byte_s", "head", "last_at", "quick_pieces", "tap")

    def __init__(self, head: ResponseHead, first_byte_s: float, tap: Tap | None) -> None:
        self.head = head
        self.first_byte_s = first_byte_s
        self.tap = tap
        self.bytes_sent = 0
        self.last_at = 0.0  # when the last piece arrived, monotonic
        self.quick_pieces = 0  # in a row that arrived soon after the one before


class FastPathUpstream(UpstreamConnection):
    """A connection to an upstream that can serve a request on the fast path."""

    __slots__ = ("_idle_for_s", "_max_idle", "_template", "pending", "stream")

    def __init__(self, pool: UpstreamPool, target: Target) -> None:
        super().__init__(pool, target)
        self._max_idle = pool.limits.idle_per_target
        self._idle_for_s = pool.limits.idle_s
        self._template: HeadTemplate[ResponseHead] | None = None  # of the heads that arrive here
        self.pending: PendingRequest | None = None
        self.stream: FastPathStream | None = None  # the pending request's response, once it has begun

    def fall_back(self) -> None:
        assert self.pending is not None
        fall_back(self.pending, self)

    def data_received(self, data: bytes) -> None:
        pending, stream = self.pending, self.stream
        if pending is None:
            super().data_received(data)
            return
        if stream is not None:
            conn = pending[0]
            if self._mode != EVENTS or not is_whole_chunk(data) or conn.server.draining:
                self._continue_stream(pending, stream, data)
                return
            # A token: as in `UpstreamConnection.data_received`, with few calls.
            if stream.tap is not None:
                try:
                    stream.tap.data(data)
                except Exception:
                    drop_tap(stream)
            self._pass_on(conn, stream, data)
            return
        conn, forward, _, request_id, started, _ = pending
        template, tail, out = self._template, None, b""
        if template is not None and data.startswith(template.before):
            if template.is_ours:
                tail = template.tails.get(len(data) - len(request_id))
                if tail is not None and data.startswith(tail[1] + request_id + END_OF_HEAD, template.at):
                    out = data  # the next hop has answered with the id that it received
                else:
                    tail = None
            elif not template.with_id:
                tail = template.tails.get(len(data))
                if tail is not None and not data.startswith(tail[1], template.at):
                    tail = None
        if tail is None:
            template, tail = self._pool.templates.recognise(data, template)
            self._template = template or self._template
        server = conn.server
        if template is not None and tail is not None and not conn.paused and not server.draining:
            head = template.head
            if not out:
                digits, _, body_at, _ = tail
                out = b"".join((head.start, digits, b"\r\nx-request-id: ", request_id, b"\r\n\r\n", data[body_at:]))
            conn.write_queue.write(conn.transport, out)
            self._release(conn)
            sent = len(out)
            self._pool.counters.bytes_relayed += sent
            conn.on_response(forward, request_id, head.status, started, _monotonic(), sent, data)
            return
        if tail is None and not conn.paused and not server.draining and self._start_stream(pending, data):
            return
        self.fall_back()
        super().data_received(data)

    def _release(self, conn: FastPathConnection) -> None:
        """The response is complete: both connections are free for the next request."""
        self.pending = None
        conn.pending_upstream = None
        server = conn.server
        server.running -= 1
        conn._deadline = server.ticker.now + server.keep_alive_s
        idle = self.target_pool.idle
        if len(idle) < self._max_idle and self._stall_at == NEVER:
            idle.append(self)
            self._deadline = self._ticker.now + self._idle_for_s
        else:
            self._become_idle(False)

    # Streams.

    def _start_stream(self, pending: PendingRequest, data: bytes) -> bool:
        """False: this is not a stream for the fast path; nothing has been done."""
        raw, found, rest = data.partition(END_OF_HEAD)
        if not found or len(raw) > self._pool.limits.head_bytes:
            return False
        conn, forward, _, request_id, started, _ = pending
        try:
            head, length, _ = self._pool.heads.read(raw)
            if not head.chunked or head.status != 200 or not head.reusable or length is not None:
                return False
            self._mode = EVENTS
            is_complete = bool(rest) and self._scan(rest)
        except Malformed:
            self._mode = NOTHING
            return False  # the general path reports what is wrong
        stream = FastPathStream(head, _monotonic() - started, conn.new_tap(forward))
        show_head(stream, head)
        if rest:
            show(stream, rest)
        out = b"".join((head.wire, _CHUNKED_AND_ID, request_id, END_OF_HEAD, rest))
        if is_complete:
            self._end_stream(pending, stream, out)
            return True
        patience = forward.patience or self._pool.limits.patience
        self._idle_s = NEVER if patience.idle_s is None else patience.idle_s
        self.stream = stream
        self._pass_on(conn, stream, out)
        return True

    def _continue_stream(self, pending: PendingRequest, stream: FastPathStream, data: bytes) -> None:
        conn = pending[0]
        if conn.server.draining:  # the connection may have to be closed at the end
            self.fall_back()
            super().data_received(data)
            return
        try:
            is_complete = self._scan(data)
        except Malformed as bad:
            self.fall_back()
            self._fail(bad.reason)
            return
        show(stream, data)
        if is_complete:
            self._end_stream(pending, stream, data)
        else:
            self._pass_on(conn, stream, data)

    def _pass_on(self, conn: FastPathConnection, stream: FastPathStream, out: bytes) -> None:
        ticker = self._ticker
        self._deadline = ticker.now + self._idle_s + ticker.tick_s
        stream.bytes_sent += len(out)
        now = _monotonic()
        if now - stream.last_at >= QUICK_S:
            stream.quick_pieces = 0
        elif stream.quick_pieces < MIN_QUICK_PIECES:
            stream.quick_pieces += 1
        else:
            stream.last_at = now
            conn.write_queue.hold(conn.transport, out)
            return
        stream.last_at = now
        conn.write_queue.write(conn.transport, out)

    def _end_stream(self, pending: PendingRequest, stream: FastPathStream, out: bytes) -> None:
        conn, forward, _, request_id, started, _ = pending
        self.stream = None
        self._mode = NOTHING
        self._release(conn)
        conn.write_queue.write(conn.transport, out)
        sent = stream.bytes_sent + len(out)
        self._pool.counters.bytes_relayed += sent
        conn.on_stream_end(forward, request_id, stream.head.status, started, _monotonic(), sent, stream.tap)

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
        self._apply_patience(exchange)
        exchange.join_stream(stream.head.status, stream.bytes_sent, stream.first_byte_s, stream.tap)
        if exchange.conn.paused:
            self.pause()

    # Events while a request is on the fast path.

    def waiting_since(self) -> float | None:
        if self.stream is not None:
            return None
        return super().waiting_since() if self.pending is None else self.pending[4]

    def give_up(self, why: str) -> None:
        if self.pending is not None and self.stream is None:
            self.fall_back()
        super().give_up(why)

    def discard(self) -> None:
        if self.pending is None:
            super().discard()
        else:
            abort(self.transport)  # `connection_lost` reports it to the exchange

    def connection_lost(self, error: Exception | None) -> None:
        if self.pending is not None:
            self.fall_back()
        super().connection_lost(error)

    def eof_received(self) -> None:
        if self.pending is not None:
            self.fall_back()
        super().eof_received()

    def check(self, now: float) -> None:
        if self.pending is not None:
            _, forward, _, _, started, _ = self.pending
            patience = forward.patience or self._pool.limits.patience
            due = NEVER if patience.first_byte_s is None else started + patience.first_byte_s
            if self.stream is not None:
                due = self._deadline
            if now < due and now < self._stall_at:
                return
            self.fall_back()
        super().check(now)
