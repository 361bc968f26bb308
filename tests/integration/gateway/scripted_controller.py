"""A controller that says what a test wants: the routes a gateway lives on, literal to the wire, on a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from corral.gateway.settings import GatewaySettings
from corral.kit.settings import build_settings, describe

GATEWAY_KEY = "ck_gatewaygatewaygateway"


def key(secret: str, role: str, **more: Any) -> dict[str, Any]:
    return {"id": f"id-{secret}", "secret_hash": hashlib.sha256(secret.encode()).hexdigest(), "role": role, **more}


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


@dataclass
class ScriptedController:
    socket: Path
    keys: list[dict[str, Any]] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    replicas: list[dict[str, Any]] = field(default_factory=list)
    loads: dict[str, dict[str, Any]] = field(default_factory=dict)  # what is told of each model's load
    asked_loads: list[str] = field(default_factory=list)
    receipts: list[dict[str, Any]] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)  # of receipts, as they came
    running: list[dict[str, Any]] = field(default_factory=list)  # reports of requests under way
    takes_receipts: bool = True
    revision: int = 1
    server_time: float = 0.0
    grant: dict[str, Any] = field(default_factory=dict)  # what a gateway gets to join the bus; empty = there is none
    gateway_key: str = GATEWAY_KEY
    seen: list[Seen] = field(default_factory=list)
    view_reads: list[str | None] = field(default_factory=list)  # If-None-Match of each
    streams_open: int = 0
    hanging: int = 0  # requests that never get an answer
    stream: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    _runner: web.AppRunner | None = None

    def change(
        self,
        *,
        keys: list[dict[str, Any]] | None = None,
        models: list[dict[str, Any]] | None = None,
        nodes: list[dict[str, Any]] | None = None,
        replicas: list[dict[str, Any]] | None = None,
    ) -> None:
        self.keys = self.keys if keys is None else keys
        self.models = self.models if models is None else models
        self.nodes = self.nodes if nodes is None else nodes
        self.replicas = self.replicas if replicas is None else replicas
        self.revision += 1

    def load(self, model: str, **status: Any) -> None:
        """What is told of a load from now on."""
        version = self.loads.get(model, {}).get("version", 0) + 1
        self.loads[model] = {"model": model, "state": "pending", **status, "version": version}
        self._load_changed.set()
        self._load_changed = asyncio.Event()

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/internal/view", self._view)
        app.router.add_post("/internal/gateway/credentials", self._credentials)
        app.router.add_post("/internal/loads", self._ask_for_load)
        app.router.add_get("/internal/loads/{model:.+}", self._load_status)
        app.router.add_post("/internal/receipts", self._take_receipts)
        app.router.add_post("/internal/running", self._take_running)
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/ws/echo", self._websocket)
        app.router.add_get("/big/{size}", self._big)
        app.router.add_get("/hang", self._hang)
        app.router.add_route("*", "/{path:.*}", self._echo)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.socket)).start()

    async def listen(self, tls: ssl.SSLContext) -> str:
        """Serve on a port too; its URL."""
        assert self._runner is not None
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        server = site._server
        assert isinstance(server, asyncio.Server)
        return f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self.socket.unlink(missing_ok=True)

    def _is_gateway(self, request: web.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {self.gateway_key}"

    async def _view(self, request: web.Request) -> web.Response:
        if not self._is_gateway(request):
            return web.json_response({"error": {"code": 401, "message": "no", "type": "unauthenticated"}}, status=401)
        known = request.headers.get("If-None-Match")
        self.view_reads.append(known)
        etag = {"ETag": f'"{self.revision}"'}
        if known == f'"{self.revision}"':
            return web.Response(status=304, headers=etag)
        view = {
            "revision": self.revision,
            "keys": self.keys,
            "nodes": self.nodes,
            "models": self.models,
            "replicas": self.replicas,
            "server_time": self.server_time,
        }
        return web.json_response(view, headers=etag)

    async def _ask_for_load(self, request: web.Request) -> web.Response:
        assert self._is_gateway(request)
        model = (await request.json())["model"]
        self.asked_loads.append(model)
        if model not in self.loads:
            return web.json_response({"error": {"code": 404, "message": "no", "type": "not_found"}}, status=404)
        return web.json_response(self.loads[model], status=202)

    async def _load_status(self, request: web.Request) -> web.Response:
        """Waits for a change, as the real one does."""
        assert self._is_gateway(request)
        model, since = request.match_info["model"], int(request.query["since"])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query["wait_s"])):
                while self.loads.get(model, {"version": since + 1})["version"] <= since:
                    await self._load_changed.wait()
        if model not in self.loads:
            return web.json_response({"error": {"code": 404, "message": "no", "type": "not_found"}}, status=404)
        return web.json_response(self.loads[model])

    async def _take_receipts(self, request: web.Request) -> web.Response:
        assert self._is_gateway(request)
        if not self.takes_receipts:
            return web.json_response({"error": {"code": 503, "message": "no", "type": "unavailable"}}, status=503)
        batch = await request.json()
        self.batches.append(batch)
        self.receipts += batch["receipts"]
        return web.json_response({}, status=202)

    async def _take_running(self, request: web.Request) -> web.Response:
        assert self._is_gateway(request)
        self.running.append(await request.json())
        return web.json_response({}, status=202)

    async def _credentials(self, request: web.Request) -> web.Response:
        if not self._is_gateway(request):
            return web.json_response({"error": {"code": 401, "message": "no", "type": "unauthenticated"}}, status=401)
        return web.json_response(self.grant)

    async def _echo(self, request: web.Request) -> web.Response:
        seen = Seen(request.method, request.raw_path, list(request.headers.items()), await request.read())
        self.seen.append(seen)
        return web.json_response({"method": seen.method, "path": seen.path, "bytes": len(seen.body)}, status=200)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events, one per thing a test puts in `stream`."""
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await answer.prepare(request)
        self.streams_open += 1
        try:
            while (piece := await self.stream.get()) is not None:
                await answer.write(piece)
        finally:
            self.streams_open -= 1
        return answer

    async def _websocket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type == WSMsgType.TEXT:
                await socket.send_str("echo " + message.data)
        return socket

    async def _big(self, request: web.Request) -> web.StreamResponse:
        """So many bytes, as fast as they are taken; `sent` grows with them."""
        size = int(request.match_info["size"])
        answer = web.StreamResponse(headers={"Content-Length": str(size)})
        await answer.prepare(request)
        self.sent = 0
        with contextlib.suppress(ConnectionError):
            while self.sent < size:
                piece = b"x" * min(65536, size - self.sent)
                await answer.write(piece)
                self.sent += len(piece)
        return answer

    async def _hang(self, request: web.Request) -> web.Response:
        self.hanging += 1
        await asyncio.Event().wait()
        raise AssertionError("never reached")

    sent: int = 0
    _load_changed: asyncio.Event = field(default_factory=asyncio.Event)


@contextlib.asynccontextmanager
async def running_controller(socket: Path, **more: Any) -> AsyncIterator[ScriptedController]:
    controller = ScriptedController(socket, **more)
    await controller.start()
    try:
        yield controller
    finally:
        await controller.stop()


def settings_with(values: Mapping[str, Any]) -> GatewaySettings:
    """Settings of a gateway by name, whatever group they are in."""
    assert values.keys() <= {documented.name for documented in describe(GatewaySettings)}
    return build_settings(GatewaySettings, values)
