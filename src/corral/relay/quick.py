"""The short way, in a straight line: a request that came in one piece, to a connection that is there, and its answer
that comes in one piece, to the client. No task, no coroutine, no request object and no timer of its own.

It is taken where the server has a `Shortcut`, by requests of HTTP/1.1 whose client keeps its connection, with a
Content-Length and a body that arrived with the head, while an idle connection to the errand's target exists; and it
ends with a whole answer below 400 with a Content-Length. Everything else is left to the general way (`connection.py`,
`exchange.py`, `upstream.py`): before a request has been sent by handling it there from the start, afterwards by
letting an `Exchange` join it, so that every trouble, every stream and every client that leaves meets one set of rules.

What a head means is only ever decided by `head.py`. Here a connection remembers how the last one looked before and
after the digits of its Content-Length, and what it meant; bytes that look the same mean the same.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, cast

from corral.contract.http import Errand, Shortcut, Target
from corral.kit.log import get_log
from corral.relay.body import WholeBody
from corral.relay.connection import IDLE, ClientConnection
from corral.relay.exchange import Exchange
from corral.relay.fields import MOST_LENGTH_DIGITS, Malformed
from corral.relay.head import END_OF_HEAD, AnswerHead, RequestHead
from corral.relay.upstream import Upstream
from corral.relay.wheel import NEVER

if TYPE_CHECKING:
    from corral.relay.pool import UpstreamPool
    from corral.relay.server import RelayServer

log = get_log(__name__)

_LENGTH_LINES = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")  # as `HeadMemo` takes them out, in this order
_monotonic = time.monotonic


class Shape(NamedTuple):
    """A head around the digits of its Content-Length."""

    before: bytes
    digits_at: int
    after: bytes  # with the empty line that ends the head
    skip: int  # from the end of the digits to the body


class Flight(NamedTuple):
    """A request on its short way: held by the upstream's connection until the answer comes."""

    conn: QuickConnection
    errand: Errand
    body: bytes
    request_id: bytes
    started: float


def find_shape(raw: bytes) -> Shape | None:
    """`raw` is a head without its end. None where no length can be told apart as `HeadMemo` would."""
    for mark in _LENGTH_LINES:
        at = raw.find(mark)
        if at >= 0:
            break
    else:
        return None
    at += len(mark)
    end = raw.find(b"\r\n", at)
    if end < 0:
        end = len(raw)
    digits = raw[at:end]
    if not digits.isdigit() or len(digits) > MOST_LENGTH_DIGITS:
        return None
    after = raw[end:] + END_OF_HEAD
    return Shape(raw[:at], at, after, len(after))


class QuickConnection(ClientConnection):
    """A client's connection that tries the short way first."""

    __slots__ = ("_decide", "_head", "_shape", "done", "flying")

    def __init__(self, server: RelayServer, shortcut: Shortcut) -> None:
        super().__init__(server)
        self._decide = shortcut.decide
        self.done = shortcut.done
        self._shape: Shape | None = None  # of the heads this client sends
        self._head = cast(RequestHead, None)  # what they mean
        self.flying: QuickUpstream | None = None  # has our request, and nobody else waits for its answer

    def data_received(self, data: bytes) -> None:
        if self.flying is not None:  # a client that does not wait for its answer
            self.flying.land_elsewhere()
        elif self.exchange is None and not self._buffer and not self.paused and not self._closing:
            shape = self._shape
            if shape is None or not data.startswith(shape[0]):
                shape = self._learn(data)
            if shape is not None:
                _, at, after, skip = shape
                end = data.find(b"\r", at)
                if data.startswith(after, end):
                    body = data[end + skip :]
                    digits = data[at:end]
                    if digits == b"%d" % len(body) and self._depart(body, digits):
                        return
        super().data_received(data)

    def _learn(self, data: bytes) -> Shape | None:
        """Keep the shape of this head, if one like it may go the short way."""
        self._shape = None
        raw, found, _ = data.partition(END_OF_HEAD)
        shape = find_shape(raw) if found and len(raw) <= self.server.limits.head_bytes else None
        if shape is None:
            return None
        try:
            head, length = self.server.heads.parse(raw)
        except Malformed:
            return None  # the general way refuses it
        plain = head.length is None and head.minor and head.keep and not head.expects and not head.upgrade
        if plain and length and head.method != b"HEAD":
            self._shape = shape
            self._head = head
        return self._shape

    def _depart(self, body: bytes, digits: bytes) -> bool:
        """Send the request on, if the shortcut knows where. False: nothing has happened."""
        server = self.server
        head = self._head
        try:
            errand = self._decide(head, body)
        except Exception:
            log.exception("a shortcut failed; the request goes the general way")
            return False
        if errand is None:
            return False
        server.running += 1
        server.counters.requests += 1
        request_id = head.request_id or b"%b-%x" % (server.id_prefix, next(server.id_numbers))
        upstream = server.pool.take(errand.target)
        if upstream is None:
            self._deadline = NEVER
            self._due = IDLE
            self.carry_on(errand, body, request_id, None, _monotonic())
            return True
        self.flying = cast(QuickUpstream, upstream)
        self.flying.flight = tuple.__new__(Flight, (self, errand, body, request_id, _monotonic()))
        self.outbox.write(
            upstream.transport,
            b"%b%b\r\ncontent-length: %b\r\n\r\n%b" % (errand.wire, request_id, digits, body),
        )
        return True

    def carry_on(
        self, errand: Errand, body: bytes, request_id: bytes, upstream: QuickUpstream | None, started: float
    ) -> None:
        """The general way, from here. With an upstream, the request is on its way there."""
        self.flying = None
        self._deadline = NEVER
        self._due = IDLE
        head = cast(RequestHead, errand.head)
        whole = WholeBody(body)
        exchange = self.exchange = Exchange(self, head, whole, request_id)
        request = self.describe(head, whole, request_id)
        shortcut = self.server.shortcut
        assert shortcut is not None
        coro = shortcut.carry_on(errand, request, exchange, _monotonic() - started)
        if upstream is None:
            exchange.run(coro)
        else:
            exchange.carry_on(upstream, started, coro)

    # What can happen meanwhile.

    def _client_left(self) -> None:
        if self.flying is not None:
            self.flying.land_elsewhere()
        super()._client_left()

    def is_idle(self) -> bool:
        return self.exchange is None and self.flying is None

    def check(self, now: float) -> None:
        if self.flying is not None and now >= self._deadline:
            self._deadline = NEVER  # it was for the time between two requests
        super().check(now)


