"""A fleet's HTTP API played by a script: routes as the contract has them, in a thread of its own, on a free port.

For the client and the CLI. What it answers is written down here by hand, so a mistake in our shapes shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from corral.kit.sockets import abort
from tests.support.waiting import until

KEY = "ck_" + "a" * 52


def node(name: str, status: str = "healthy", **more: Any) -> dict[str, Any]:
    """As docs/reference/wire/backends.md#list has it."""
    return {
        "id": f"id-{name}",
        "name": name,
        "node_type": "backend",
        "address": "",
        "http_address": "",
        "status": status,
        "total_vram": 0,
        "available_vram": 0,
        "reserved_vram": 0,
        "total_ram": 16 * 2**30,
        "available_ram": 8 * 2**30,
        "total_disk": 10**12,
        "available_disk": 4 * 10**11,
        "gpu_vendor": "",
        "gpu_compute_capability": "",
        "capability": "default",
        "max_replicas_per_model": 1,
        "max_replicas_per_model_manually_set": False,
        "vram_budget_manually_set": False,
        "last_heartbeat": "2026-11-15T12:00:00Z",
        "created_at": "2026-11-15T10:00:00Z",
        "updated_at": "2026-11-15T12:00:00Z",
        "model_count": 0,
        "in_flight_count": 0,
        **more,
    }


def event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def refused(status: int, message: str, kind: str) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message, "type": kind}}, status=status)


_ALONE = "/alone"
MOTION_S = 0.1  # between two pieces of a moving stream of events


