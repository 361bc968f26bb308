"""One request from its head to the handler's return: runs the handler, relays where it says, cleans up after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from corral.contract.http import (
    BodyBroken,
    BodyTooLarge,
    ClientGone,
    Headers,
    Patience,
    RelayResult,
    Strip,
    Tap,
    Target,
    Unwanted,
    UpstreamFailed,
)
from corral.kit.log import get_log
from corral.relay.answer import BEGUN, COMPLETE, OPEN, Answer
from corral.relay.body import AnyBody, RequestBody
from corral.relay.fields import HOP_BY_HOP, write_fields
from corral.relay.head import AnswerHead, RequestHead
from corral.relay.runner import Park
from corral.relay.upstream import Upstream

if TYPE_CHECKING:
    from corral.relay.connection import ClientConnection

log = get_log(__name__)

_NOT_FROM_HANDLERS = HOP_BY_HOP | {b"content-length", b"x-request-id"}
_EXPECT_BODIES = frozenset((b"POST", b"PUT", b"PATCH"))
_OUTCOME = Park()
_new_result = tuple.__new__  # of RelayResult: a third of what the class's own constructor takes


class Exchange(Answer):
    """What a handler holds as `Responder`."""

    relaying = False
    _upstream: Upstream | None = None
    _connecting: asyncio.Task[Upstream] | None = None
    # Of the relay under way.
    tap: Tap | None
    unwanted: Unwanted | None
    reads_unwanted: bool
    patience: Patience
    sent_method: bytes
    sends_chunks = False
    tunnels = False
    first_byte_s: float  # negative until one has come
    _target: Target
    _wire: bytes  # the request, as far as it is in hand
    _rest: memoryview | None = None  # what follows it, written as it is
    _whole: bool  # all of it is
    _joins: tuple[Upstream, float] | None = None  # where this request was sent already, and when
    _replaced: Headers = ()  # headers of the answer that are ours
    _added = b""  # the same, written

    def __init__(self, conn: ClientConnection, head: RequestHead, body: AnyBody, request_id: bytes) -> None:
        self.loop = conn.loop
        self.conn = conn
        self.request_head = head
        self.body = body
        self.request_id = request_id
        self.keep = head.keep

    # The handler's life.

    def finished(self, failure: BaseException | None) -> None:
        progress = self.progress
        if self.gone:
            if progress < COMPLETE or failure is not None:
                self.conn.server.counters.clients_gone += 1
            if failure is not None and not isinstance(failure, ClientGone | asyncio.CancelledError):
                self._log_failure(failure)
        elif progress == OPEN:
            self._answer_for(failure)
        elif progress == BEGUN:
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
        else:
            log.error("a handler failed", request_id=self.request_id.decode(), exc_info=failure)

    def client_left(self) -> None:
        """Nobody will read the answer: stop what is under way for it, at once."""
        if self.gone:
            return
        self.gone = True
        if self.drains:
            Answer.drained(self)
        elif self.progress >= COMPLETE:
            return  # the handler may finish its notes in peace
        elif self.relaying:
            self._let_go()
            self.wake(_OUTCOME)
        elif isinstance(self.body, RequestBody) and self.body.awaited:
            self.body.fail(ClientGone("the client left"))
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
        body: bytes | memoryview | None = None,
        tap: Tap | None = None,
        response_headers: Headers = (),
        upgrade: bool = False,
        patience: Patience | None = None,
        unwanted: Unwanted | None = None,
        reads_unwanted: bool = False,
    ) -> RelayResult:
        if (self.progress != OPEN and self._joins is None) or self.relaying:
            raise RuntimeError("this request has been answered already")
        started = time.monotonic()
        pool = self.conn.server.pool
        request_head = self.request_head
        self.tap = tap
        self.unwanted = unwanted
        self.reads_unwanted = reads_unwanted
        self.patience = patience or pool.limits.patience
        self.sent_method = method or request_head.method
        self.first_byte_s = -1.0
        if response_headers or self._replaced:  # of an earlier try
            self._added = pool.writer.write(response_headers)
            self._replaced = response_headers
        if upgrade and request_head.upgrade:
            self.tunnels = True
        if path is None and strip is None and headers is None and method is None and not self.tunnels:
            head = request_head.wire or self._write_request(target, request_head.path, None, None)
        else:
            head = self._write_request(target, request_head.path if path is None else path, headers, strip)
        if add:
            head += pool.writer.write(add)
        self._frame_request(head, body)
        if not self.gone:
            self.relaying = True
            try:
                # A body that cannot be sent twice gets a connection of its own: a kept one may be closed by now.
                upstream = None if not self._whole or self._joins is not None else pool.take(target)
                if upstream is not None:
                    self._upstream = upstream
                    self._target = target
                    upstream.begin(self, self._wire, whole=True, rest=self._rest)
                elif self._joins is not None:
                    self._join(target, *self._joins)
                else:
                    self._connect(target)
                failure = await (_OUTCOME if self.stepping else self.wait(_OUTCOME))
            finally:
                self.relaying = False
                self._wire = b""
                self._rest = None
                if self._upstream is not None or self._connecting is not None:
                    self._give_up()
            if failure is not None:
                raise failure
        pool.counters.bytes_relayed += self.bytes_sent
        first_byte_s = self.first_byte_s
        return _new_result(
            RelayResult,
            (
                self.status,
                self.progress == COMPLETE,
                self.gone,
                first_byte_s if first_byte_s > 0 else 0.0,
                time.monotonic() - started,
                self.bytes_sent,
            ),
        )

    # Requests that a shortcut has begun.

    def carry_on(self, upstream: Upstream, sent_at: float, coro: Coroutine[Any, Any, None], *, has_begun: bool) -> None:
        """Run `coro`, which relays before it waits: the request has been sent on `upstream`, only the answer is due, or
        the rest of one that `has_begun`."""
        self._joins = upstream, sent_at
        if has_begun:
            self.progress = BEGUN
        self.run(coro)
        if self._joins is not None:
            # It is waited for elsewhere, or was answered without; sent a second time it must not be.
            self._joins = None
            upstream.discard()
            self.cancel()

    def _join(self, target: Target, upstream: Upstream, sent_at: float) -> None:
        self._joins = None
        self._upstream = upstream
        self._target = target
        upstream.join(self, sent_at)

    def begun(self, status: int, bytes_sent: int, first_byte_s: float, tap: Tap | None) -> None:
        """Of the answer that is joined so much has been passed on. `tap` has seen it."""
        self.status = status
        self.bytes_sent = bytes_sent
        self.first_byte_s = first_byte_s
        self.tap = tap

    def _write_request(self, target: Target, path: bytes, headers: Headers | None, strip: Strip | None) -> bytes:
        fields = self.request_head.fields
        host = fields.host or _host_of(target)  # HTTP/1.0 need not say it, HTTP/1.1 must
        if headers is not None:
            lines = write_fields([pair for pair in headers if pair[0] not in _NOT_FROM_HANDLERS])
            if not any(name == b"host" for name, _ in headers):
                lines = b"host: %b\r\n%b" % (host, lines)
        else:
            lines = fields.wire if strip is None else fields.wire_without(strip)
            if fields.host is None:
                lines = b"host: %b\r\n%b" % (host, lines)
        if self.tunnels:
            lines += b"connection: Upgrade\r\nupgrade: websocket\r\n"
        return b"%b %b HTTP/1.1\r\n%b" % (self.sent_method, path, lines)

    def _frame_request(self, head: bytes, body: bytes | memoryview | None) -> None:
        if isinstance(body, memoryview):
            self._whole = True
            self._rest = body
            self._wire = b"%bcontent-length: %d\r\nx-request-id: %b\r\n\r\n" % (head, len(body), self.request_id)
            return
        if body is None:
            body = self.body.whole()
            if body is None:
                self._frame_streamed(head)
                return
        self._whole = True
        if body or self.sent_method in _EXPECT_BODIES:
            self._wire = b"%bcontent-length: %d\r\nx-request-id: %b\r\n\r\n%b" % (
                head,
                len(body),
                self.request_id,
                body,
            )
        else:
            self._wire = b"%bx-request-id: %b\r\n\r\n" % (head, self.request_id)

    def _frame_streamed(self, head: bytes) -> None:
        body = self.body
        assert isinstance(body, RequestBody)
        if body.error is not None:
            raise body.error
        if body.spent:
            raise UpstreamFailed("the body is spent", refused=True, resendable=False)
        self._whole = False
        length = body.length
        self.sends_chunks = length is None
        framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        self._wire = b"%b%b\r\nx-request-id: %b\r\n\r\n" % (head, framing, self.request_id)

    def _connect(self, target: Target) -> None:
        self._connecting = self.conn.server.pool.start_connecting(target)
        self._connecting.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[Upstream]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._connecting is not task:  # nobody waits any more
            if not task.cancelled() and error is None:
                task.result().discard()
            return
        self._connecting = None
        if task.cancelled():
            self.wake(_OUTCOME, UpstreamFailed("connecting was given up", refused=True))
            return
        if error is not None:
            self.wake(_OUTCOME, error)
            return
        upstream = task.result()
        if upstream.transport.is_closing():  # since it was made: nobody would report that again
            self.wake(_OUTCOME, UpstreamFailed("the connection was closed at once", refused=True))
            return
        self._upstream = upstream
        upstream.begin(self, self._wire, whole=self._whole, rest=self._rest)
        if not self._whole:
            assert isinstance(self.body, RequestBody)
            for piece in self.body.attach(upstream):
                upstream.send_body(piece)
            if self.body.complete:  # while the connection was made: no byte will come that could say so
                upstream.end_body()

    def _let_go(self) -> None:
        if self._upstream is not None:
            self._upstream.abandon()
            self._upstream = None
            self._detach_body()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None

    def _give_up(self) -> None:
        """The handler stopped waiting: a timeout of its own, or it was cancelled."""
        self._let_go()
        if self.progress == BEGUN:
            self.cut()

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

    def pass_answer(self, head: AnswerHead, framing: bytes, body: bytes) -> None:
        start = self._replace(head) if self._replaced else head.wire
        self.pass_on(self.write_head(head.status, start, framing, body))

    def pass_whole(self, head: AnswerHead, length: int, body: bytes) -> None:
        """The same, for an answer that is all here. What nearly every client gets is written in one go."""
        conn = self.conn
        if (
            not self.keep
            or not self.request_head.minor
            or self._replaced
            or not self.body.complete
            or conn.server.draining
        ):
            self.pass_answer(head, b"content-length: %d\r\n" % length, body)
            return
        self.status = head.status
        self.progress = BEGUN
        data = b"%bcontent-length: %d\r\nx-request-id: %b\r\n\r\n%b" % (head.wire, length, self.request_id, body)
        self.bytes_sent += len(data)
        conn.outbox.write(conn.transport, data)

    def pass_on(self, data: bytes) -> None:
        """Bytes that came from an upstream."""
        self.bytes_sent += len(data)
        self.conn.outbox.write(self.conn.transport, data)

    def _replace(self, head: AnswerHead) -> bytes:
        return head.wire_without(frozenset([name for name, _ in self._replaced])) + self._added

    def pass_tunnel_head(self, head: AnswerHead, rest: bytes) -> None:
        self.status = head.status
        self.progress = BEGUN
        self.keep = False
        end = b"connection: Upgrade\r\nupgrade: websocket\r\nx-request-id: %b\r\n\r\n%b" % (self.request_id, rest)
        self.pass_on(self._replace(head) + end)
        assert self._upstream is not None
        self.conn.start_tunnel(self._upstream)

    def passed(self) -> None:
        """The answer has been passed on, all of it."""
        self._upstream = None
        if not self._whole:
            self._detach_body()
        self.progress = COMPLETE
        if not self.keep or not self.body.complete:
            self.conn.close_after_answer()
        self.wake(_OUTCOME)

    def broke_off(self) -> None:
        """The answer has begun, and there will be no more of it."""
        self._upstream = None
        self._detach_body()
        self.cut()
        self.wake(_OUTCOME)

    def not_answered(self, why: str, *, timed_out: bool, stale: bool, unresponsive: bool) -> None:
        """The upstream broke before its answer began. `stale`: as kept connections do when nobody uses them; then
        nothing is lost, and a new one is tried. `unresponsive`: it was given up, because it stopped responding."""
        self._upstream = None
        self._detach_body()
        if stale:
            self.conn.server.pool.counters.upstream_retries += 1
            self._connect(self._target)
        else:
            failure = UpstreamFailed(
                why,
                refused=False,
                timed_out=timed_out,
                resendable=self._whole or not self.body.spent,
                unresponsive=unresponsive,
            )
            self.wake(_OUTCOME, failure)

    def is_unwanted(self, head: AnswerHead) -> bool:
        assert self.unwanted is not None
        try:
            return self.unwanted(head.status, head.fields.headers)
        except Exception:
            log.exception("whether an answer is wanted could not be told; it is passed on")
            return False

    def unwanted_answer(self, status: int, answer: bytes) -> None:
        """The upstream has answered, and nobody is to see it."""
        self._upstream = None
        self._detach_body()
        failure = UpstreamFailed(
            f"it answered {status}",
            refused=True,
            resendable=self._whole or not self.body.spent,
            status=status,
            answer=answer,
        )
        self.wake(_OUTCOME, failure)

    def body_broke(self, error: BodyBroken) -> None:
        """The rest of the body will not come, or is no body."""
        assert isinstance(self.body, RequestBody)
        self.body.fail(error)
        if self.relaying and not self._whole:
            self._let_go()
            if self.progress == OPEN:
                self.wake(_OUTCOME, error)
            else:
                self.cut()
                self.wake(_OUTCOME)


def _host_of(target: Target) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"{host}:{target.port}".encode() if host else b"localhost"
