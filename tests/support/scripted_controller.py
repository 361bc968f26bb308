"""A controller's node API played by a script, exact to docs/reference/wire/nodes.md.

It runs in the test's own loop, can go away and come back on the same port, and can be told to answer nonsense. What it
answers is written down by hand, in the wire's literal words, so a mistake in our shapes shows.
"""

from __future__ import annotations

import json
import secrets
import ssl
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from aiohttp import web

from corral.kit.signing import Signer
from tests.support.certificates import TestCa
from tests.support.nats import NatsServer
from tests.support.processes import free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class JoinToken:
    uses: int = 1
    pre_approved: bool = True
    refusal: str = ""  # said instead of letting anybody in


@dataclass
class KnownNode:
    id: str
    name: str
    enrolment: str
    token: str
    status: str
    registrations: list[dict[str, Any]] = field(default_factory=list)
    beats: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0

    @property
    def boot_ids(self) -> list[str]:
        return [each["boot_id"] for each in self.registrations]


class ScriptedController:
    def __init__(self, bus: NatsServer | None = None, *, ca: TestCa | None = None, localai: bool = False) -> None:
        self.bus = bus
        self.bus_url = bus.url if bus is not None else "nats://127.0.0.1:1"
        self.ca = ca
        self.localai = localai
        self.shared_token = "s3cret"  # of a LocalAI controller
        self.auto_approve = True
        self.credential_life_s = 3600.0
        self.skew_s = 0.0
        self.signer = Signer(Signer.new_private_key())
        self.tokens: dict[str, JoinToken] = {}
        self.nodes: dict[str, KnownNode] = {}
        self.deleted: dict[str, KnownNode] = {}
        self.calls: list[str] = []  # "POST heartbeat", in order
        self.credentials_given = 0
        self.certificate_life = timedelta(days=30)
        self.port = free_port()
        self.before: Callable[[str], None] = lambda call: None  # told of each call before it is carried out
        self.after: Callable[[str], None] = lambda call: None  # and after, before its answer is sent
        self._nonsense: deque[tuple[str, web.Response | None]] = deque()
        self._runner: web.AppRunner | None = None
        self._ssl: ssl.SSLContext | None = None

    # The script's strings.

    def token(self, **options: Any) -> str:
        secret = "cj_" + secrets.token_hex(16)
        self.tokens[secret] = JoinToken(**options)
        return secret

    def answer_next(self, call: str, status: int, body: bytes | str = b"") -> None:
        """The next such call (`register`, `heartbeat`, …) is answered so, instead of as it should be."""
        raw = body.encode() if isinstance(body, str) else body
        self._nonsense.append((call, web.Response(status=status, body=raw, content_type="application/json")))

    def lose_next_reply(self, call: str) -> None:
        """The next such call is carried out, but the connection breaks before its answer."""
        self._nonsense.append((call, None))

    def approve(self, name: str) -> None:
        self.named(name).status = "healthy"

    def delete(self, name: str) -> None:
        node = self.named(name)
        self.deleted[node.id] = self.nodes.pop(node.id)

    def forget(self, name: str) -> None:
        """As after a restored backup: the node is simply unknown."""
        del self.nodes[self.named(name).id]

    def named(self, name: str) -> KnownNode:
        return next(node for node in self.nodes.values() if node.name == name)

    def knows(self, name: str, status: str = "healthy") -> bool:
        return any(node.name == name and node.status == status for node in self.nodes.values())

    def ingress_token(self, *, aud: str = "*", scope: str = "probe", life_s: float = 600) -> str:
        claims = {"sub": "controller", "aud": aud, "scope": [scope], "exp": int(self.now() + life_s)}
        return self.signer.sign(json.dumps(claims).encode())

    def now(self) -> float:
        return time.time() + self.skew_s

    # Being there, and not.

    @property
    def url(self) -> str:
        return f"{'https' if self._ssl else 'http'}://127.0.0.1:{self.port}"

    def use_tls(self, context: ssl.SSLContext) -> None:
        self._ssl = context

    async def __aenter__(self) -> ScriptedController:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application(middlewares=[self._noting])
        app.add_routes(
            [
                web.get("/ca.pem", self._ca_pem),
                web.post("/api/node/register", self._register),
                web.post("/api/node/{id}/credentials", self._credentials),
                web.post("/api/node/{id}/heartbeat", self._heartbeat),
                web.post("/api/node/{id}/drain", self._drain),
                web.post("/api/node/{id}/deregister", self._deregister),
                web.get("/api/node/{id}/models", self._models),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._ssl).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # The contract.

    @web.middleware
    async def _noting(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        call = request.path.rpartition("/")[2]
        self.calls.append(f"{request.method} {call}")
        self.before(call)
        if self._nonsense and self._nonsense[0][0] == call:
            _, instead = self._nonsense.popleft()
            if instead is not None:
                return instead
            answer = await handler(request)
            assert request.transport is not None
            request.transport.abort()
            return answer
        answer = await handler(request)
        self.after(call)
        return answer

    async def _ca_pem(self, _request: web.Request) -> web.Response:
        return web.Response(text=self.ca.pem) if self.ca is not None else web.Response(status=404)

    async def _register(self, request: web.Request) -> web.Response:
        body = await request.json()
        bearer = _bearer(request)
        if body.get("token") != bearer:
            return web.json_response({"error": "registration token required"}, status=401)
        if self.localai:
            return await self._register_as_localai(body, bearer)
        node = next((each for each in self.nodes.values() if each.name == body["name"]), None)
        if node is not None and not _proves(node, body, bearer):
            return _error(409, f"the name {node.name} is taken: run `corral nodes replace {node.name}`")
        told = ""
        if node is None:
            if any(_proves(grave, body, bearer) for grave in self.deleted.values()):
                return _error(410, "the node was deleted")
            token = self.tokens.get(bearer)
            if token is None or token.refusal or token.uses < 1:
                return _error(401, _why_not(token))
            token.uses -= 1
            told = "cn_" + secrets.token_hex(16)
            status = "healthy" if token.pre_approved else "pending"
            node = KnownNode(str(uuid.uuid4()), body["name"], body["enrolment"], told, status)
            self.nodes[node.id] = node
        elif bearer != node.token:
            node.token = told = "cn_" + secrets.token_hex(16)
        if node.status == "offline":
            node.status = "healthy"
        node.registrations.append(body)
        csr = (body.get("ingress") or {}).get("csr", "")
        return web.json_response(self._registered(node, csr=csr, node_token=told), status=201)

    async def _register_as_localai(self, body: dict[str, Any], bearer: str) -> web.Response:
        if bearer != self.shared_token:
            return web.json_response({"error": "invalid registration token"}, status=401)
        if not body.get("address"):
            return _error(400, "address is required for backend nodes")
        node = next((each for each in self.nodes.values() if each.name == body["name"]), None)
        if node is None:
            status = "healthy" if self.auto_approve else "pending"
            node = KnownNode(str(uuid.uuid4()), body["name"], "", self.shared_token, status)
            self.nodes[node.id] = node
        node.registrations.append(body)
        reply = {"id": node.id, "name": node.name, "node_type": "backend", "status": node.status, "created_at": ""}
        if self.bus is not None and node.status != "pending":
            user = self.bus.node(node.id, ttl_s=self.credential_life_s, localai=True)
            reply |= {"nats_jwt": user.jwt, "nats_user_seed": user.seed}
        return web.json_response(reply, status=201)

    async def _credentials(self, request: web.Request) -> web.Response:
        node = self._authenticated(request)
        if isinstance(node, web.Response):
            return node
        self.credentials_given += 1
        csr = (await request.json()).get("csr", "")
        return web.json_response(self._registered(node, csr=csr))

    async def _heartbeat(self, request: web.Request) -> web.Response:
        node = self._authenticated(request)
        if isinstance(node, web.Response):
            return node
        node.beats.append(await request.json())
        if self.localai:
            return web.json_response({"message": "heartbeat received"})
        return web.json_response({"message": "heartbeat received", "status": node.status, "server_time": self.now()})

    async def _drain(self, request: web.Request) -> web.Response:
        node = self._authenticated(request)
        if isinstance(node, web.Response):
            return node
        node.status = "draining"
        return web.json_response({"message": "node set to draining"})

    async def _deregister(self, request: web.Request) -> web.Response:
        node = self._authenticated(request)
        if isinstance(node, web.Response):
            return node
        node.status = "offline"
        return web.json_response({"message": "node set to offline"})

    async def _models(self, request: web.Request) -> web.Response:
        node = self._authenticated(request)
        if isinstance(node, web.Response):
            return node
        row = {"id": 1, "node_id": node.id, "model_name": "m", "state": "loaded", "in_flight": node.in_flight}
        return web.json_response([row] if node.in_flight else None)

    def _authenticated(self, request: web.Request) -> KnownNode | web.Response:
        node_id, bearer = request.match_info["id"], _bearer(request)
        if node_id in self.deleted:
            return _error(410, "the node was deleted")
        node = self.nodes.get(node_id)
        if node is None:
            return _error(404, f"there is no node {node_id}")
        return node if bearer == node.token else _error(401, "this token does not belong to the node")

    def _registered(self, node: KnownNode, *, csr: str = "", node_token: str = "") -> dict[str, Any]:
        reply: dict[str, Any] = {
            "id": node.id,
            "name": node.name,
            "node_type": "backend",
            "status": node.status,
            "protocol": 1,
            "server_time": self.now(),
            "signing_key": self.signer.public_key,
            "unknown_field": {"of": ["a", "newer", "controller"]},
        }
        if node_token:
            reply["node_token"] = node_token
        if node.status == "pending":
            return reply
        reply["bus"] = {"urls": [self.bus_url]}
        if self.bus is not None:
            user = self.bus.node(node.id, ttl_s=self.credential_life_s)
            reply["bus"]["inbox"] = user.inbox
            reply |= {"nats_jwt": user.jwt, "nats_user_seed": user.seed, "expires_in_s": user.expires_in_s}
        if csr and self.ca is not None:
            reply["ingress"] = {"certificate": self.ca.sign(csr, life=self.certificate_life), "ca": self.ca.pem}
        return reply


def _bearer(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _proves(node: KnownNode, body: dict[str, Any], bearer: str) -> bool:
    return bearer == node.token or bool(node.enrolment and body.get("enrolment") == node.enrolment)


def _why_not(token: JoinToken | None) -> str:
    if token is None:
        return "no such token"
    return token.refusal or "the token was already used"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message, "type": "node_error"}}, status=status)