class ScriptedFleet:
    """State is plain data; tests change it from their own thread between calls."""

    server: web.Server

    def __init__(self) -> None:
        self.url = ""
        self.nodes: list[dict[str, Any]] = [node("attic"), node("cellar", "pending")]
        self.models: list[dict[str, Any]] = []
        self.replicas: list[dict[str, Any]] = []  # as docs/reference/wire/http-nodes.md#replica-row has them
        self.requests: list[dict[str, Any]] = []
        self.running: list[dict[str, Any]] = []
        self.role = "admin"
        self.tokens: list[dict[str, Any]] = []
        self.keys: list[dict[str, Any]] = []
        self.cluster: dict[str, Any] = {
            "version": "0.1.0",
            "protocol": 1,
            "controllers": [],
            "nodes_by_status": {"healthy": 1, "pending": 1},
            "bus": {"connected": True, "urls": ["nats://127.0.0.1:4222"], "isolation": "per-node"},
            "store": "sqlite",
            "attention": [],
        }
        self.calls: list[tuple[str, str, Any]] = []
        self.queries: list[tuple[str, dict[str, str]]] = []
        self.streams: list[list[bytes]] = []  # each connection to /api/events is played the next of these, then closed
        self.operations: list[dict[str, Any]] = []  # as `GET /api/operations/:id` shows them
        self.told: list[list[dict[str, Any]]] = []  # the same for streams of one operation: views, then closed
        self.accepts: list[dict[str, Any]] = []  # each request for backends becomes the next of these operations
        self.accepted: dict[str, Any] = {}  # what else such a request is answered
        self.plan: dict[str, Any] = {"kind": "install", "backend": "vllm", "nodes": []}
        self.matrix: dict[str, Any] = {"nodes": [], "backends": [], "checked_at": ""}
        self.available: list[dict[str, Any]] = []
        self.upgrades: dict[str, Any] = {}
        self.galleries: list[dict[str, Any]] = []
        self.closing = asyncio.Event()
        # What an open stream of events sends again and again, after its first events.
        self.motion: Callable[[], bytes] | None = None
        self.silent = False  # streams of operations stay open and say nothing
        # (method, path) → an answer out of the ordinary, once; or what makes one, each time
        self.answers: dict[tuple[str, str], web.Response | Callable[[], web.Response]] = {}
        self.endless = b""  # what streams of chat begin with, which then say no more
        self.ca_pem = ""
        self.ready = True
        self.controller_ready = True

    def wait_until_alone(self) -> None:
        """Until no client is connected. A command that has ended may have sent a request that is not read yet, and
        would take what the script holds for the next command. Connections are accepted in the order in which they
        were made: when this one is served, all earlier ones are known."""
        with urllib.request.urlopen(self.url + _ALONE, timeout=60) as answer:
            assert answer.status == 200

    async def _wait_until_alone(self) -> web.Response:
        await until(lambda: len(self.server.connections) == 1, "the last client has left")
        return web.Response()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        if path == _ALONE:
            return await self._wait_until_alone()
        body = json.loads(await request.text() or "null") if request.can_read_body else None
        self.calls.append((request.method, path, body))
        self.queries.append((path, dict(request.query)))
        if path == "/ca.pem":
            return web.Response(text=self.ca_pem) if self.ca_pem else web.Response(status=404)
        if path == "/readyz":
            return web.Response(text="ready") if self.ready else web.Response(text="not yet", status=503)
        if path == "/controller/readyz":
            return web.Response(text="ready") if self.controller_ready else web.Response(text="database", status=503)
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return refused(401, "this key is not known", "unauthenticated")
        if (answer := self.answers.get((request.method, path))) is not None:
            if not isinstance(answer, web.Response):
                return answer()
            del self.answers[(request.method, path)]
            return answer
        if path == "/v1/chat/completions" and self.endless:
            return await self._events(request, None, self.endless)
        if path == "/api/events":
            if self.motion is not None:
                return await self._moving_events(request, self.motion)
            return await self._events(request, self.streams.pop(0) if self.streams else None)
        if path.startswith("/api/operations/") and path.endswith("/events"):
            if self.silent:
                return await self._events(request, None)
            told = self.told.pop(0) if self.told else []
            return await self._events(request, [event("operation", view) for view in told])
        if (request.method, path) == ("GET", "/api/operations"):
            return web.json_response({"operations": self._page(request.query)})
        return self._api(request.method, path, body, "plan=true" in request.raw_path)

    async def _events(
        self, request: web.BaseRequest, chunks: list[bytes] | None, first: bytes = b""
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(first)
        if chunks is None:
            await self.closing.wait()  # a quiet fleet; the client leaves before this ends
        for chunk in chunks or []:
            await answer.write(chunk)
        return answer

    async def _moving_events(self, request: web.BaseRequest, motion: Callable[[], bytes]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"".join(event("node", each) for each in self.nodes) + event("ready", {}))
        with contextlib.suppress(ConnectionError, TimeoutError):
            while not self.closing.is_set() and self.motion is not None:
                await answer.write(motion())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.closing.wait(), MOTION_S)
        return answer

    def _api(self, method: str, path: str, body: Any, plan: bool) -> web.Response:
        match method, path.strip("/").split("/"):
            case "POST", ["api", "operations"]:
                return web.json_response(self.plan) if plan else self._accept()
            case _, ["api", "operations", *rest]:
                return self._operation(method, rest)
            case "GET", ["api", "backends", "matrix"]:
                return web.json_response(self.matrix)
            case "GET", ["api", "backends", "available"]:
                return web.json_response(self.available)
            case ("GET", ["api", "backends", "upgrades"]) | ("POST", ["api", "backends", "upgrades", "check"]):
                return web.json_response(self.upgrades)
            case "GET", ["api", "me"]:
                return web.json_response({"key_id": "k1", "name": "admin", "role": self.role})
            case "GET", ["api", "galleries"]:
                return web.json_response(self.galleries)
            case "GET", ["api", "cluster"]:
                return web.json_response(self.cluster)
            case "GET", ["api", "nodes"]:
                return web.json_response(self.nodes)
            case "GET", ["api", "nodes", "models"]:
                return web.json_response(self.replicas)
            case _, ["api", "nodes", which, *rest]:
                return self._node(method, which, rest, body)
            case "GET", ["api", "models"]:
                return web.json_response(self.models)
            case "GET", ["api", "requests"]:
                return web.json_response({"requests": self.requests, "next": ""})
            case "GET", ["api", "requests", "running"]:
                return web.json_response({"requests": self.running, "total": len(self.running)})
            case "GET", ["api", "tokens"]:
                return web.json_response(self.tokens)
            case "POST", ["api", "tokens"]:
                made = {"id": "t1", "name": "", "uses": 0, "uses_left": 1, "pre_approved": False, "state": "active"}
                self.tokens.append({**made, **{k: v for k, v in body.items() if k in ("name", "pre_approved")}})
                line = f"corral join {self.url} --token cj_x"
                return web.json_response({"token": self.tokens[-1], "secret": "cj_x", "join_command": line}, status=201)
            case "GET", ["api", "keys"]:
                return web.json_response(self.keys)
            case "POST", ["api", "keys"]:
                self.keys.append({"id": "k2", "name": body["name"], "role": "inference", "state": "active"})
                return web.json_response({"key": self.keys[-1], "secret": "ck_new"}, status=201)
            case "DELETE", ["api", "tokens" | "keys", "t1" | "k2"]:
                return web.Response(status=204)
            case _:
                return refused(404, f"there is no {path} here", "http_error")

    def _page(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        ids = [each["jobID"] for each in self.operations]
        begin = ids.index(query["after"]) + 1 if "after" in query else 0
        return self.operations[begin : begin + int(query.get("limit", "50"))]

    def _accept(self) -> web.Response:
        self.operations.append(self.accepts.pop(0))
        answer = {"jobID": self.operations[-1]["jobID"], "message": "started"} | self.accepted
        return web.json_response(answer, status=202)

    def _operation(self, method: str, rest: list[str]) -> web.Response:
        """The contract's family of errors: a sentence, and beside it what a script can match."""
        if rest == ["history"]:
            if method == "DELETE":
                return web.json_response({"success": True})
            ended = {"id": "vllm", "name": "vllm", "jobID": "op-0", "kind": "install", "outcome": "completed"}
            return web.json_response({"operations": [ended]})
        found = next((each for each in self.operations if each["jobID"] == rest[0]), None)
        if found is None:
            return web.json_response({"error": f"there is no operation {rest[0]}", "code": "not_found"}, status=404)
        if method == "GET":
            return web.json_response(found)
        again = self.accepts.pop(0) if rest[1] == "retry" and self.accepts else found
        if again is not found:
            self.operations.append(again)
        return web.json_response({"success": True, "message": rest[1], "jobID": again["jobID"]})

    def _node(self, method: str, which: str, rest: list[str], body: Any) -> web.Response:
        found = next((each for each in self.nodes if which in (each["id"], each["name"])), None)
        if found is None:
            return refused(404, f"there is no node {which!r}", "node_error")
        match method, rest:
            case "GET", []:
                return web.json_response(found)
            case "DELETE", []:
                self.nodes.remove(found)
                return web.json_response({"message": "node deregistered"})
            case "POST", ["approve"]:
                found["status"] = "healthy"
                return web.json_response(
                    {"id": found["id"], "name": found["name"], "node_type": "backend", "status": "healthy"}
                )
            case "POST", ["drain"]:
                found["status"] = "draining"
                return web.json_response({"message": "node set to draining"})
            case "POST", ["resume"]:
                found["status"] = "healthy"
                return web.json_response({"message": "node resumed"})
            case "POST", ["replace"]:
                return web.json_response({"message": "the next machine becomes this node"})
            case "GET", ["labels"]:
                return web.json_response(found.get("labels", {}))
            case "PATCH", ["labels"]:
                found.setdefault("labels", {}).update(body)
                return web.json_response(found["labels"])
            case "DELETE", ["labels", key]:
                found.get("labels", {}).pop(key.replace("%2F", "/"), None)
                return web.Response(status=204)
            case "PUT", ["vram-budget"]:
                return web.json_response({"vram_budget": body["value"]})
            case "PUT", ["max-replicas-per-model"]:
                return web.json_response({"max_replicas_per_model": body["value"]})
            case "DELETE", ["vram-budget" | "max-replicas-per-model"]:
                return web.json_response({"reset": True})
            case _:
                return refused(405, "not allowed", "http_error")


@contextmanager
def scripted_fleet(tls: ssl.SSLContext | None = None, *, bound: socket.socket | None = None) -> Iterator[ScriptedFleet]:
    """`bound`: where it listens from now on."""
    fleet = ScriptedFleet()
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        # A web.Application would decode the path before we see it; the bare server hands it over as it came.
        server = fleet.server = web.Server(fleet.handle, access_log=None)
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        door = bound or socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, door, ssl_context=tls).start()
        port = runner.addresses[0][1]
        fleet.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        started.set()
        await stop.wait()
        fleet.closing.set()
        # Somebody may have been let in this very moment: asyncio loses them when the server closes before they sit.
        asyncio.get_running_loop().remove_reader(door)
        await asyncio.sleep(0)
        left = [connection.transport for connection in server.connections]
        await runner.cleanup()
        for transport in left:
            if transport is not None:
                abort(transport)  # also where somebody no longer reads what was still to be sent

    # `run` turns the loop once more at the end: connections that were closed last are really closed then.
    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="scripted fleet")
    thread.start()
    try:
        assert started.wait(60)
        yield fleet
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(60)