class QuickUpstream(Upstream):
    """A connection to an upstream that can serve a request on its short way."""

    __slots__ = ("_answer", "_shape", "_start", "flight")

    def __init__(self, pool: UpstreamPool, target: Target) -> None:
        super().__init__(pool, target)
        self.flight: Flight | None = None
        self._shape: Shape | None = None  # of the heads that come here
        self._answer = cast(AnswerHead, None)  # what they mean
        self._start = b""  # the client's head up to the length

    def data_received(self, data: bytes) -> None:
        flight = self.flight
        if flight is None:
            super().data_received(data)
            return
        shape = self._shape
        if shape is None or not data.startswith(shape[0]):
            shape = self._learn(data)
        if shape is not None:
            _, at, after, skip = shape
            end = data.find(b"\r", at)
            if data.startswith(after, end):
                body = data[end + skip :]
                digits = data[at:end]
                if digits == b"%d" % len(body) and not flight.conn.paused and not flight.conn.server.draining:
                    self._arrive(flight, digits, body)
                    return
        self.land_elsewhere()
        super().data_received(data)

    def _learn(self, data: bytes) -> Shape | None:
        self._shape = None
        raw, found, _ = data.partition(END_OF_HEAD)
        shape = find_shape(raw) if found and len(raw) <= self._pool.limits.head_bytes else None
        if shape is None:
            return None
        try:
            head, _ = self._pool.heads.parse(raw)
        except Malformed:
            return None  # the general way says what becomes of it
        if head.length is None and head.simple and head.reusable and head.status < 400:
            self._shape = shape
            self._answer = head
            self._start = head.wire + b"content-length: "
        return self._shape

    def _arrive(self, flight: Flight, digits: bytes, body: bytes) -> None:
        conn, errand, _, request_id, started = flight
        self.flight = None
        conn.flying = None
        data = b"%b%b\r\nx-request-id: %b\r\n\r\n%b" % (self._start, digits, request_id, body)
        server = conn.server
        conn.outbox.write(conn.transport, data)
        server.running -= 1
        conn._deadline = server.wheel.now + server.keep_alive_s
        self._go_idle(True)
        sent = len(data)
        self._pool.counters.bytes_relayed += sent
        conn.done(errand, self._answer.status, _monotonic() - started, sent)

    def land_elsewhere(self) -> None:
        """The rest is for the general way: it joins here, and whatever comes next comes to it."""
        flight = self.flight
        assert flight is not None
        self.flight = None
        flight.conn.carry_on(flight.errand, flight.body, flight.request_id, self, flight.started)

    # What can happen meanwhile.

    def discard(self) -> None:
        if self.flight is None:
            super().discard()
        else:
            self.transport.abort()  # the exchange is told when the connection is lost

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
            patience = self.flight.errand.patience or self._pool.limits.patience
            due = NEVER if patience.first_byte_s is None else self.flight.started + patience.first_byte_s
            if now < due and now < self._stall_at:
                return
            self.land_elsewhere()
        super().check(now)
