"""What backends wrote, for whoever may read it (docs/reference/wire/files.md#backend-logs): names, lines, and lines as
they come.

`GET /v1/backend-logs`, `GET /v1/backend-logs/{model or model#N}`, and its `/ws`, exactly as the contract has them. Ours
beside it: `?tail=N` gives the last so many, `?follow=true` goes on line by line as JSON, for those without WebSockets.
Errors are one line of plain text, as everywhere under `/v1/` here. Lines are the supervisor's `LogBook`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, unquote, urlsplit

from corral.contract.codec import encode
from corral.contract.http import Headers, Request, Responder, Strip, UpstreamFailed
from corral.worker.ingress.answers import JSON, TEXT
from corral.worker.ingress.log_stream import LogStreams
from corral.worker.supervisor.logs import LogBook
from corral.worker.supervisor.tail import LogLine

PREFIX = b"/v1/backend-logs"
_LINES: Headers = ((b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store"))
_OURS = Strip((b"authorization", b"origin"), (b"x-corral-",))
_FOLLOW = b"/ws"
QUIET_S = 20.0  # without a line to tell


class LogDoor:
    def __init__(self, book: LogBook) -> None:
        self._book = book
        self._streams = LogStreams(book)

    async def close(self) -> None:
        await self._streams.close()

    async def handle(self, request: Request, responder: Responder) -> int:
        if request.method != b"GET":
            return await say(responder, 405, "only GET is served here")
        name = request.route[len(PREFIX) :].removeprefix(b"/")
        if not name:
            return await _send_json(responder, self._book.names())
        if name.endswith(_FOLLOW):
            return await self._stream(request, responder, name.removesuffix(_FOLLOW))
        return await self._lines(request, responder, unquote(name.decode(errors="replace")))

    async def _lines(self, request: Request, responder: Responder, name: str) -> int:
        asked = parse_qs(request.path.partition(b"?")[2].decode(errors="replace"))
        tail = asked.get("tail", [""])[-1]
        if tail and not tail.isdecimal():
            return await say(responder, 400, "tail is a number of lines")
        if asked.get("follow", [""])[-1] in ("1", "true"):
            await responder.stream(200, _LINES, self._follow(name, int(tail) if tail else None))
            return 200
        lines = self._book.read(name)
        return await _send_json(responder, _last(lines, int(tail)) if tail else lines)

    async def _follow(self, name: str, tail: int | None) -> AsyncIterator[bytes]:
        async with self._book.follow(name) as lines:
            for line in lines.initial if tail is None else _last(lines.initial, tail):
                yield encode(line) + b"\n"
            while True:
                try:
                    async with asyncio.timeout(QUIET_S):
                        line = await anext(lines)
                except TimeoutError:
                    yield b"\n"  # proxies take silence for death; readers of such lines skip an empty one
                else:
                    yield encode(line) + b"\n"

    async def _stream(self, request: Request, responder: Responder, name: bytes) -> int:
        if request.upgrade != b"websocket":
            return await say(responder, 400, "this is a WebSocket: ask for an upgrade")
        if not is_same_origin(request):
            return await say(responder, 403, "the Origin is another host than this one")
        try:
            target = await self._streams.target()
            result = await responder.relay(target, path=b"/" + name, strip=_OURS, upgrade=True)
        except (UpstreamFailed, OSError) as error:
            return await say(responder, 500, f"the log cannot be followed: {error}")
        return result.status


def is_same_origin(request: Request) -> bool:
    """A page of another host must not read along with a person's credentials. Programs send no Origin."""
    origin = request.header(b"origin")
    if origin is None:
        return True
    return urlsplit(origin.decode(errors="replace")).netloc == (request.header(b"host") or b"").decode(errors="replace")


def _last(lines: list[LogLine], count: int) -> list[LogLine]:
    return lines[-count:] if count else []


async def _send_json(responder: Responder, content: object) -> int:
    await responder.send(200, JSON, encode(content))
    return 200


async def say(responder: Responder, status: int, text: str) -> int:
    await responder.send(status, TEXT, text.encode() + b"\n")
    return status
