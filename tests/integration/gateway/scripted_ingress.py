"""A worker's ingress that does what a test wants: `/replicas/<process>/…`, literal to the wire, on a port."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n'
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


@dataclass
class Came:
    method: str
    process: str
    path: str
    headers: dict[str, str]
    body: bytes
    query: str
    locally: bool = False  # through the unix socket


# The status and the body of a stream, and whether it is all: what is not ends like that of a killed process, after its
# last byte has gone out.
Script = Callable[[Came], tuple[int, bytes, bool]]


@dataclass
class ScriptedIngress:
    node: str
    gone: set[str] = field(default_factory=set)  # processes that are not there any more
    unreachable: set[str] = field(default_factory=set)  # and those that do not accept connections
    unconvinced: set[str] = field(default_factory=set)  # and those whose worker refuses the gateway's token
    ended: set[str] = field(default_factory=set)  # and those that end when they are asked
    came: list[Came] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)
    most: int = 0  # at once, of one process
    held: asyncio.Event | None = None  # answers wait for it
    reading: asyncio.Event | None = None  # streams begin with the role, and wait for it as if they read the prompt
    paused: asyncio.Event | None = None  # streams wait for it when half of them is sent
    cut: bool = False  # streams end there, the way a killed process ends them
    script: Script | None = None  # what streams say instead
    port: int = 0
    tls: ssl.SSLContext | None = None
    sockets: Path | None = None  # a folder, for a unix socket beside the port
    _runner: web.AppRunner | None = None

    @property
    def view(self) -> dict[str, Any]:
        """As the gateways' view has it."""
        return {
            "id": self.node,
            "name": f"name-{self.node}",
            "status": "healthy",
            "ingress_url": f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}",
            "ingress_token": f"token-{self.node}",
        }

    def replica(self, process: str, model: str = "small", **more: Any) -> dict[str, Any]:
        return {"process_id": process, "node_id": self.node, "model": model, "revision": "r1", **more}

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/replicas/{process}/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.tls)
        await site.start()
        server = site._server
        assert isinstance(server, asyncio.Server)
        self.port = server.sockets[0].getsockname()[1]
        if self.sockets is not None:
            await self.listen_locally(self.sockets)

    async def listen_locally(self, folder: Path) -> None:
        assert self._runner is not None
        await web.UnixSite(self._runner, str(folder / f"{self.node}-{self.port}.sock")).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        process = request.match_info["process"]
        assert request.headers["Authorization"] == f"Bearer token-{self.node}"
        not_reached = {"X-Corral-Not-Reached": "1"}
        if process in self.gone:
            return web.json_response({"error": {"code": 410}}, status=410, headers=not_reached)
        if process in self.unreachable:
            return web.json_response({"error": {"code": 503}}, status=503, headers=not_reached)
        if process in self.unconvinced:
            return web.json_response({"error": {"code": 401}}, status=401, headers=not_reached)
        body = await request.read()
        path = "/" + request.match_info["path"]
        self.came.append(
            Came(request.method, process, path, dict(request.headers), body, request.query_string, not request.remote)
        )
        if process in self.ended:
            return web.json_response({"error": {}}, status=502, headers={"X-Corral-Process-Ended": "1"})
        self.running[process] = self.running.get(process, 0) + 1
        self.most = max(self.most, self.running[process])
        try:
            if self.held is not None:
                await self.held.wait()
            if request.headers.get("Upgrade") == "websocket":
                return await self._echo(request)
            if self.script is not None:
                return await self._say(request, *self.script(self.came[-1]))
            if b'"stream":true' in body.replace(b" ", b""):
                return await self._stream(request, usage=b"include_usage" in body)
            return web.json_response({"choices": [{"text": process}], "usage": USAGE})
        finally:
            self.running[process] -= 1

    async def _echo(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str("echo " + message.data)
        return socket

    async def _say(self, request: web.Request, status: int, body: bytes, whole: bool) -> web.StreamResponse:
        answer = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        if body:
            await answer.write(body)
        if not whole:
            assert request.transport is not None
            request.transport.close()
        return answer

    async def _stream(self, request: web.Request, *, usage: bool) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        if self.reading is not None:
            await answer.write(ROLE)
            await self.reading.wait()
        for number in range(4):
            if number == 2 and self.paused is not None:
                await self.paused.wait()
            if number == 2 and self.cut:
                assert request.transport is not None
                request.transport.abort()
            await answer.write(b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number)
        if usage:
            await answer.write(b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n')
        await answer.write(b"data: [DONE]\n\n")
        return answer


def server_tls(certificate_pem: str, key_pem: str, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, text in (("ingress.crt", certificate_pem), ("ingress.key", key_pem)):
        (folder / name).write_text(text)
    context.load_cert_chain(folder / "ingress.crt", folder / "ingress.key")
    return context


@contextlib.asynccontextmanager
async def running_ingress(
    node: str, *, tls: ssl.SSLContext | None = None, sockets: Path | None = None
) -> AsyncIterator[ScriptedIngress]:
    ingress = ScriptedIngress(node, tls=tls, sockets=sockets)
    await ingress.start()
    try:
        yield ingress
    finally:
        await ingress.stop()
