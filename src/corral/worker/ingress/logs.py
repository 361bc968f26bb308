"""Routes of the backends' logs (docs/reference/wire/files.md#backend-logs), and of the worker's own.

`GET /v1/backend-logs` lists names, `GET /v1/backend-logs/{model or model#N}` returns lines, and its `/ws` streams them,
as LocalAI defines these routes. Corral adds `?tail=N` for the last lines and `?follow=true`, which streams JSON lines
to clients without WebSockets. Errors are one line of plain text, as for every route under `/v1/` here. The supervisor's
`LogBook` has the lines. `GET /corral/log` has the worker's own lines, with the same two parameters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, unquote, urlsplit

from corral.contract.codec import encode
from corral.contract.http import Headers, Request, Responder, Strip, UpstreamFailed
from corral.worker.ingress.log_stream import LogStreams
from corral.worker.ingress.responses import JSON, TEXT
from corral.worker.own_log import KEY as OWN_LOG
from corral.worker.supervisor.logs import LogBook
from corral.worker.supervisor.tail import LogLine

PREFIX = b"/v1/backend-logs"
_LINES: Headers = ((b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store"))
_OURS = Strip((b"authorization", b"origin"), (b"x-corral-",))
_FOLLOW = b"/ws"
KEEPALIVE_S = 20.0  # without a line


class LogRoutes:
    def __init__(self, book: LogBook, own: LogBook) -> None:
        self._book = book
        self._own = own
        self._streams = LogStreams(book)

    async def close(self) -> None:
        await self._streams.close()

    async def handle(self, request: Request, responder: Responder) -> int:
        if request.method != b"GET":
            return await send_text(responder, 405, "only GET is served here")
        name = request.route[len(PREFIX) :].removeprefix(b"/")
        if not name:
            return await _send_json(responder, self._book.names())
        if name.endswith(_FOLLOW):
            return await self._stream(request, responder, name.removesuffix(_FOLLOW))
        return await self._lines(request, responder, self._book, unquote(name.decode(errors="replace")))

    async def handle_own(self, request: Request, responder: Responder) -> int:
        if request.method != b"GET":
            return await send_text(responder, 405, "only GET is served here")
        return await self._lines(request, responder, self._own, OWN_LOG)

    async def _lines(self, request: Request, responder: Responder, book: LogBook, name: str) -> int:
        query = parse_qs(request.path.partition(b"?")[2].decode(errors="replace"))
        tail = query.get("tail", [""])[-1]
        if tail and not tail.isdecimal():
            return await send_text(responder, 400, "tail is a number of lines")
        if query.get("follow", [""])[-1] in ("1", "true"):
            await responder.stream(200, _LINES, _follow(book, name, int(tail) if tail else None))
            return 200
        lines = book.read(name)
        return await _send_json(responder, _last(lines, int(tail)) if tail else lines)

    async def _stream(self, request: Request, responder: Responder, name: bytes) -> int:
        if request.upgrade != b"websocket":
            return await send_text(responder, 400, "this route is a WebSocket: request an upgrade")
        if not is_same_origin(request):
            return await send_text(responder, 403, "the Origin is another host than this one")
        try:
            target = await self._streams.target()
            result = await responder.relay(target, path=b"/" + name, strip=_OURS, upgrade=True)
        except (UpstreamFailed, OSError) as error:
            return await send_text(responder, 500, f"the log cannot be followed: {error}")
        return result.status


async def _follow(book: LogBook, name: str, tail: int | None) -> AsyncIterator[bytes]:
    async with book.follow(name) as lines:
        for line in lines.initial if tail is None else _last(lines.initial, tail):
            yield encode(line) + b"\n"
        while True:
            try:
                async with asyncio.timeout(KEEPALIVE_S):
                    line = await anext(lines)
            except TimeoutError:
                yield b"\n"  # a proxy would close an idle connection; readers of JSON lines skip an empty one
            else:
                yield encode(line) + b"\n"


def is_same_origin(request: Request) -> bool:
    """A page of another host must not read the log with a person's credentials. Programs send no Origin."""
    origin = request.header(b"origin")
    if origin is None:
        return True
    return urlsplit(origin.decode(errors="replace")).netloc == (request.header(b"host") or b"").decode(errors="replace")


def _last(lines: list[LogLine], count: int) -> list[LogLine]:
    return lines[-count:] if count else []


async def _send_json(responder: Responder, content: object) -> int:
    await responder.send(200, JSON, encode(content))
    return 200


async def send_text(responder: Responder, status: int, text: str) -> int:
    await responder.send(status, TEXT, text.encode() + b"\n")
    return status
