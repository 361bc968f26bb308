"""One client's connection: splits its bytes into requests, one at a time, and enforces the client's deadlines.

A request starts when its head is complete and the request before it has its response. Meanwhile the connection reads on
a little, because the end of the stream is the sign that a client has left.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from corral.contract.http import BodyBroken, Request
from corral.kit.sockets import abort
from corral.relay.body import NO_BODY, AnyBody, RequestBody, WholeBody
from corral.relay.exchange import Exchange
from corral.relay.http1.fields import Malformed
from corral.relay.http1.head import END_OF_HEAD, RequestHead, is_invalid, write_refusal
from corral.relay.loop.runner import Runner
from corral.relay.loop.sockets import reset_on_close
from corral.relay.loop.ticker import NEVER
from corral.relay.upstream import UpstreamConnection

if TYPE_CHECKING:
    from corral.relay.server import RelayServer

# The purpose of the deadline.
_HEAD, IDLE, _BODY, _LINGER = range(4)
# Why reading is paused; any one is enough.
_PIPELINE_FULL, _WINDOW_FULL, _UPSTREAM_FULL = 1, 2, 4

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
MAX_EMPTY_LINES = 4


class ClientConnection(asyncio.Protocol):
    __slots__ = (
        "__weakref__",
        "_body",
        "_body_since",
        "_buffer",
        "_checked_bytes",
        "_closing",
        "_continue",
        "_deadline",
        "_due",
        "_pause_reasons",
        "_stall_at",
        "_stalled_bytes",
        "_ticker",
        "_tunnel",
        "exchange",
        "loop",
        "paused",
        "peer",
        "secure",
        "server",
        "transport",
        "write_queue",
    )

    def __init__(self, server: RelayServer) -> None:
        self.server = server
        self.loop = server.loop
        self.write_queue = server.write_queue
        self._ticker = server.ticker
        self.transport = cast(asyncio.Transport, None)  # until connected
        self.peer: tuple[str, int] | None = None
        self.secure = False
        self.paused = False
        self.exchange: Exchange | None = None
        self._body: RequestBody | None = None  # of the current request, until it is complete
        self._body_since = 0.0
        self._continue = False
        self._buffer = b""
        self._checked_bytes = 0  # bytes of an incomplete head that were checked
        self._tunnel: UpstreamConnection | None = None
        self._pause_reasons = 0
        self._closing = False
        self._deadline = NEVER
        self._due = _HEAD
        self._stall_at = NEVER
        self._stalled_bytes = 0

    # Opened and lost.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = (peer[0], peer[1]) if isinstance(peer, tuple) else None
        self.secure = transport.get_extra_info("sslcontext") is not None
        if self.server.admit(self):
            self._deadline = self._ticker.deadline(self.server.limits.timeouts.head_s)

    def connection_lost(self, _error: Exception | None) -> None:
        self._closing = True
        self.server.on_connection_lost(self)
        self._on_client_left()

    def eof_received(self) -> None:
        self.write_queue.flush()
        if self._tunnel is None:
            # Closing waits until the client has read the written bytes. The work for it stops at once, and its
            # pipelined requests are not started.
            self._closing = True
            self._watch_stall()
            self._on_client_left()
        else:
            self._tunnel.close_tunnel()

    def _on_client_left(self) -> None:
        self._deadline = NEVER
        if self.exchange is not None:
            self.exchange.on_client_left()

    # Reading.

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            if not self._closing:  # else the client sends on after it was refused
                self._read_request(data)
        elif self._body is not None:
            self._feed_body(data)
        elif self._tunnel is not None:
            self._tunnel.send_tunnelled(data)
        else:
            self._buffer_ahead(data)

    def _read_request(self, data: bytes) -> None:
        """Start the first request in `data`; keep the rest until it is done."""
        if self._buffer:
            data = self._buffer + data
        if self.paused:
            self._buffer = b""
            self._buffer_ahead(data)
            return
        server = self.server
        try:
            if data[0] == 13:  # CR
                data = _without_empty_lines(data)
            raw, found, rest = data.partition(END_OF_HEAD)
            if not found or len(raw) > server.limits.head_bytes:
                self._await_rest_of_head(data)
                return
            self._checked_bytes = 0
            head, length, request_id = server.heads.read(raw)
            self._buffer = rest
            self._start_request(head, length, request_id)
        except Malformed as bad:
            server.counters.malformed += 1
            self.refuse(bad.status, bad.reason)

    def _read_buffered(self) -> None:
        """Read the bytes that arrived while the connection was busy. Called by the loop: a long pipeline must not
        nest."""
        if self._buffer and self.exchange is None and not self._closing and not self.paused:
            self._read_request(b"")

    def _await_rest_of_head(self, data: bytes) -> None:
        if len(data) > self.server.limits.head_bytes:
            raise Malformed(431, "the head is too large")
        if is_invalid(data, self._checked_bytes):
            raise Malformed(400, "malformed head")
        self._buffer = data
        self._checked_bytes = len(data)
        if data and self._due != _HEAD:
            self._due = _HEAD
            self._deadline = self._ticker.deadline(self.server.limits.timeouts.head_s)

    def _start_request(self, head: RequestHead, length: int | None, request_id: bytes) -> None:
        body: AnyBody = NO_BODY
        if length is not None and 0 < length <= len(self._buffer):
            body = WholeBody(self._buffer[:length])
            self._buffer = self._buffer[length:]
        elif length or head.chunked:
            body = self._await_body(head, length)
        self._deadline = NEVER
        self._due = IDLE
        server = self.server
        server.running += 1
        server.counters.requests += 1
        request_id = head.request_id or request_id or server.new_request_id()
        exchange = self.exchange = Exchange(self, head, body, request_id)
        exchange.run(server.handler.handle(self.describe(head, body, request_id), exchange))

    def describe(self, head: RequestHead, body: AnyBody, request_id: bytes) -> Request:
        """The request for a handler."""
        fields = head.fields
        return Request(
            head.method,
            head.path,
            fields.headers,
            head.version,
            self.peer,
            self.secure,
            request_id.decode(),
            body,
            head.upgrade,
            fields.notes,
        )

    def _await_body(self, head: RequestHead, length: int | None) -> RequestBody:
        body = RequestBody(self, None if head.chunked else length)
        if self._buffer:
            self._buffer = body.feed(self._buffer)
        if not body.complete:
            self._body = body
            self._body_since = self._ticker.now
            self._continue = head.expects and not body.received
        return body

    def on_exchange_done(self) -> None:
        """The handler has returned. Continue with the next request, unless the connection closes."""
        self.exchange = None
        server = self.server
        server.running -= 1
        if server.draining:
            if (
                not server.retiring
            ):  # the response may have been sent without `connection: close`: another request may follow
                self.close()
            server.check_idle()
        if self._closing:
            return
        self._due = IDLE  # a body in pieces has changed it
        self._deadline = self._ticker.now + server.keep_alive_s
        if self._pause_reasons:
            self._resume_reading(_PIPELINE_FULL | _UPSTREAM_FULL | _WINDOW_FULL)
        if self._buffer:
            self.loop.call_soon(self._read_buffered)

    def _buffer_ahead(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > self.server.limits.pipelined_bytes:
            self._pause_reading(_PIPELINE_FULL)

    # Bodies.

    def runner(self) -> Runner | None:
        return self.exchange

    def _feed_body(self, data: bytes) -> None:
        body = self._body
        assert body is not None
        self._continue = False
        try:
            rest = body.feed(data)
        except Malformed as bad:
            self._end_body(BodyBroken(bad.reason, status=bad.status))
            return
        if body.complete:
            self._body = None
            self._deadline = NEVER
            if rest:
                self._buffer_ahead(rest)
            body.notify()
            return
        body.notify()
        if self._body is body:  # the handler has not ended meanwhile
            self._update_body_deadline(body)

    def _update_body_deadline(self, body: RequestBody) -> None:
        if self._pause_reasons & _UPSTREAM_FULL:
            self._deadline = NEVER  # the upstream is slow, not the client
        elif body.wanted:
            timeouts = self.server.limits.timeouts
            floor = self._body_since + timeouts.body_grace_s + body.received / timeouts.body_floor_bytes_per_s
            self._due = _BODY
            self._deadline = min(self._ticker.deadline(timeouts.body_idle_s), floor)
        else:
            self._deadline = NEVER
            if body.buffered > self.server.limits.body_window_bytes:
                self._pause_reading(_WINDOW_FULL)

    def want_body(self) -> None:
        if self._body is None or self._closing:
            return
        if self._continue:
            self._continue = False
            self.write(_CONTINUE)
        if self._deadline == NEVER:
            self._body_since = self._ticker.now  # the client is not charged for the time before the body was wanted
        if self._pause_reasons & _WINDOW_FULL:
            self._resume_reading(_WINDOW_FULL)
        self._update_body_deadline(self._body)

    def _end_body(self, error: BodyBroken) -> None:
        """The rest of the body, and the bytes after it, cannot be trusted."""
        self._deadline = NEVER
        self._pause_reading(_PIPELINE_FULL)
        if self.exchange is not None:
            self.exchange.on_body_broken(error)

    # Backpressure and deadlines.

    def _pause_reading(self, reason: int) -> None:
        if not self._pause_reasons:
            self.transport.pause_reading()
        self._pause_reasons |= reason

    def _resume_reading(self, reason: int) -> None:
        if self._pause_reasons:
            self._pause_reasons &= ~reason
            if not self._pause_reasons and not self._closing:
                self.transport.resume_reading()

    def pause_for_upstream(self) -> None:
        self._pause_reading(_UPSTREAM_FULL)
        if self._body is not None:
            self._update_body_deadline(self._body)

    def resume_for_upstream(self) -> None:
        self._resume_reading(_UPSTREAM_FULL)
        if self._body is not None and self._body.wanted:
            self.want_body()

    def pause_writing(self) -> None:
        self.paused = True
        self._watch_stall()
        if self.exchange is not None:
            self.exchange.pause_upstream()

    def resume_writing(self) -> None:
        self.paused = False
        if not self._closing:
            self._stall_at = NEVER
        if self.exchange is not None:
            self.exchange.on_drained()
        else:
            self._resume_reading(_PIPELINE_FULL)
            self._read_buffered()

    def _watch_stall(self) -> None:
        self._stalled_bytes = self.transport.get_write_buffer_size()
        self._stall_at = self._ticker.deadline(self.server.limits.timeouts.write_stall_s)

    def postpone(self, span_s: float) -> None:
        self._deadline += span_s
        self._stall_at += span_s
        self._body_since += span_s

    def check(self, now: float) -> None:
        if now >= self._deadline:
            self._expire()
        if now >= self._stall_at:
            if self.transport.get_write_buffer_size() < self._stalled_bytes:
                self._watch_stall()
            else:
                self.server.counters.client_timeouts += 1
                self._stall_at = NEVER
                self._closing = True
                abort(self.transport)

    def _expire(self) -> None:
        self._deadline = NEVER
        if self._due == _LINGER:
            abort(self.transport)
            return
        if self._due == _BODY:
            if self._body is None or not self._body.wanted:
                return  # the handler is slow, not the client
            self.server.counters.client_timeouts += 1
            self._end_body(BodyBroken("the body stopped arriving", status=408))
        elif self._buffer:
            self.server.counters.client_timeouts += 1
            self.refuse(408, "the head stopped arriving")
        else:
            self.close()

    # Tunnel.

    def start_tunnel(self, upstream: UpstreamConnection) -> None:
        self._tunnel = upstream
        self._body = None
        ahead, self._buffer = self._buffer, b""
        if ahead:
            upstream.send_tunnelled(ahead)
        self._resume_reading(_PIPELINE_FULL)

    # Writing and closing.

    def write(self, data: bytes) -> None:
        """Write at once, behind what was written before."""
        self.write_queue.flush()
        self.transport.write(data)

    def is_idle(self) -> bool:
        return self.exchange is None

    def refuse(self, status: int, reason: str, *, extra: bytes = b"") -> None:
        """Respond to bytes that are not a request, and close."""
        self.write(write_refusal(status, reason, extra=extra))
        self._linger()

    def close_after_response(self) -> None:
        if self._closing:
            return
        if self._body is not None:
            self._body = None
            self._linger()  # the client may still be sending
        else:
            self.close()

    def close(self) -> None:
        """Close after the client has read the written bytes."""
        if not self._closing:
            self._closing = True
            self.write_queue.flush()
            self._watch_stall()
            self.transport.close()

    def cut(self, *, by_reset: bool) -> None:
        """Close so that the client cannot take a partial response for a whole one."""
        self._closing = True
        self._body = None
        if by_reset:
            reset_on_close(self.transport.get_extra_info("socket"))
            abort(self.transport)
        else:
            self.write_queue.flush()
            self._watch_stall()
            self.transport.close()

    def _linger(self) -> None:
        """Close our side only, and drop the client's bytes for a moment. Closing with unread input makes the kernel
        reset the connection, and the client may lose the response."""
        self._closing = True
        self._buffer = b""
        self._body = None
        self.write_queue.flush()
        self._watch_stall()
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self.transport.write_eof()
        if self._pause_reasons:
            self._pause_reasons = 0
            self.transport.resume_reading()
        self._due = _LINGER
        self._deadline = self._ticker.deadline(self.server.limits.timeouts.linger_s)


def _without_empty_lines(data: bytes) -> bytes:
    """Some clients send an empty line after a body. A few are accepted."""
    for _ in range(MAX_EMPTY_LINES):
        if data[:2] != b"\r\n":
            break
        data = data[2:]
    return data
