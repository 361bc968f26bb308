"""An HTTP server that serves bytes the way servers on the Internet do: with ranges or without, changing, busy, cut.

async with BlobServer() as server:
    server.put("/x.tar", b"...", etag='"1"')
    server.cut_after = [1000]  # the next answer's body ends there, and the connection breaks
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

CHUNK = 16 << 10


@dataclass
class Served:
    content: bytes
    etag: str = ""
    modified: str = ""
    ranges: bool = True
    length: bool = True  # without: chunked


@dataclass
class Asked:
    path: str
    range: str = ""
    if_range: str = ""
    authorization: str = ""


@dataclass
class BlobServer:
    files: dict[str, Served] = field(default_factory=dict)
    at_first: dict[str, Served] = field(default_factory=dict)  # what is served the first time
    asked: list[Asked] = field(default_factory=list)
    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)  # answered first, in order
    cut_after: list[int] = field(default_factory=list)  # each answer's body, in order
    pause: asyncio.Event = field(default_factory=asyncio.Event)
    hold_after: int = 0  # so many bytes are sent, and the rest when `pause` is set again
    bytes_sent: int = 0
    broken_off: int = 0  # answers whose reader went away
    port: int = 0
    _runner: web.AppRunner | None = None

    def put(self, path: str, content: bytes, **how: str | bool) -> str:
        self.files[path] = Served(content, **how)  # type: ignore[arg-type]
        return self.url(path)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def __aenter__(self) -> BlobServer:
        self.pause.set()
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.pause.set()
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers
        self.asked.append(
            Asked(request.path, headers.get("Range", ""), headers.get("If-Range", ""), headers.get("Authorization", ""))
        )
        if self.statuses:
            status, more = self.statuses.pop(0)
            return web.Response(status=status, headers=more)
        file = self.at_first.pop(request.path, None) or self.files.get(request.path)
        if file is None:
            return web.Response(status=404)
        return await self._send(request, file)

    async def _send(self, request: web.Request, file: Served) -> web.StreamResponse:
        start = self._start(request, file)
        total = len(file.content)
        if start is not None and start >= total:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{total}"})
        response = web.StreamResponse(status=200 if start is None else 206)
        if file.etag:
            response.headers["ETag"] = file.etag
        if file.modified:
            response.headers["Last-Modified"] = file.modified
        if start is not None:
            response.headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        body = file.content[start or 0 :]
        if file.length:
            response.content_length = len(body)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        try:
            await self._send_body(request, response, body)
        except ConnectionError:
            self.broken_off += 1
        return response

    def _start(self, request: web.Request, file: Served) -> int | None:
        asked = request.headers.get("Range", "")
        condition = request.headers.get("If-Range", "")
        if not asked or not file.ranges or (condition and condition not in (file.etag, file.modified)):
            return None
        return int(asked.removeprefix("bytes=").partition("-")[0])

    async def _send_body(self, request: web.Request, response: web.StreamResponse, body: bytes) -> None:
        end = self.cut_after.pop(0) if self.cut_after else None
        for at in range(0, len(body), CHUNK):
            if self.hold_after and self.bytes_sent >= self.hold_after:
                self.hold_after = 0
                self.pause.clear()
            await self.pause.wait()
            piece = body[at : at + CHUNK] if end is None else body[at : min(at + CHUNK, end)]
            await response.write(piece)
            self.bytes_sent += len(piece)
            if end is not None and at + CHUNK >= end:
                assert request.transport is not None
                await asyncio.sleep(0)
                request.transport.close()  # what was written still goes out, and then the line breaks
                return
        await response.write_eof()
