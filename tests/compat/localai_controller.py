"""A scripted LocalAI controller, exact to docs/reference/wire/nodes.md, docs/reference/wire/subjects.md and
docs/reference/wire/grpc.md.

Written from the contract, not from our code: the node API over plain HTTP with one shared token, orders over plain NATS
with literal payloads, backends called by gRPC at the address an install answered. It also serves its gallery.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import nats
from aiohttp import web
from nats.aio.client import Client, RawCredentials
from nats.aio.msg import Msg

from corral.contract import backend_pb2 as pb
from corral.contract import backend_pb2_grpc
from tests.support.nats import NatsServer
from tests.support.processes import free_port
from tests.support.waiting import until


class LocalAIController:
    def __init__(self, bus: NatsServer, *, token: str = "s3cret", auto_approve: bool = True) -> None:
        self.bus = bus
        self.token = token
        self.auto_approve = auto_approve
        self.nodes: dict[str, dict[str, Any]] = {}  # by name: id and status
        self.registrations: list[dict[str, Any]] = []
        self.calls: list[str] = []  # last words of paths, in order
        self.beats: list[dict[str, Any]] = []
        self.progress: list[dict[str, Any]] = []
        self.strangers: list[str] = []  # subjects a LocalAI worker never uses
        self.gallery: list[dict[str, Any]] = []
        self.gallery_reads = 0
        self.files: dict[str, bytes] = {}  # what its gallery's entries point to
        self.port = free_port()
        self._runner: web.AppRunner | None = None
        self._nats: Client | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def galleries(self) -> str:
        return json.dumps([{"url": f"{self.url}/index.yaml", "name": "theirs"}])

    async def __aenter__(self) -> LocalAIController:
        app = web.Application()
        app.add_routes(
            [
                web.post("/api/node/register", self._register),
                web.post("/api/node/{id}/heartbeat", self._heartbeat),
                web.post("/api/node/{id}/drain", self._drain),
                web.post("/api/node/{id}/deregister", self._deregister),
                web.get("/api/node/{id}/models", self._models),
                web.get("/index.yaml", self._index),
                web.get("/files/{name}", self._file),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        user = self.bus.service()
        text = f"-----BEGIN NATS USER JWT-----\n{user.jwt}\n------END NATS USER JWT------\n\n"
        text += f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        self._nats = await nats.connect(
            self.bus.url, user_credentials=RawCredentials(text), inbox_prefix=(user.inbox or "_INBOX").encode()
        )
        await self._nats.subscribe("nodes.>", cb=self._overheard)
        await self._nats.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._nats is not None:
            await self._nats.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # The node API.

    def _bearer_fits(self, request: web.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {self.token}"

    async def _register(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self._bearer_fits(request) or body.get("token") != self.token:
            return web.json_response({"error": "registration token required"}, status=401)
        for field in ("name", "address"):
            if not body.get(field):
                error = {"code": 400, "message": f"{field} is required", "type": "node_error"}
                return web.json_response({"error": error}, status=400)
        self.registrations.append(body)
        node = self.nodes.setdefault(body["name"], {"id": str(uuid.uuid4()), "status": "pending"})
        if self.auto_approve or node["status"] != "pending":
            node["status"] = "healthy"
        reply = {"id": node["id"], "name": body["name"], "node_type": "backend", "status": node["status"]}
        reply["created_at"] = "2026-08-22T10:00:00Z"
        if node["status"] != "pending":
            user = self.bus.node(node["id"], localai=True)
            reply |= {"nats_jwt": user.jwt, "nats_user_seed": user.seed}
        return web.json_response(reply, status=201)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self.beats.append(await request.json())
        return self._done(request, "heartbeat received")

    async def _drain(self, request: web.Request) -> web.Response:
        return self._done(request, "node set to draining", "draining")

    async def _deregister(self, request: web.Request) -> web.Response:
        return self._done(request, "node set to offline", "offline")

    async def _models(self, request: web.Request) -> web.Response:
        self.calls.append("models")
        return web.json_response([])

    def _done(self, request: web.Request, message: str, status: str = "") -> web.Response:
        if not self._bearer_fits(request):
            return web.json_response({"error": "invalid registration token"}, status=401)
        self.calls.append(request.path.rpartition("/")[2])
        node = next(node for node in self.nodes.values() if node["id"] == request.match_info["id"])
        node["status"] = status or node["status"]
        return web.json_response({"message": message})

    async def _index(self, _request: web.Request) -> web.Response:
        self.gallery_reads += 1
        return web.Response(text=json.dumps(self.gallery), content_type="application/yaml")

    async def _file(self, request: web.Request) -> web.Response:
        return web.Response(body=self.files[request.match_info["name"]], content_type="application/x-tar")

    # Orders.

    def node_id(self, name: str) -> str:
        return str(self.nodes[name]["id"])

    async def ask(self, node: str, subject: str, payload: object, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Bytes go as they are."""
        assert self._nats is not None
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        answer = await self._nats.request(f"nodes.{self.node_id(node)}.{subject}", raw, timeout=timeout_s)
        told: dict[str, Any] = json.loads(answer.data)
        return told

    async def tell(self, node: str, subject: str, payload: bytes) -> None:
        assert self._nats is not None
        await self._nats.publish(f"nodes.{self.node_id(node)}.{subject}", payload)
        await self._nats.flush()

    async def _overheard(self, message: Msg) -> None:
        words = message.subject.split(".")[2:]
        if words[-1] == "progress":
            self.progress.append(json.loads(message.data))
        elif not message.reply and words[-1] not in ("stop",):
            self.strangers.append(".".join(words))

    # Backends, called where the worker said they are.

    async def health(self, address: str, token: str) -> str:
        """The message of its answer, or the code of its refusal."""
        async with grpc.aio.insecure_channel(address) as channel:
            health = channel.unary_unary(
                "/backend.Backend/Health",
                request_serializer=pb.HealthMessage.SerializeToString,
                response_deserializer=pb.Reply.FromString,
            )
            try:
                reply = await health(pb.HealthMessage(), metadata=_token(token), timeout=30)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return str(reply.message.decode())

    async def load_and_predict(self, address: str, model: str, prompt: str) -> str:
        """Loading is a gRPC call to the process, never a bus message."""
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = backend_pb2_grpc.BackendStub(channel)
            loaded = await stub.LoadModel(pb.ModelOptions(Model=model), metadata=_token(self.token), timeout=30)
            assert loaded.success, loaded.message
            asked = pb.PredictOptions(Prompt=prompt)
            reply = await stub.Predict(asked, metadata=_token(self.token), timeout=30)
            return str(reply.message.decode())

    async def load_file(self, address: str, model: str, path: str, models_folder: str) -> None:
        """Load a model whose file was staged: the field has the path on the worker."""
        async with self._backend(address) as stub:
            options = pb.ModelOptions(Model=model, ModelFile=path, ModelPath=models_folder)
            loaded = await stub.LoadModel(options, metadata=_token(self.token), timeout=30)
            assert loaded.success, loaded.message

    async def predict(self, address: str, prompt: str) -> str:
        async with self._backend(address) as stub:
            reply = await stub.Predict(pb.PredictOptions(Prompt=prompt), metadata=_token(self.token), timeout=30)
            return str(reply.message.decode())

    async def transcribe(self, address: str, path: str) -> str:
        async with self._backend(address) as stub:
            asked = pb.TranscriptRequest(dst=path)
            return str((await stub.AudioTranscription(asked, metadata=_token(self.token), timeout=30)).text)

    async def speak(self, address: str, text: str, path: str) -> None:
        """The backend writes to the path on the worker."""
        async with self._backend(address) as stub:
            said = await stub.TTS(pb.TTSRequest(text=text, dst=path), metadata=_token(self.token), timeout=30)
            assert said.success, said.message

    @contextlib.asynccontextmanager
    async def _backend(self, address: str) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(address) as channel:
            yield backend_pb2_grpc.BackendStub(channel)

    async def running(self, node: str) -> list[tuple[str, int]]:
        models = (await self.ask(node, "models.running", {}))["models"]
        return sorted((model["model_id"], model["replica_index"]) for model in models)

    async def until_running(self, node: str, expected: list[tuple[str, int]]) -> None:
        async def are_they() -> bool:
            return await self.running(node) == expected

        await until(are_they, f"{expected} running on {node}")


def _token(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()
