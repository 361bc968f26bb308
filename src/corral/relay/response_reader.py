"""Reads responses on an upstream connection: head, framing, interim responses, the body's end.

A connection serves one exchange at a time. Bytes that arrive while it serves none close the connection, so that a
response can never reach the wrong client. `pooled_connection.py` opens and keeps connections, `upstream.py` sends
requests on them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from corral.contract.http import Target
from corral.relay.http1.chunked import LAST_CHUNK, ChunkScanner, PieceScanner, Scanners, frame, is_whole_chunk
from corral.relay.http1.fields import Malformed
from corral.relay.http1.head import END_OF_HEAD, ResponseHead, has_no_body, is_invalid
from corral.relay.loop.ticker import NEVER
from corral.relay.pooled_connection import PooledConnection
from corral.relay.taps import drop_tap, show, show_head

if TYPE_CHECKING:
    from corral.relay.exchange import Exchange
    from corral.relay.pool import UpstreamPool

# How the next bytes are read. Plain numbers: every read compares them.
NOTHING, HEAD, _LENGTH, EVENTS, _CHUNKED, _UNTIL_EOF, TUNNEL = range(7)  # EVENTS: whole chunks only, so far
MAX_INTERIM_RESPONSES = 16


class ResponseReader(PooledConnection):
    """Reads the response for its exchange and passes the bytes on."""

    __slots__ = (
        "_buffer",
        "_exchange",
        "_idle_s",
        "_interim_count",
        "_is_complete",
        "_is_paused",
        "_left",
        "_mode",
        "_reusable",
        "_scanner",
        "_scanners",
        "_sent",
        "_sent_at",
    )

    def __init__(self, pool: UpstreamPool, target: Target) -> None:
        super().__init__(pool, target)
        self._exchange: Exchange | None = None
        self._mode = NOTHING
        self._buffer = b""
        self._left = 0  # bytes of a response with Content-Length
        self._is_complete = False  # the response
        self._reusable = False
        self._sent = True  # the whole request
        self._sent_at = 0.0
        self._is_paused = False
        self._interim_count = 0
        self._idle_s = NEVER
        self._scanner: ChunkScanner | None = None  # of the response being read
        self._scanners = Scanners()

    def discard(self) -> None:
        if self._exchange is not None:
            self._fail("the connection was closed")
        else:
            self._leave_pool()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self._mode == TUNNEL:
            self._finish()
        elif self._exchange is not None:
            self._fail(f"the connection broke: {error}" if error else "the connection was closed")
        self._scanners.release()
        super().connection_lost(error)

    def eof_received(self) -> None:
        if self._mode == _UNTIL_EOF:
            if self._exchange is not None and self._exchange.request_head.minor:
                self._exchange.pass_on(LAST_CHUNK)
            self._finish()
        elif self._exchange is None:
            self._pool.forget(self)  # at once: the connection is lost only a moment later
        elif self._mode != TUNNEL:
            # No response can follow, but the transport would first wait until the rest of the request was taken.
            self._fail("the connection was closed")

    # Reading.

    def data_received(self, data: bytes) -> None:
        mode = self._mode
        if mode == HEAD:
            self._read_head(data)
            return
        exchange = self._exchange
        if mode == NOTHING or exchange is None:
            self.discard()  # bytes without a request: the next client must never get them
            return
        if mode == EVENTS and is_whole_chunk(data):
            # A token of a stream. Few calls on purpose: the engine has used the CPU's caches since the last token, so
            # each object that is touched here is fetched from memory.
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
                self._fail(bad.reason)
                return
            if exchange.edited:
                out = b""  # the editor has sent its own bytes
        ticker = self._ticker
        self._deadline = ticker.now + self._idle_s + ticker.tick_s
        exchange.bytes_sent += len(out)
        conn = exchange.conn
        conn.write_queue.write(conn.transport, out)
        if self._is_complete:
            self._finish()

    def _take(self, data: bytes) -> bytes:
        """Return the bytes for the client. Set `_is_complete` at the end of the body."""
        mode = self._mode
        if mode in (EVENTS, _CHUNKED):
            return self._take_chunked(data)
        if mode == _LENGTH:
            if len(data) > self._left:  # more than announced: the response is valid, the connection is not reused
                data = data[: self._left]
                self._reusable = False
            self._left -= len(data)
            self._is_complete = not self._left
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
        self._is_complete = self._scan(data)
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
        """Whether a chunked response ends with these bytes. Raises `Malformed`."""
        if self._mode == EVENTS:
            if is_whole_chunk(data):
                return False
            self._mode = _CHUNKED  # for the rest of this response: only the scanner knows now where a chunk begins
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
                        self._buffer = data  # until the body is complete
                        self._deadline = self._ticker.deadline(self._idle_s)
                    else:
                        self._drop_response(exchange, head, rest if length == len(rest) else None)
                    return
                if length == len(rest) and head.simple and exchange.sent_method != b"HEAD":
                    self._pass_whole(exchange, head, length, rest)
                    return
                if head.status >= 200:
                    self._start_response(exchange, head, length, rest)
                    return
                if self._interim(exchange, head, rest):
                    return
                data, seen = rest, 0
        except Malformed as bad:
            self._fail(bad.reason)

    def _pass_whole(self, exchange: Exchange, head: ResponseHead, length: int, body: bytes) -> None:
        """`_start_response` and `_finish` in one, for a response that arrived in one piece."""
        if exchange.tap is not None:
            show_head(exchange, head)
            show(exchange, body)
        self._exchange = None
        self._mode = NOTHING
        self._interim_count = 0
        exchange.pass_whole(head, length, body)
        if self._is_paused:
            self._unbind()
        self._become_idle(self._sent and head.reusable)
        exchange.on_passed()

    def _drop_response(self, exchange: Exchange, head: ResponseHead, body: bytes | None) -> None:
        """The response is not for the client. The connection can be reused if all of the response is here."""
        self._unbind()
        self._become_idle(body is not None and head.simple and self._sent and head.reusable)
        exchange.on_unwanted(head.status, body or b"")

    def _await_rest_of_head(self, data: bytes, seen: int) -> None:
        if len(data) > self._pool.limits.head_bytes or is_invalid(data, seen):
            raise Malformed(502, "malformed response")
        self._buffer = data
        self._deadline = self._ticker.deadline(self._idle_s)

    def _interim(self, exchange: Exchange, head: ResponseHead, rest: bytes) -> bool:
        """A 1xx response, which never ends the exchange. Returns True if a tunnel has begun."""
        self._interim_count += 1
        if self._interim_count > MAX_INTERIM_RESPONSES:
            raise Malformed(502, "too many interim responses")
        if head.status == 101:
            if not exchange.tunnels or head.fields.upgrade != b"websocket":
                raise Malformed(502, "an upgrade that was not requested")
            self._mode = TUNNEL
            self._reusable = False
            self._idle_s = self._pool.limits.tunnel_idle_s
            self._deadline = self._ticker.deadline(self._idle_s)
            self._pool.counters.tunnels += 1
            exchange.pass_tunnel_head(head, rest)
            return True
        # 100 is not passed on: the relay sent its own before it read the body.
        if head.status != 100 and exchange.request_head.minor:
            exchange.pass_on(head.wire + b"\r\n")
        return False

    def _start_response(self, exchange: Exchange, head: ResponseHead, length: int | None, rest: bytes) -> None:
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
        self._deadline = self._ticker.deadline(self._idle_s)
        if rest or self._mode == _LENGTH:
            try:
                rest = self._take(rest)
            except Malformed:
                self._mode = HEAD  # nothing has been passed on yet: the handler may still respond
                raise
        exchange.pass_response(head, framing, rest)
        if self._is_complete:
            self._finish()

    # Ends.

    def _unbind(self) -> None:
        self._exchange = None
        self._mode = NOTHING
        self._is_complete = False
        self._interim_count = 0
        self._buffer = b""
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    def _finish(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        self._unbind()
        self._become_idle(self._sent and self._reusable)
        exchange.on_passed()

    def _fail(self, why: str, *, timed_out: bool = False, unresponsive: bool = False) -> None:
        exchange = self._exchange
        assert exchange is not None
        before_response = self._mode == HEAD
        stale = exchange.first_byte_s < 0 and self.reused and not (timed_out or unresponsive)
        self._unbind()
        self._leave_pool()
        counters = self._pool.counters
        counters.upstream_failures += 1
        counters.upstream_timeouts += timed_out
        if before_response:
            exchange.on_no_response(why, timed_out=timed_out, stale=stale, unresponsive=unresponsive)
        else:
            exchange.on_broken_off()
