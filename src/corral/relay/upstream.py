"""One connection to an upstream: sends a request, reads the answer's head, passes the rest through.

It serves one exchange at a time and is bound to it; bytes that come while it is bound to none end it, so an answer can
never reach the wrong client.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, cast

from corral.contract.http import Target
from corral.kit.transports import abort
from corral.relay.chunked import LAST_CHUNK, ChunkScanner, PieceScanner, Scanners, are_whole_chunks, frame
from corral.relay.fields import Malformed
from corral.relay.head import END_OF_HEAD, AnswerHead, has_no_body, is_hopeless
from corral.relay.sockets import watch_for_dead_peers
from corral.relay.taps import drop_tap, show, show_head
from corral.relay.wheel import NEVER

if TYPE_CHECKING:
    from corral.relay.exchange import Exchange
    from corral.relay.pool import Lane, UpstreamPool

# What the next bytes are. Plain numbers: this is asked for every read.
NOTHING, _HEAD, _LENGTH, EVENTS, _CHUNKED, _UNTIL_EOF, _TUNNEL = range(7)  # EVENTS: whole chunks only, so far
_MOST_INTERIMS = 16


class Upstream(asyncio.Protocol):
    __slots__ = (
        "_buffer",
        "_deadline",
        "_done",
        "_exchange",
        "_held",
        "_idle_s",
        "_interims",
        "_left",
        "_lost",
        "_mode",
        "_pool",
        "_reusable",
        "_scanner",
        "_scanners",
        "_sent",
        "_sent_at",
        "_stall_at",
        "_stalled_bytes",
        "_wheel",
        "expires_at",
        "lane",
        "reused",
        "target",
        "transport",
    )

    def __init__(self, pool: UpstreamPool, target: Target) -> None:
        self._pool = pool
        self._wheel = pool.wheel
        self.target = target
        self.transport = cast(asyncio.Transport, None)  # until connected
        self.lane = cast("Lane", None)  # the same
        self.reused = False
        self._exchange: Exchange | None = None
        self._mode = NOTHING
        self._buffer = b""
        self._left = 0
        self._lost = False
        self._done = False
        self._reusable = False
        self._sent = True
        self._sent_at = 0.0
        self._held = False
        self._interims = 0
        self._idle_s = NEVER
        self._deadline = NEVER
        self.expires_at = NEVER
        self._stall_at = NEVER
        self._stalled_bytes = 0
        self._scanner: ChunkScanner | None = None  # of the answer under way
        self._scanners = Scanners()

    # Life.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)
        self.expires_at = self._wheel.now + self._pool.limits.max_age_s
        watch_for_dead_peers(transport.get_extra_info("socket"), self._pool.limits.dead_after_s, sends=True)
        self._deadline = self._wheel.deadline(self._pool.limits.idle_s)

    def discard(self) -> None:
        """Close at once, whatever is under way; the exchange it served is told."""
        if self._exchange is not None:
            self._broke("the connection was closed")
        else:
            self._pool.forget(self)
            self._abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        if self._mode == _TUNNEL:
            self._finish()
        elif self._exchange is not None:
            self._broke(f"the connection broke: {error}" if error else "the connection was closed")
        self._scanners.release()
        self._pool.closed(self)

    def eof_received(self) -> None:
        if self._mode == _UNTIL_EOF:
            if self._exchange is not None and self._exchange.request_head.minor:
                self._exchange.pass_on(LAST_CHUNK)
            self._finish()
        elif self._exchange is None:
            self._pool.forget(self)  # at once: the connection is lost only a moment later
        elif self._mode != _TUNNEL:
            # No answer can follow, but the transport would first wait until the rest of the request was taken.
            self._broke("the connection was closed")

    # Request.

    def begin(self, exchange: Exchange, wire: bytes, *, whole: bool, rest: memoryview | None = None) -> None:
        """Send a head, with the body where `whole`, or that of it which is not in `rest`; otherwise `send_body` and
        `end_body` follow."""
        self._exchange = exchange
        self._mode = _HEAD
        self._sent = whole
        first_byte_s = self._be_patient(exchange)
        self._deadline = NEVER if first_byte_s is None or not whole else self._wheel.deadline(first_byte_s)
        self._sent_at = time.monotonic()
        conn = exchange.conn
        conn.outbox.write(self.transport, wire)
        if rest:
            conn.outbox.flush()
            self.transport.write(rest)
        if conn.paused:  # with what it was sent before
            self.hold()

    def join(self, exchange: Exchange, sent_at: float) -> None:
        """Bind to a request that was sent here whole, at `sent_at`, without an exchange."""
        self._exchange = exchange
        self._mode = _HEAD
        self._sent = True
        first_byte_s = self._be_patient(exchange)
        self._deadline = NEVER if first_byte_s is None else sent_at + first_byte_s
        self._sent_at = sent_at
        if exchange.conn.paused:
            self.hold()

    def _be_patient(self, exchange: Exchange) -> float | None:
        first_byte_s, idle_s = exchange.patience
        self._idle_s = NEVER if idle_s is None else idle_s
        return first_byte_s

    def send_body(self, piece: bytes) -> None:
        exchange = self._exchange
        if exchange is not None and piece:
            exchange.conn.outbox.write(self.transport, frame(piece) if exchange.sends_chunks else piece)

    def end_body(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.sends_chunks:
            exchange.conn.outbox.write(self.transport, LAST_CHUNK)
        self._sent = True
        self._sent_at = time.monotonic()
        if self._mode == _HEAD and not self._held:
            self._deadline = self._deadline_for_head(exchange)

    def _deadline_for_head(self, exchange: Exchange) -> float:
        first_byte_s = exchange.patience.first_byte_s
        return NEVER if first_byte_s is None or not self._sent else self._wheel.deadline(first_byte_s)

    def pause_writing(self) -> None:
        self._stalled_bytes = self.transport.get_write_buffer_size()
        self._stall_at = self._wheel.deadline(self._pool.limits.send_stall_s)
        if self._exchange is not None and (not self._sent or self._mode == _TUNNEL):
            self._exchange.conn.hold_for_upstream()

    def resume_writing(self) -> None:
        self._stall_at = NEVER
        if self._exchange is not None:
            self._exchange.conn.unhold_for_upstream()

    # Answer.

    def data_received(self, data: bytes) -> None:
        mode = self._mode
        if mode == _HEAD:
            self._read_head(data)
            return
        exchange = self._exchange
        if mode == NOTHING or exchange is None:
            self.discard()  # nobody asked: it must never be there for the next client
            return
        if mode == EVENTS and are_whole_chunks(data):
            # A token of a stream. Few calls on purpose: the engine has used the caches since the last one, and whatever
            # is touched here is fetched from memory while it waits.
            out, tap = data, exchange.tap
            if tap is not None:
                try:
                    tap.data(data)
                except Exception:
                    drop_tap(exchange)
        else:
            try:
                out = self._take(data)
            except Malformed as bad:
                self._broke(bad.reason)
                return
        wheel = self._wheel
        self._deadline = wheel.now + self._idle_s + wheel.tick_s
        exchange.bytes_sent += len(out)
        conn = exchange.conn
        conn.outbox.write(conn.transport, out)
        if self._done:
            self._finish()

    def _take(self, data: bytes) -> bytes:
        """What goes to the client for these bytes of the body. Sets `_done` at the end."""
        mode = self._mode
        if mode in (EVENTS, _CHUNKED):
            return self._take_chunked(data)
        if mode == _LENGTH:
            if len(data) > self._left:  # more than announced: the answer stands, the connection has lost our trust
                data = data[: self._left]
                self._reusable = False
            self._left -= len(data)
            self._done = not self._left
        exchange = self._exchange
        assert exchange is not None
        if exchange.tap is not None and data:
            show(exchange, data)
        if mode == _UNTIL_EOF and data and exchange.request_head.minor:
            return frame(data)
        return data

    def _take_chunked(self, data: bytes) -> bytes:
        exchange = self._exchange
        assert exchange is not None
        self._done = self._scan(data)
        scanner = self._scanner
        if self._mode == _CHUNKED and isinstance(scanner, PieceScanner):
            pieces = scanner.take()
            for piece in pieces:
                show(exchange, piece)
            if not exchange.request_head.minor:
                return b"".join(pieces)
        else:
            show(exchange, data)
        return data

    def _scan(self, data: bytes) -> bool:
        """Whether a chunked answer ends with these bytes. Raises `Malformed`."""
        if self._mode == EVENTS:
            if are_whole_chunks(data):
                return False
            self._mode = _CHUNKED  # for the rest of this answer: only the scanner knows now where a chunk begins
            self._scanner = self._scanners.start(pieces=False)
        assert self._scanner is not None
        self._scanner.feed(data)
        return self._scanner.complete

    def _read_head(self, data: bytes) -> None:
        exchange, pool = self._exchange, self._pool
        assert exchange is not None
        seen = len(self._buffer)
        if seen:
            data = self._buffer + data
            self._buffer = b""
        elif exchange.first_byte_s < 0:
            exchange.first_byte_s = time.monotonic() - self._sent_at
        try:
            while True:
                raw, found, rest = data.partition(END_OF_HEAD)
                if not found or len(raw) > pool.limits.head_bytes:
                    self._await_rest_of_head(data, seen)
                    return
                head, length, _ = pool.heads.read(raw)
                if head.status >= 400 and exchange.unwanted is not None and exchange.is_unwanted(head):
                    if exchange.reads_unwanted and length and len(rest) < length <= pool.limits.head_bytes:
                        self._buffer = data  # until all of it is here
                        self._deadline = self._wheel.deadline(self._idle_s)
                    else:
                        self._throw_away(exchange, head, rest if length == len(rest) else None)
                    return
                if length == len(rest) and head.simple and exchange.sent_method != b"HEAD":
                    self._pass_whole(exchange, head, length, rest)
                    return
                if head.status >= 200:
                    self._start_answer(exchange, head, length, rest)
                    return
                if self._interim(exchange, head, rest):
                    return
                data, seen = rest, 0
        except Malformed as bad:
            self._broke(bad.reason)

    def _pass_whole(self, exchange: Exchange, head: AnswerHead, length: int, body: bytes) -> None:
        """The short way, for an answer that came in one piece: the same as `_start_answer` and `_finish`."""
        if exchange.tap is not None:
            show_head(exchange, head)
            show(exchange, body)
        self._exchange = None
        self._mode = NOTHING
        self._interims = 0
        exchange.pass_whole(head, length, body)
        if self._held:
            self._unbind()
        self._go_idle(self._sent and head.reusable)
        exchange.passed()

    def _throw_away(self, exchange: Exchange, head: AnswerHead, body: bytes | None) -> None:
        """The answer is not for the client. Where all of it is here the connection is as good as new."""
        self._unbind()
        self._go_idle(body is not None and head.simple and self._sent and head.reusable)
        exchange.unwanted_answer(head.status, body or b"")

    def _await_rest_of_head(self, data: bytes, seen: int) -> None:
        if len(data) > self._pool.limits.head_bytes or is_hopeless(data, seen):
            raise Malformed(502, "malformed answer")
        self._buffer = data
        self._deadline = self._wheel.deadline(self._idle_s)

    def _interim(self, exchange: Exchange, head: AnswerHead, rest: bytes) -> bool:
        """An answer before the answer: never the end of the exchange. True if a tunnel has begun."""
        self._interims += 1
        if self._interims > _MOST_INTERIMS:
            raise Malformed(502, "too many interim answers")
        if head.status == 101:
            if not exchange.tunnels or head.fields.upgrade != b"websocket":
                raise Malformed(502, "an upgrade nobody asked for")
            self._mode = _TUNNEL
            self._reusable = False
            self._idle_s = self._pool.limits.tunnel_idle_s
            self._deadline = self._wheel.deadline(self._idle_s)
            self._pool.counters.tunnels += 1
            exchange.pass_tunnel_head(head, rest)
            return True
        # 100 is ours to give: the client was told to go on before its body was sent.
        if head.status != 100 and exchange.request_head.minor:
            exchange.pass_on(head.wire + b"\r\n")
        return False

    def _start_answer(self, exchange: Exchange, head: AnswerHead, length: int | None, rest: bytes) -> None:
        self._reusable = head.reusable
        show_head(exchange, head)
        if has_no_body(head.status, exchange.sent_method):
            self._mode = _LENGTH
            self._left = 0
            framing = b"" if length is None or head.status == 204 else b"content-length: %d\r\n" % length
        elif length is not None:
            self._mode = _LENGTH
            self._left = length
            framing = b"content-length: %d\r\n" % length
        elif head.chunked:
            tap = exchange.tap
            pieces = (tap is not None and not getattr(tap, "raw", False)) or not exchange.request_head.minor
            self._mode = EVENTS
            if pieces:
                self._mode = _CHUNKED
                self._scanner = self._scanners.start(pieces=True)
            framing = exchange.unknown_length()
        else:
            self._mode = _UNTIL_EOF
            self._reusable = False
            framing = exchange.unknown_length()
        self._deadline = self._wheel.deadline(self._idle_s)
        if rest or self._mode == _LENGTH:
            try:
                rest = self._take(rest)
            except Malformed:
                self._mode = _HEAD  # nothing has been passed on yet: the handler may still answer
                raise
        exchange.pass_answer(head, framing, rest)
        if self._done:
            self._finish()

    def send_tunnelled(self, data: bytes) -> None:
        self._deadline = self._wheel.deadline(self._idle_s)
        if self._exchange is not None:
            self._exchange.conn.outbox.write(self.transport, data)

    def close_tunnel(self) -> None:
        """The client has said its last: let the upstream have what is on the way, then close."""
        self.transport.close()

    # Ends.

    def _unbind(self) -> None:
        self._exchange = None
        self._mode = NOTHING
        self._done = False
        self._interims = 0
        self._buffer = b""
        if self._held:
            self._held = False
            self.transport.resume_reading()

    def _finish(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        self._unbind()
        self._go_idle(self._sent and self._reusable)
        exchange.passed()

    def _go_idle(self, reusable: bool) -> None:
        pool = self._pool
        self.reused = True
        self._deadline = self._wheel.now + pool.limits.idle_s
        # An answer that came before the request was taken: the rest of it would stand in front of the next one.
        if not reusable or self._stall_at != NEVER or not pool.give_back(self):
            pool.forget(self)
            self._abort()

    def waiting_since(self) -> float | None:
        return self._sent_at if self._mode == _HEAD else None

    def give_up(self, why: str) -> None:
        if self._mode == _HEAD:
            self._broke(why, unresponsive=True)

    def _broke(self, why: str, *, timed_out: bool = False, unresponsive: bool = False) -> None:
        exchange = self._exchange
        assert exchange is not None
        before_answer = self._mode == _HEAD
        stale = exchange.first_byte_s < 0 and self.reused and not (timed_out or unresponsive)
        self._unbind()
        self._pool.forget(self)
        self._abort()
        counters = self._pool.counters
        counters.upstream_failures += 1
        counters.upstream_timeouts += timed_out
        if before_answer:
            exchange.not_answered(why, timed_out=timed_out, stale=stale, unresponsive=unresponsive)
        else:
            exchange.broke_off()

    def abandon(self) -> None:
        """The client has left: close at once, so that generation stops. Only a tunnel that is closing gets the time to
        let the upstream have what the client said last."""
        ends_tunnel = self._mode == _TUNNEL and self.transport.is_closing()
        self._unbind()
        self._pool.forget(self)
        if ends_tunnel:
            self._deadline = self._wheel.deadline(self._pool.limits.send_stall_s)
        else:
            self._abort()

    def _abort(self) -> None:
        if not self._lost:  # asyncio would report the loss a second time
            abort(self.transport)

    # Pace.

    def hold(self) -> None:
        """The client is slow: take no more from here for now."""
        self._held = True
        self._deadline = NEVER
        self.transport.pause_reading()

    def unhold(self) -> None:
        if self._held:
            self._held = False
            exchange = self._exchange
            if self._mode == _HEAD and exchange is not None:
                self._deadline = self._deadline_for_head(exchange)
            else:
                self._deadline = self._wheel.deadline(self._idle_s)
            self.transport.resume_reading()

    def postpone(self, span_s: float) -> None:
        self._deadline += span_s
        self._stall_at += span_s

    def check(self, now: float) -> None:
        if self._exchange is None:
            if now >= self._deadline or now >= self.expires_at:
                self._pool.forget(self)
                if self.transport.is_closing():
                    self._abort()
                else:
                    self.transport.close()
                self._deadline = self.expires_at = NEVER
        elif now >= self._deadline:
            if self._mode == _TUNNEL:
                self._exchange.conn.close()
                self.transport.close()
            else:
                self._broke("no byte came in time", timed_out=True)
        elif now >= self._stall_at:
            waiting = self.transport.get_write_buffer_size()
            if waiting < self._stalled_bytes:
                self._stalled_bytes = waiting
                self._stall_at = self._wheel.deadline(self._pool.limits.send_stall_s)
            else:
                self._broke("the request was not taken in time", timed_out=True)
