"""One connection to an upstream: sends requests, keeps pace with the client, notices silence.

`response_reader.py` reads the responses.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from corral.relay.http1.chunked import LAST_CHUNK, frame
from corral.relay.loop.ticker import NEVER
from corral.relay.response_reader import HEAD, TUNNEL, ResponseReader

if TYPE_CHECKING:
    from corral.relay.exchange import Exchange


class UpstreamConnection(ResponseReader):
    """Serves one `Exchange` after another."""

    __slots__ = ()

    # Request.

    def begin(self, exchange: Exchange, wire: bytes, *, whole: bool, rest: memoryview | None = None) -> None:
        """Send a head, with the body where `whole`, or that of it which is not in `rest`; otherwise `send_body` and
        `end_body` follow."""
        self._exchange = exchange
        self._mode = HEAD
        self._sent = whole
        first_byte_s = self._apply_patience(exchange)
        self._deadline = NEVER if first_byte_s is None or not whole else self._ticker.deadline(first_byte_s)
        self._sent_at = time.monotonic()
        conn = exchange.conn
        conn.write_queue.write(self.transport, wire)
        if rest:
            conn.write_queue.flush()
            self.transport.write(rest)
        if conn.paused:  # with what it was sent before
            self.pause()

    def join(self, exchange: Exchange, sent_at: float) -> None:
        """Bind to a request that was sent here whole, at `sent_at`, without an exchange."""
        self._exchange = exchange
        self._mode = HEAD
        self._sent = True
        first_byte_s = self._apply_patience(exchange)
        self._deadline = NEVER if first_byte_s is None else sent_at + first_byte_s
        self._sent_at = sent_at
        if exchange.conn.paused:
            self.pause()

    def _apply_patience(self, exchange: Exchange) -> float | None:
        first_byte_s, idle_s = exchange.patience
        self._idle_s = NEVER if idle_s is None else idle_s
        return first_byte_s

    def send_body(self, piece: bytes) -> None:
        exchange = self._exchange
        if exchange is not None and piece:
            exchange.conn.write_queue.write(self.transport, frame(piece) if exchange.sends_chunks else piece)

    def end_body(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.sends_chunks:
            exchange.conn.write_queue.write(self.transport, LAST_CHUNK)
        self._sent = True
        self._sent_at = time.monotonic()
        if self._mode == HEAD and not self._is_paused:
            self._deadline = self._deadline_for_head(exchange)

    def _deadline_for_head(self, exchange: Exchange) -> float:
        first_byte_s = exchange.patience.first_byte_s
        return NEVER if first_byte_s is None or not self._sent else self._ticker.deadline(first_byte_s)

    def pause_writing(self) -> None:
        self._watch_stall()
        if self._exchange is not None and (not self._sent or self._mode == TUNNEL):
            self._exchange.conn.pause_for_upstream()

    def resume_writing(self) -> None:
        self._stall_at = NEVER
        if self._exchange is not None:
            self._exchange.conn.resume_for_upstream()

    def send_tunnelled(self, data: bytes) -> None:
        self._deadline = self._ticker.deadline(self._idle_s)
        if self._exchange is not None:
            self._exchange.conn.write_queue.write(self.transport, data)

    def close_tunnel(self) -> None:
        """The client has said its last: let the upstream have what is on the way, then close."""
        self.transport.close()

    # Ends.

    def waiting_since(self) -> float | None:
        return self._sent_at if self._mode == HEAD else None

    def give_up(self, why: str) -> None:
        if self._mode == HEAD:
            self._fail(why, unresponsive=True)

    def abandon(self) -> None:
        """The client has left: close at once, so that generation stops. Only a tunnel that is closing gets the time to
        let the upstream have what the client said last."""
        ends_tunnel = self._mode == TUNNEL and self.transport.is_closing()
        self._unbind()
        self._pool.forget(self)
        if ends_tunnel:
            self._deadline = self._ticker.deadline(self._pool.limits.send_stall_s)
        else:
            self._abort()

    # Pace.

    def pause(self) -> None:
        """The client is slow: take no more from here for now."""
        self._is_paused = True
        self._deadline = NEVER
        self.transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            exchange = self._exchange
            if self._mode == HEAD and exchange is not None:
                self._deadline = self._deadline_for_head(exchange)
            else:
                self._deadline = self._ticker.deadline(self._idle_s)
            self.transport.resume_reading()

    def check(self, now: float) -> None:
        if self._exchange is None:
            super().check(now)
        elif now >= self._deadline:
            if self._mode == TUNNEL:
                self._exchange.conn.close()
                self.transport.close()
            else:
                self._fail("no byte came in time", timed_out=True)
        elif now >= self._stall_at and self._has_stalled():
            self._fail("the request was not taken in time", timed_out=True)
