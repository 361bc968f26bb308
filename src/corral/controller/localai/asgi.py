"""A request that came by ASGI, as handlers of `contract/http.py` know them: `inference` is one of those.

Whoever leaves is noticed once the body is here: the handler is then cancelled, and with it what it had asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, NoReturn

from corral.contract.http import BodyTooLarge, ClientGone, Headers, RelayResult, Request, Target

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Handle = Callable[[Request, "AsgiResponder"], Awaitable[None]]

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect")
)


async def answer(scope: Scope, receive: Receive, send: Send, path: bytes, handle: Handle) -> None:
    """`path`: raw, with the query. Serves until the handler ends or the client has left."""
    body = AsgiBody(receive, _length(scope["headers"]))
    request = Request(
        method=scope["method"].encode("latin-1"),
        path=path,
        headers=[(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP],
        http_version=scope.get("http_version", "1.1"),
        peer=None,
        secure=scope.get("scheme") == "https",
        request_id=_header(scope["headers"], b"x-request-id").decode("latin-1"),
        body=body,
    )
    responder = AsgiResponder(send)
    serving = asyncio.ensure_future(handle(request, responder))
    leaving = asyncio.ensure_future(body.left())
    try:
        await asyncio.wait((serving, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            serving.cancel()
            await asyncio.wait((serving,))
        if not serving.cancelled():
            with contextlib.suppress(ClientGone):
                serving.result()
    finally:
        for task in (serving, leaving):
            task.cancel()
        await asyncio.gather(serving, leaving, return_exceptions=True)


def raw_path(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    return path + b"?" + query if query else path


def _header(headers: Headers, name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")


def _length(headers: Headers) -> int | None:
    said = _header(headers, b"content-length")
    if said.isdigit():
        return int(said)
    return None if _header(headers, b"transfer-encoding") else 0


class AsgiBody:
    """Fits `contract.http.Body`."""

    def __init__(self, receive: Receive, length: int | None) -> None:
        self._receive = receive
        self._read: bytes | None = None
        self._ended = asyncio.Event()
        self.length = length

    async def read(self, limit: int) -> bytes:
        if self._read is None:
            if self.length is not None and self.length > limit:
                raise BodyTooLarge(f"{self.length} bytes")
            whole = bytearray()
            async for piece in self.chunks():
                whole += piece
                if len(whole) > limit:
                    raise BodyTooLarge(f"more than {limit} bytes")
            self._read = bytes(whole)
        return self._read

    async def chunks(self) -> AsyncIterator[bytes]:
        while not self._ended.is_set():
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise ClientGone("the client left")
            if not event.get("more_body", False):
                self._ended.set()
            if piece := event.get("body", b""):
                yield piece

    async def left(self) -> None:
        """Returns when the client has left. Only once the body is here: until then its reader notices."""
        await self._ended.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


class AsgiResponder:
    """Fits `contract.http.Responder`, as far as a handler that relays nothing needs it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body})

    async def stream(
        self, status: int, headers: Headers, pieces: AsyncIterator[bytes], *, length: int | None = None
    ) -> None:
        """What breaks off in the middle is not ended: the server cuts the connection, so nobody takes it for all."""
        try:
            announced = [] if length is None else [(b"content-length", b"%d" % length)]
            await self._start(status, [*headers, *announced])
            async for piece in pieces:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._send({"type": "http.response.body", "body": b""})
        finally:
            if (close := getattr(pieces, "aclose", None)) is not None:
                await close()

    async def relay(self, target: Target, **_: object) -> RelayResult:
        self._cannot(target)

    def end(self, data: bytes, *, complete: bool) -> None:
        raise NotImplementedError("nothing is relayed from here, so no relayed response is ended")

    def _cannot(self, target: Target) -> NoReturn:
        raise NotImplementedError(f"nothing is relayed from here, not to {target} either")

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
