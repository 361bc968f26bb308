"""One client's connection: cuts its bytes into requests, one at a time, and minds the client's clock.

A request is begun when its head is whole and the one before it has been answered. While one is answered, reading goes
on a little, because the end of the stream is how a client says that it has left.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from corral.contract.http import BodyBroken, Request
from corral.kit.transports import abort
from corral.relay.body import NO_BODY, AnyBody, RequestBody, WholeBody
from corral.relay.exchange import Exchange
from corral.relay.fields import Malformed
from corral.relay.head import END_OF_HEAD, RequestHead, is_hopeless, write_refusal
from corral.relay.runner import Runner
from corral.relay.sockets import reset_on_close
from corral.relay.upstream import Upstream
from corral.relay.wheel import NEVER

if TYPE_CHECKING:
    from corral.relay.server import RelayServer

# What a deadline is for.
_HEAD, IDLE, _BODY, _LINGER = range(4)
# Why reading is paused; any of them is enough.
_HELD_AHEAD, _HELD_WINDOW, _HELD_UPSTREAM = 1, 2, 4

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MOST_EMPTY_LINES = 4


class ClientConnection(asyncio.Protocol):
    __slots__ = (
        "__weakref__",
        "_body",
        "_body_since",
        "_buffer",
        "_closing",
        "_continue",
        "_deadline",
        "_due",
        "_holds",
        "_seen",
        "_stall_at",
        "_stalled_bytes",
        "_tunnel",
        "_wheel",
        "exchange",
        "loop",
        "outbox",
        "paused",
        "peer",
        "secure",
        "server",
        "transport",
    )

    def __init__(self, server: RelayServer) -> None:
        self.server = server
        self.loop = server.loop
        self.outbox = server.outbox
        self._wheel = server.wheel
        self.transport = cast(asyncio.Transport, None)  # until connected
        self.peer: tuple[str, int] | None = None
        self.secure = False
        self.paused = False
        self.exchange: Exchange | None = None
        self._body: RequestBody | None = None  # of the current request, until it is complete
        self._body_since = 0.0
        self._continue = False
        self._buffer = b""
        self._seen = 0  # bytes of an incomplete head that have been looked at
        self._tunnel: Upstream | None = None
        self._holds = 0
        self._closing = False
        self._deadline = NEVER
        self._due = _HEAD
        self._stall_at = NEVER
        self._stalled_bytes = 0

    # Life.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = (peer[0], peer[1]) if isinstance(peer, tuple) else None
        self.secure = transport.get_extra_info("sslcontext") is not None
        if self.server.admit(self):
            self._deadline = self._wheel.deadline(self.server.limits.timeouts.head_s)

    def connection_lost(self, _error: Exception | None) -> None:
        self._closing = True
        self.server.dismiss(self)
        self._client_left()

    def eof_received(self) -> None:
        self.outbox.flush()
        if self._tunnel is None:
            # Closing waits until the client has taken what was written; the work for it must not, and what it asked
            # for ahead is not begun.
            self._closing = True
            self._watch_stall()
            self._client_left()
        else:
            self._tunnel.close_tunnel()

    def _client_left(self) -> None:
        self._deadline = NEVER
        if self.exchange is not None:
            self.exchange.client_left()

    # Bytes in.

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            if not self._closing:  # else it is what a client says after it was refused
                self._pump(data)
        elif self._body is not None:
            self._feed_body(data)
        elif self._tunnel is not None:
            self._tunnel.send_tunnelled(data)
        else:
            self._keep_for_later(data)

    def _pump(self, data: bytes) -> None:
        """Begin the first request in `data`; the rest waits until it is done."""
        if self._buffer:
            data = self._buffer + data
        if self.paused:
            self._buffer = b""
            self._keep_for_later(data)
            return
        server = self.server
        try:
            if data[0] == 13:  # CR
                data = _without_empty_lines(data)
            raw, found, rest = data.partition(END_OF_HEAD)
            if not found or len(raw) > server.limits.head_bytes:
                self._await_rest_of_head(data)
                return
            self._seen = 0
            head, length, request_id = server.heads.read(raw)
            self._buffer = rest
            self._begin(head, length, request_id)
        except Malformed as bad:
            server.counters.malformed += 1
            self.refuse(bad.status, bad.reason)

    def _go_on(self) -> None:
        """With what came while the connection was busy. In a turn of its own: a long pipeline must not nest."""
        if self._buffer and self.exchange is None and not self._closing and not self.paused:
            self._pump(b"")

    def _await_rest_of_head(self, data: bytes) -> None:
        if len(data) > self.server.limits.head_bytes:
            raise Malformed(431, "the head is too large")
        if is_hopeless(data, self._seen):
            raise Malformed(400, "malformed head")
        self._buffer = data
        self._seen = len(data)
        if data and self._due != _HEAD:
            self._due = _HEAD
            self._deadline = self._wheel.deadline(self.server.limits.timeouts.head_s)

    def _begin(self, head: RequestHead, length: int | None, request_id: bytes) -> None:
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
        """A request as handlers see it."""
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
            self._body_since = self._wheel.now
            self._continue = head.expects and not body.received
        return body

    def exchange_done(self) -> None:
        """The handler has returned. Go on with the next request, unless the connection is at its end."""
        self.exchange = None
        server = self.server
        server.running -= 1
        if server.draining:
            if not server.retiring:  # then the answer has not said that it was the last: one more may follow
                self.close()
            server.note_quiet()
        if self._closing:
            return
        self._due = IDLE  # a body that came in pieces has left its own
        self._deadline = self._wheel.now + server.keep_alive_s
        if self._holds:
            self._unhold(_HELD_AHEAD | _HELD_UPSTREAM | _HELD_WINDOW)
        if self._buffer:
            self.loop.call_soon(self._go_on)

    def _keep_for_later(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > self.server.limits.pipelined_bytes:
            self._hold(_HELD_AHEAD)

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
                self._keep_for_later(rest)
            body.notify()
            return
        body.notify()
        if self._body is body:  # the handler has not ended meanwhile
            self._mind_body(body)

    def _mind_body(self, body: RequestBody) -> None:
        if self._holds & _HELD_UPSTREAM:
            self._deadline = NEVER  # it is the upstream that takes its time
        elif body.wanted:
            timeouts = self.server.limits.timeouts
            floor = self._body_since + timeouts.body_grace_s + body.received / timeouts.body_floor_bytes_per_s
            self._due = _BODY
            self._deadline = min(self._wheel.deadline(timeouts.body_idle_s), floor)
        else:
            self._deadline = NEVER
            if body.buffered > self.server.limits.body_window_bytes:
                self._hold(_HELD_WINDOW)

    def want_body(self) -> None:
        if self._body is None or self._closing:
            return
        if self._continue:
            self._continue = False
            self.say(_CONTINUE)
        if self._deadline == NEVER:
            self._body_since = self._wheel.now  # time in which nobody asked is not the client's
        if self._holds & _HELD_WINDOW:
            self._unhold(_HELD_WINDOW)
        self._mind_body(self._body)

    def _end_body(self, error: BodyBroken) -> None:
        """Nothing of the body can be believed from here on, nor of what follows it."""
        self._deadline = NEVER
        self._hold(_HELD_AHEAD)
        if self.exchange is not None:
            self.exchange.body_broke(error)

    # Pace.

    def _hold(self, reason: int) -> None:
        if not self._holds:
            self.transport.pause_reading()
        self._holds |= reason

    def _unhold(self, reason: int) -> None:
        if self._holds:
            self._holds &= ~reason
            if not self._holds and not self._closing:
                self.transport.resume_reading()

    def hold_for_upstream(self) -> None:
        self._hold(_HELD_UPSTREAM)
        if self._body is not None:
            self._mind_body(self._body)

    def unhold_for_upstream(self) -> None:
        self._unhold(_HELD_UPSTREAM)
        if self._body is not None and self._body.wanted:
            self.want_body()

    def pause_writing(self) -> None:
        self.paused = True
        self._watch_stall()
        if self.exchange is not None:
            self.exchange.hold_upstream()

    def resume_writing(self) -> None:
        self.paused = False
        if not self._closing:
            self._stall_at = NEVER
        if self.exchange is not None:
            self.exchange.drained()
        else:
            self._unhold(_HELD_AHEAD)
            self._go_on()

    def _watch_stall(self) -> None:
        self._stalled_bytes = self.transport.get_write_buffer_size()
        self._stall_at = self._wheel.deadline(self.server.limits.timeouts.write_stall_s)

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
                return  # it is the handler that takes its time
            self.server.counters.client_timeouts += 1
            self._end_body(BodyBroken("the body stopped coming", status=408))
        elif self._buffer:
            self.server.counters.client_timeouts += 1
            self.refuse(408, "the head stopped coming")
        else:
            self.close()

    # Tunnel.

    def start_tunnel(self, upstream: Upstream) -> None:
        self._tunnel = upstream
        self._body = None
        ahead, self._buffer = self._buffer, b""
        if ahead:
            upstream.send_tunnelled(ahead)
        self._unhold(_HELD_AHEAD)

    # Ends.

    def say(self, data: bytes) -> None:
        """Write at once, behind what was written before."""
        self.outbox.flush()
        self.transport.write(data)

    def is_idle(self) -> bool:
        return self.exchange is None

    def refuse(self, status: int, reason: str, *, extra: bytes = b"") -> None:
        """Answer what is no request, and close."""
        self.say(write_refusal(status, reason, extra=extra))
        self._linger()

    def close_after_answer(self) -> None:
        if self._closing:
            return
        if self._body is not None:
            self._body = None
            self._linger()  # the client may still be sending
        else:
            self.close()

    def close(self) -> None:
        """Let the client have what was written, then close."""
        if not self._closing:
            self._closing = True
            self.outbox.flush()
            self._watch_stall()
            self.transport.close()

    def cut(self, *, by_reset: bool) -> None:
        """Close so that a half answer cannot be taken for a whole one."""
        self._closing = True
        self._body = None
        if by_reset:
            reset_on_close(self.transport.get_extra_info("socket"))
            abort(self.transport)
        else:
            self.outbox.flush()
            self._watch_stall()
            self.transport.close()

    def _linger(self) -> None:
        """Closing with unread input makes the kernel reset the connection, and the answer may be lost on the way. So
        only our side is closed now, and what still comes is thrown away for a moment."""
        self._closing = True
        self._buffer = b""
        self._body = None
        self.outbox.flush()
        self._watch_stall()
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self.transport.write_eof()
        if self._holds:
            self._holds = 0
            self.transport.resume_reading()
        self._due = _LINGER
        self._deadline = self._wheel.deadline(self.server.limits.timeouts.linger_s)


def _without_empty_lines(data: bytes) -> bytes:
    """Some clients send an empty line after a body. A few are forgiven."""
    for _ in range(_MOST_EMPTY_LINES):
        if data[:2] != b"\r\n":
            break
        data = data[2:]
    return data
