"""One request from its head to the handler's return: runs the handler, relays to the target it names, cleans up."""

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
    StreamEditor,
    Strip,
    Tap,
    Target,
    Unwanted,
    UpstreamFailed,
)
from corral.kit.log import get_log
from corral.relay.body import AnyBody, RequestBody
from corral.relay.edited_response import EditorTap
from corral.relay.http1.chunked import LAST_CHUNK, frame
from corral.relay.http1.fields import HOP_BY_HOP, write_fields
from corral.relay.http1.head import RequestHead, ResponseHead
from corral.relay.loop.runner import Park
from corral.relay.response_writer import BEGUN, COMPLETE, OPEN, ResponseWriter
from corral.relay.upstream import UpstreamConnection

if TYPE_CHECKING:
    from corral.relay.connection import ClientConnection

log = get_log(__name__)

_NOT_FROM_HANDLERS = HOP_BY_HOP | {b"content-length", b"x-request-id"}
_EXPECT_BODIES = frozenset((b"POST", b"PUT", b"PATCH"))
_OUTCOME = Park()
_new_result = tuple.__new__  # of RelayResult: a third of what the class's own constructor takes


class Exchange(ResponseWriter):
    """The `Responder` of a handler."""

    relaying = False
    _upstream: UpstreamConnection | None = None
    _connecting: asyncio.Task[UpstreamConnection] | None = None
    # Of the current call of `relay`.
    tap: Tap | None
    unwanted: Unwanted | None
    reads_unwanted: bool
    patience: Patience
    sent_method: bytes
    sends_chunks = False
    tunnels = False
    first_byte_s: float  # negative before the first byte
    _target: Target
    _wire: bytes  # the head of the request, and the body where it is complete
    _rest: memoryview | None = None  # a large body, written without a copy
    _whole: bool  # the request is complete and can be sent again
    _sent_request: tuple[UpstreamConnection, float] | None = None  # on the fast path: the connection, and when
    _replaced: Headers = ()  # response headers that the handler sets
    _added = b""  # the same as bytes
    edited = False  # an editor has accepted the response: `end` ends it, not the upstream
    _edited_whole = False  # the upstream completed the last response that was edited
    _held = b""  # edited bytes that wait for the head of the response

    def __init__(self, conn: ClientConnection, head: RequestHead, body: AnyBody, request_id: bytes) -> None:
        self.loop = conn.loop
        self.conn = conn
        self.request_head = head
        self.body = body
        self.request_id = request_id
        self.keep = head.keep

    # The end of the handler.

    def on_finished(self, failure: BaseException | None) -> None:
        progress = self.progress
        if self.gone:
            if progress < COMPLETE or failure is not None:
                self.conn.server.counters.clients_gone += 1
            if failure is not None and not isinstance(failure, ClientGone | asyncio.CancelledError):
                self._log_failure(failure)
        elif progress == OPEN:
            self._respond_to(failure)
        elif progress == BEGUN:
            self._log_failure(failure)
            self.cut()
        elif failure is not None:
            self._log_failure(failure)
        self.conn.on_exchange_done()

    def _respond_to(self, failure: BaseException | None) -> None:
        """The response where the handler sent none. It never contains the exception's text, which may name anything."""
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
            log.error("a handler returned without a response", request_id=self.request_id.decode())
        else:
            log.error("a handler failed", request_id=self.request_id.decode(), exc_info=failure)

    def on_client_left(self) -> None:
        """No client reads the response: stop the work for it at once."""
        if self.gone:
            return
        self.gone = True
        if self.is_draining:
            ResponseWriter.on_drained(self)
        elif self.progress >= COMPLETE:
            return  # the handler may finish
        elif self.relaying:
            self._release_upstream()
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
        editor: StreamEditor | None = None,
    ) -> RelayResult:
        is_open = self.progress == OPEN or self._sent_request is not None or (self.edited and self.progress == BEGUN)
        if not is_open or self.relaying:
            raise RuntimeError("this request has been answered already")
        if editor is not None:
            if self.progress == OPEN:  # an earlier attempt may have failed before it began
                self.edited, self._held = False, b""
            tap = EditorTap(self, editor, tap)
            self._edited_whole = False
        started = time.monotonic()
        pool = self.conn.server.pool
        request_head = self.request_head
        self.tap = tap
        self.unwanted = unwanted
        self.reads_unwanted = reads_unwanted
        self.patience = patience or pool.limits.patience
        self.sent_method = method or request_head.method
        self.first_byte_s = -1.0
        if response_headers or self._replaced:  # of an earlier attempt
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
                # A body that cannot be sent twice gets a new connection: an idle one may be closed by now.
                upstream = None if not self._whole or self._sent_request is not None else pool.take(target)
                if upstream is not None:
                    self._upstream = upstream
                    self._target = target
                    upstream.begin(self, self._wire, whole=True, rest=self._rest)
                elif self._sent_request is not None:
                    self._join(target, *self._sent_request)
                else:
                    self._connect(target)
                failure = await (_OUTCOME if self.stepping else self.wait(_OUTCOME))
            finally:
                self.relaying = False
                self._wire = b""
                self._rest = None
                if self._upstream is not None or self._connecting is not None:
                    self._stop_relaying()
            if failure is not None:
                raise failure
            if self.edited and self.tap is None:
                raise RuntimeError("the editor of the response failed")
        pool.counters.bytes_relayed += self.bytes_sent
        first_byte_s = self.first_byte_s
        return _new_result(
            RelayResult,
            (
                self.status,
                self.progress == COMPLETE or self._edited_whole,
                self.gone,
                first_byte_s if first_byte_s > 0 else 0.0,
                time.monotonic() - started,
                self.bytes_sent,
            ),
        )

    # Requests that fell back from the fast path.

    def resume(
        self, upstream: UpstreamConnection, sent_at: float, coro: Coroutine[Any, Any, None], *, has_begun: bool
    ) -> None:
        """Run `coro`, which calls `relay` before it waits. The request has been sent on `upstream`; the response, or
        the rest of a stream that `has_begun`, has not arrived."""
        self._sent_request = upstream, sent_at
        if has_begun:
            self.progress = BEGUN
        self.run(coro)
        if self._sent_request is not None:
            # `coro` waited first, or sent a response of its own. The request must not be sent a second time.
            self._sent_request = None
            upstream.discard()
            self.cancel()

    def _join(self, target: Target, upstream: UpstreamConnection, sent_at: float) -> None:
        self._sent_request = None
        self._upstream = upstream
        self._target = target
        upstream.join(self, sent_at)

    def join_stream(self, status: int, bytes_sent: int, first_byte_s: float, tap: Tap | None) -> None:
        """The stream has begun on the fast path: `bytes_sent` were passed on, and `tap` has seen them."""
        self.status = status
        self.bytes_sent = bytes_sent
        self.first_byte_s = first_byte_s
        self.tap = tap

    def _write_request(self, target: Target, path: bytes, headers: Headers | None, strip: Strip | None) -> bytes:
        fields = self.request_head.fields
        host = fields.host or _host_of(target)  # optional in HTTP/1.0, required in HTTP/1.1
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
            raise UpstreamFailed("the body was already sent", refused=True, resendable=False)
        self._whole = False
        length = body.length
        self.sends_chunks = length is None
        framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        self._wire = b"%b%b\r\nx-request-id: %b\r\n\r\n" % (head, framing, self.request_id)

    def _connect(self, target: Target) -> None:
        self._connecting = self.conn.server.pool.start_connecting(target)
        self._connecting.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[UpstreamConnection]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._connecting is not task:  # the request has ended meanwhile
            if not task.cancelled() and error is None:
                task.result().discard()
            return
        self._connecting = None
        if task.cancelled():
            self.wake(_OUTCOME, UpstreamFailed("connecting was cancelled", refused=True))
            return
        if error is not None:
            self.wake(_OUTCOME, error)
            return
        upstream = task.result()
        if upstream.transport.is_closing():  # `connection_lost` has run already and is not called again
            self.wake(_OUTCOME, UpstreamFailed("the connection was closed at once", refused=True))
            return
        self._upstream = upstream
        upstream.begin(self, self._wire, whole=self._whole, rest=self._rest)
        if not self._whole:
            assert isinstance(self.body, RequestBody)
            for piece in self.body.attach(upstream):
                upstream.send_body(piece)
            if self.body.complete:  # while connecting: no later byte will call `end_body`
                upstream.end_body()

    def _release_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.abandon()
            self._upstream = None
            self._detach_body()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None

    def _stop_relaying(self) -> None:
        """The handler stopped waiting: its own timeout, or it was cancelled."""
        self._release_upstream()
        if self.progress == BEGUN:
            self.cut()

    def _detach_body(self) -> None:
        if isinstance(self.body, RequestBody):
            self.body.detach()
            self.conn.resume_for_upstream()

    def pause_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def on_drained(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()
        else:
            ResponseWriter.on_drained(self)

    # Edited responses.

    def _begin_edited(self, head: ResponseHead) -> None:
        if self.progress != OPEN:
            return  # the head of a later response is not sent
        start = self._replace(head) if self._replaced else head.wire
        held, self._held = self._held, b""
        self._write_edited(self.write_head(head.status, start, self.unknown_length(), held))

    def send_edited(self, data: bytes) -> None:
        framed = frame(data) if self.request_head.minor else data
        if self.progress == OPEN:
            self._held += framed
        else:
            self._write_edited(framed)

    def _write_edited(self, data: bytes) -> None:
        if not self.gone:
            self.bytes_sent += len(data)
            self.conn.write_queue.write(self.conn.transport, data)

    def end(self, data: bytes, *, complete: bool) -> None:
        if not self.edited or self.progress != BEGUN or self.relaying:
            raise RuntimeError("there is no edited response to end")
        if data:
            self.send_edited(data)
        if self.gone:
            return
        if complete:
            if self.request_head.minor:
                self._write_edited(LAST_CHUNK)
            self.complete()
        else:
            self.cut()

    # Events, called by the upstream's connection and by the client's. Each call is the last step of its caller: the
    # handler may run to its end in here.

    def pass_response(self, head: ResponseHead, framing: bytes, body: bytes) -> None:
        if self.edited:
            self._begin_edited(head)
            return
        start = self._replace(head) if self._replaced else head.wire
        self.pass_on(self.write_head(head.status, start, framing, body))

    def pass_whole(self, head: ResponseHead, length: int, body: bytes) -> None:
        """`pass_response` for a response that is complete. The usual case is written in one step."""
        conn = self.conn
        if (
            not self.keep
            or not self.request_head.minor
            or self._replaced
            or self.edited
            or not self.body.complete
            or conn.server.draining
        ):
            self.pass_response(head, b"content-length: %d\r\n" % length, body)
            return
        self.status = head.status
        self.progress = BEGUN
        data = b"%bcontent-length: %d\r\nx-request-id: %b\r\n\r\n%b" % (head.wire, length, self.request_id, body)
        self.bytes_sent += len(data)
        conn.write_queue.write(conn.transport, data)

    def pass_on(self, data: bytes) -> None:
        """Write bytes from an upstream to the client."""
        if not self.edited:
            self.bytes_sent += len(data)
            self.conn.write_queue.write(self.conn.transport, data)

    def _replace(self, head: ResponseHead) -> bytes:
        return head.wire_without(frozenset([name for name, _ in self._replaced])) + self._added

    def pass_tunnel_head(self, head: ResponseHead, rest: bytes) -> None:
        self.status = head.status
        self.progress = BEGUN
        self.keep = False
        end = b"connection: Upgrade\r\nupgrade: websocket\r\nx-request-id: %b\r\n\r\n%b" % (self.request_id, rest)
        self.pass_on(self._replace(head) + end)
        assert self._upstream is not None
        self.conn.start_tunnel(self._upstream)

    def on_passed(self) -> None:
        """The whole response has been passed on."""
        self._upstream = None
        if not self._whole:
            self._detach_body()
        if self.edited:
            self._edited_whole = True
            self.wake(_OUTCOME)
            return
        self.progress = COMPLETE
        if not self.keep or not self.body.complete:
            self.conn.close_after_response()
        self.wake(_OUTCOME)

    def on_broken_off(self) -> None:
        """The response has begun and will not be completed."""
        self._upstream = None
        self._detach_body()
        if not self.edited:
            self.cut()
        self.wake(_OUTCOME)

    def on_no_response(self, why: str, *, timed_out: bool, stale: bool, unresponsive: bool) -> None:
        """The connection failed before the response began. `stale`: an idle connection that the upstream had closed;
        the request is sent again on a new one. `unresponsive`: the upstream stopped responding and was given up."""
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

    def is_unwanted(self, head: ResponseHead) -> bool:
        assert self.unwanted is not None
        try:
            return self.unwanted(head.status, head.fields.headers)
        except Exception:
            log.exception("the check for unwanted responses failed; the response is passed on")
            return False

    def on_unwanted(self, status: int, body: bytes) -> None:
        """The upstream has responded, and the response is not for the client."""
        self._upstream = None
        self._detach_body()
        failure = UpstreamFailed(
            f"it answered {status}",
            refused=True,
            resendable=self._whole or not self.body.spent,
            status=status,
            answer=body,
        )
        self.wake(_OUTCOME, failure)

    def on_body_broken(self, error: BodyBroken) -> None:
        """The rest of the body is malformed or will not arrive."""
        assert isinstance(self.body, RequestBody)
        self.body.fail(error)
        if self.relaying and not self._whole:
            self._release_upstream()
            if self.progress == OPEN:
                self.wake(_OUTCOME, error)
            else:
                self.cut()
                self.wake(_OUTCOME)


def _host_of(target: Target) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    return f"{host}:{target.port}".encode() if host else b"localhost"
