"""Writes responses to one client: head, framing and keep-alive as this client's HTTP version needs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from corral.contract.http import ClientGone, Headers
from corral.relay.body import AnyBody
from corral.relay.http1.chunked import LAST_CHUNK, frame
from corral.relay.http1.fields import write_fields
from corral.relay.http1.head import RequestHead, error_body, has_no_body, reason_of
from corral.relay.loop.runner import Park, Runner

if TYPE_CHECKING:
    from corral.relay.connection import ClientConnection

_JSON: Headers = ((b"content-type", b"application/json"),)
_DRAINED = Park()

# The progress of a response. The last two are final.
OPEN, BEGUN, COMPLETE, CUT = range(4)


class ResponseWriter(Runner):
    """Sends one response. Kept beyond its end, it cannot disturb the connection's next request."""

    # Set by the exchange in its constructor: one is made for every request.
    conn: ClientConnection
    request_head: RequestHead
    body: AnyBody
    request_id: bytes
    keep: bool
    gone = False
    progress = OPEN
    status = 0
    bytes_sent = 0

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        self._check_open()
        self.send_now(status, headers, body)
        if self.conn.paused:
            await self._drain()

    async def stream(
        self, status: int, headers: Headers, pieces: AsyncIterator[bytes], *, length: int | None = None
    ) -> None:
        self._check_open()
        bodiless = has_no_body(status, self.request_head.method)
        chunked = length is None and not bodiless and bool(self.request_head.minor)
        if length is not None and not (bodiless and self.request_head.method != b"HEAD"):
            framing = b"content-length: %d\r\n" % length
        else:
            framing = b"" if bodiless else self.unknown_length()
        self._begin(status, headers, framing, b"")
        try:
            if not bodiless:
                await self._stream_pieces(pieces, chunked, length)
        except asyncio.CancelledError:
            if not self.gone:
                raise
            raise ClientGone("the client left") from None
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()
        if chunked:
            self._write(LAST_CHUNK)
        self.complete()

    async def _stream_pieces(self, pieces: AsyncIterator[bytes], chunked: bool, length: int | None) -> None:
        sent = 0
        async for piece in pieces:
            if self.gone:
                raise ClientGone("the client left")
            sent += len(piece)
            if length is not None and sent > length:
                break
            if piece:
                self._write(frame(piece) if chunked else piece)
            if self.conn.paused:
                await self._drain()
        if length is not None and sent != length:
            raise RuntimeError(f"the response has {sent} bytes or more, and {length} were announced")

    async def _drain(self) -> None:
        """Wait until the client has read most of the written bytes. Raises `ClientGone`."""
        while self.conn.paused and not self.gone:
            await self.wait(_DRAINED)
        if self.gone:
            raise ClientGone("the client left")

    def on_drained(self) -> None:
        self.wake(_DRAINED)

    @property
    def is_draining(self) -> bool:
        return self.waits_for(_DRAINED)

    def _check_open(self) -> None:
        if self.progress != OPEN:
            raise RuntimeError("this request has been answered already")
        if self.gone:
            raise ClientGone("the client left")

    # Heads.

    def send_now(self, status: int, headers: Headers, body: bytes) -> None:
        framing = b"content-length: %d\r\n" % len(body)
        if has_no_body(status, self.request_head.method):
            if self.request_head.method != b"HEAD":
                framing = b""
            body = b""
        self._begin(status, headers, framing, body)
        self.complete()

    def send_error(self, status: int, message: str) -> None:
        self.send_now(status, _JSON, error_body(status, message))

    def _begin(self, status: int, headers: Headers, framing: bytes, body: bytes) -> None:
        start = b"HTTP/1.1 %d %b\r\n%b" % (status, reason_of(status), write_fields(headers))
        self._write(self.write_head(status, start, framing, body))

    def unknown_length(self) -> bytes:
        """The framing of a body of unknown length."""
        if self.request_head.minor:
            return b"transfer-encoding: chunked\r\n"
        self.keep = False
        return b""

    def write_head(self, status: int, start: bytes, framing: bytes, body: bytes) -> bytes:
        """The head, from its first lines `start` and its `framing`, and the first bytes of the body."""
        if not self.keep or not self.body.complete or self.conn.server.draining:
            self.keep = False
            end = b"\r\nconnection: close\r\n\r\n"
        else:
            end = b"\r\n\r\n" if self.request_head.minor else b"\r\nconnection: keep-alive\r\n\r\n"
        self.status = status
        self.progress = BEGUN
        return b"%b%bx-request-id: %b%b%b" % (start, framing, self.request_id, end, body)

    def _write(self, data: bytes) -> None:
        """Write the handler's own bytes at once, so that the handler knows when to wait."""
        if not self.gone:
            self.bytes_sent += len(data)
            self.conn.write(data)

    # Ends.

    def complete(self) -> None:
        """The last byte is written. A connection that cannot be kept closes now, not when the handler returns."""
        self.progress = COMPLETE
        if not self.keep or not self.body.complete:
            self.conn.close_after_response()

    def cut(self) -> None:
        """The response will not be completed: close so that the client cannot take the part for the whole."""
        self.progress = CUT
        self.keep = False
        self.conn.cut(by_reset=not self.request_head.minor)
