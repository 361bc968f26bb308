"""One request from its head to the handler's return: runs the handler, relays where it says, cleans up after it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from corral.contract.http import (
    BodyBroken,
    BodyTooLarge,
    ClientGone,
    Handler,
    Headers,
    Patience,
    RelayResult,
    Request,
    Strip,
    Tap,
    Target,
    UpstreamFailed,
)
from corral.kit.log import get_log
from corral.relay.answer import BEGUN, COMPLETE, OPEN, Answer
from corral.relay.body import NoBody, RequestBody
from corral.relay.fields import HOP_BY_HOP, Fields, write_fields
from corral.relay.head import RequestLine, StatusLine
from corral.relay.runner import Park
from corral.relay.upstream import Upstream

if TYPE_CHECKING:
    from corral.relay.connection import ClientConnection

log = get_log(__name__)

_NOT_FROM_HANDLERS = HOP_BY_HOP | {b"content-length", b"x-request-id"}
_EXPECT_BODIES = frozenset((b"POST", b"PUT", b"PATCH"))
_NOTHING_DROPPED: frozenset[bytes] = frozenset()
_OUTCOME = Park()
# What a relayed request can come to, besides an error.
_PASSED = object()  # an answer was passed on, wholly or in part, or the client left
_STALE = object()  # a kept connection turned out to be closed: nothing is lost, try a new one


class Exchange(Answer):
    """What a handler holds as `Responder`."""

    __slots__ = (
        "_added",
        "_connecting",
        "_dropped",
        "_relaying",
        "_upstream",
        "first_byte_s",
        "patience",
        "sends_chunks",
        "sent_method",
        "tap",
        "tunnels",
    )

    def __init__(
        self,
        conn: ClientConnection,
        line: RequestLine,
        fields: Fields,
        body: RequestBody | NoBody,
        request_id: bytes,
    ) -> None:
        Answer.__init__(self, conn, line, fields, body, request_id)
        self._relaying = False
        self._upstream: Upstream | None = None
        self._connecting: asyncio.Task[Upstream] | None = None

    # The handler's life.

    def start(self, handler: Handler) -> None:
        conn, line, fields = self.conn, self._line, self._fields
        request = Request(
            line.method,
            line.path,
            fields.headers,
            "1.1" if line.minor else "1.0",
            conn.peer,
            conn.secure,
            self.request_id.decode(),
            self.body,
            b"websocket" if line.minor and fields.upgrade == b"websocket" else b"",
        )
        self.run(handler.handle(request, self))

    def finished(self, failure: BaseException | None) -> None:
        if self.progress != COMPLETE:
            if self.gone:
                self.conn.server.counters.clients_gone += 1
            elif self.progress == OPEN:
                self._answer_for(failure)
            else:
                self._log_failure(failure)
                self.cut()
        elif failure is not None:
            self._log_failure(failure)
        self.conn.exchange_done()

    def _answer_for(self, failure: BaseException | None) -> None:
        """What the handler left unsaid. Never what it raised: that may name anything."""
        match failure:
            case BodyTooLarge():
                self.send_error(413, "the body is too large")
            case BodyBroken():
                self.conn.server.counters.malformed += 1
                self.send_error(failure.status, str(failure))
            case UpstreamFailed():
                status = 504 if failure.timed_out else 502
                self.send_error(status, "the upstream did not answer" if failure.timed_out else "the upstream failed")
            case _:
                self._log_failure(failure)
                self.send_error(500, "internal error")

    def _log_failure(self, failure: BaseException | None) -> None:
        self.conn.server.counters.handler_failures += 1
        if failure is None:
            log.error("a handler returned without an answer", request_id=self.request_id.decode())
        elif not isinstance(failure, ClientGone | asyncio.CancelledError):
            log.error("a handler failed", request_id=self.request_id.decode(), exc_info=failure)

    def client_left(self) -> None:
        """Nobody will read the answer: stop what is under way for it, at once."""
        if self.gone:
            return
        self.gone = True
        if self.progress == COMPLETE:
            return  # the handler may finish its notes in peace
        if self._upstream is not None:
            self._upstream.abandon()
            self._upstream = None
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._relaying:
            self.wake(_OUTCOME, _PASSED)
        elif isinstance(self.body, RequestBody) and self.body.awaited:
            self.body.fail(ClientGone("the client left"))
        elif self.drains:
            Answer.drained(self)
        else:
            self.cancel()

    # Relaying.

    async def relay(
        self,
        target: Target,
        *,
        method: bytes | None = None,
        path: bytes | None = None,
        headers: Headers | None = None,
        strip: Strip | None = None,
        add: Headers = (),
        body: bytes | None = None,
        tap: Tap | None = None,
        response_headers: Headers = (),
        upgrade: bool = False,
        patience: Patience | None = None,
    ) -> RelayResult:
        if self.progress != OPEN or self._relaying:
            raise RuntimeError("this request has been answered already")
        started = time.monotonic()
        line, fields = self._line, self._fields
        pool = self.conn.server.pool
        self.tap = tap
        self.patience = patience or pool.limits.patience
        self.sent_method = method or line.method
        self.tunnels = upgrade and fields.upgrade == b"websocket" and line.minor == 1
        self.first_byte_s = 0.0
        self._added, self._dropped = b"", _NOTHING_DROPPED
        if response_headers:
            self._added = write_fields(response_headers)
            self._dropped = frozenset([name for name, _ in response_headers])
        if headers is None and strip is None and not add and fields.host is not None and not self.tunnels:
            lines = fields.wire
        else:
            lines = self._request_lines(target, headers, strip, add)
        head = b"%b %b HTTP/1.1\r\n%bx-request-id: %b\r\n" % (
            self.sent_method,
            line.path if path is None else path,
            lines,
            self.request_id,
        )
        self._relaying = True
        try:
            whole, wire = self._frame_request(head, body)
            outcome: object = _STALE
            upstream = pool.take(target) if whole else None  # a body that cannot be sent twice gets a new connection
            if self.gone:
                outcome = _PASSED
            elif upstream is not None and self.stepping:  # the short way, without a coroutine more than needed
                self._upstream = upstream
                upstream.begin(self, wire, whole=True)
                outcome = await _OUTCOME
            if outcome is _STALE:
                outcome = await self._send(target, wire, whole=whole)
        finally:
            self._relaying = False
            if self._upstream is not None or self._connecting is not None:
                self._give_up()
        if outcome is not _PASSED:
            assert isinstance(outcome, Exception)
            raise outcome
        pool.counters.bytes_relayed += self.bytes_sent
        return RelayResult(
            self.status,
            self.progress == COMPLETE,
            self.gone,
            self.first_byte_s,
            time.monotonic() - started,
            self.bytes_sent,
        )

    async def _send(self, target: Target, wire: bytes, *, whole: bool) -> object:
        """On a new connection. What became of it."""
        self._connecting = self.conn.server.pool.start_connecting(target)
        self._connecting.add_done_callback(self._connected)
        outcome = await self.wait(_OUTCOME)
        if not isinstance(outcome, Upstream):
            return outcome
        self._upstream = outcome
        outcome.begin(self, wire, whole=whole)
        if not whole:
            assert isinstance(self.body, RequestBody)
            for piece in self.body.attach(outcome):
                outcome.send_body(piece)
        return await self.wait(_OUTCOME)

    def _request_lines(self, target: Target, headers: Headers | None, strip: Strip | None, add: Headers) -> bytes:
        fields = self._fields
        host = fields.host or _host_of(target)  # HTTP/1.0 need not say it, HTTP/1.1 must
        if headers is not None:
            lines = write_fields([pair for pair in headers if pair[0] not in _NOT_FROM_HANDLERS])
            if not any(name == b"host" for name, _ in headers):
                lines = b"host: %b\r\n%b" % (host, lines)
        else:
            lines = fields.wire if strip is None else fields.wire_without(strip)
            if fields.host is None:
                lines = b"host: %b\r\n%b" % (host, lines)
        if add:
            lines += write_fields(add)
        if self.tunnels:
            lines += b"connection: Upgrade\r\nupgrade: websocket\r\n"
        return lines

    def _frame_request(self, head: bytes, body: bytes | None) -> tuple[bool, bytes]:
        """Whether the whole request is in hand, and its bytes as far as they are."""
        self.sends_chunks = False
        own = self.body
        if body is None:
            body = own.whole()
            if body is None:
                assert isinstance(own, RequestBody)
                if own.error is not None:
                    raise own.error
                if own.spent:
                    raise UpstreamFailed("the body is spent", refused=True, resendable=False)
                if own.length is not None:
                    return False, b"%bcontent-length: %d\r\n\r\n" % (head, own.length)
                self.sends_chunks = True
                return False, head + b"transfer-encoding: chunked\r\n\r\n"
        if not body and self.sent_method not in _EXPECT_BODIES:
            return True, head + b"\r\n"
        return True, b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)

    def _connected(self, task: asyncio.Task[Upstream]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._connecting is not task:  # nobody waits any more
            if not task.cancelled() and error is None:
                task.result().discard()
            return
        self._connecting = None
        if task.cancelled():
            self.wake(_OUTCOME, UpstreamFailed("the relay is closing", refused=True))
        else:
            self.wake(_OUTCOME, error or task.result())

    def _give_up(self) -> None:
        """The handler stopped waiting: a timeout of its own, or it was cancelled."""
        if self._upstream is not None:
            self._upstream.abandon()
            self._upstream = None
            self._detach_body()
            if self.progress == BEGUN:
                self.cut()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None

    def _detach_body(self) -> None:
        if isinstance(self.body, RequestBody):
            self.body.detach()
            self.conn.unhold_for_upstream()

    def hold_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.hold()

    def drained(self) -> None:
        if self._upstream is not None:
            self._upstream.unhold()
        else:
            Answer.drained(self)

    # What becomes of the request, told by the upstream's connection and by the client's. Each is the last thing its
    # caller does: the handler may run to its end in here.

    def pass_answer(self, line: StatusLine, fields: Fields, framing: bytes, body: bytes) -> None:
        lines = fields.wire_without(self._dropped) + self._added if self._dropped else fields.wire
        self.write_head(line.status, line.wire, lines, framing, body)

    def pass_tunnel_head(self, line: StatusLine, fields: Fields, rest: bytes) -> None:
        self.status = line.status
        self.progress = BEGUN
        self._keep = False
        upgrade = b"connection: Upgrade\r\nupgrade: websocket\r\nx-request-id: %b\r\n\r\n" % self.request_id
        self.pass_on(b"".join((line.wire, fields.wire_without(self._dropped), self._added, upgrade, rest)))
        assert self._upstream is not None
        self.conn.start_tunnel(self._upstream)

    def passed(self, *, complete: bool) -> None:
        """The answer has been passed on: all of it, or all there will ever be."""
        self._upstream = None
        if self.body.length != 0:
            self._detach_body()
        if complete:
            self.complete()
        else:
            self.cut()
        self.wake(_OUTCOME, _PASSED)

    def not_answered(self, why: str, *, timed_out: bool, stale: bool) -> None:
        """The upstream broke before its answer began. `stale`: as kept connections do when nobody uses them."""
        self._upstream = None
        self._detach_body()
        if stale:
            self.conn.server.pool.counters.upstream_retries += 1
            self.wake(_OUTCOME, _STALE)
        else:
            resendable = not self.body.spent
            self.wake(_OUTCOME, UpstreamFailed(why, refused=False, timed_out=timed_out, resendable=resendable))

    def body_broke(self, error: BodyBroken) -> None:
        """The rest of the body will not come, or is no body."""
        assert isinstance(self.body, RequestBody)
        if self._upstream is None:
            self.body.fail(error)
            return
        self._upstream.abandon()
        self._upstream = None
        self._detach_body()
        self.body.fail(error)
        if self.progress == OPEN:
            self.wake(_OUTCOME, error)
        else:
            self.cut()
            self.wake(_OUTCOME, _PASSED)


def _host_of(target: Target) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"{host}:{target.port}".encode() if host else b"localhost"
