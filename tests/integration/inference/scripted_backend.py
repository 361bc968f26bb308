"""A gRPC server in the test's own process that answers what it is told to, and a bridge in front of it.

For what no well-behaved backend does: texts cut inside a character, calls in pieces, errors of every kind.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import openai

from corral.contract.backend_pb2_grpc import BackendServicer, add_BackendServicer_to_server
from corral.contract.http import Request, Responder
from corral.inference.backend_process import BackendProcess
from corral.inference.bridge import Bridge
from corral.inference.request_files import LocalFiles
from corral.relay import RelayServer
from tests.support.bad_line import Line

Answer = Any  # a message, an error to abort with, or a list of them for a stream


@dataclass
class Abort:
    code: grpc.StatusCode
    words: str = ""


@dataclass
class Script(BackendServicer):
    """`says["Predict"] = pb.Reply(…)`; what is asked is kept in `heard`."""

    says: dict[str, Answer] = field(default_factory=dict)
    heard: list[tuple[str, Any]] = field(default_factory=list)

    def last(self, rpc: str) -> Any:
        return [request for name, request in self.heard if name == rpc][-1]


def _unary(rpc: str) -> Any:
    async def answer(self: Script, request: Any, context: Any) -> Any:
        self.heard.append((rpc, request))
        return await _said(self.says.get(rpc), context)

    return answer


def _stream(rpc: str) -> Any:
    async def answer(self: Script, request: Any, context: Any) -> Any:
        self.heard.append((rpc, request))
        told = self.says.get(rpc)
        for each in told if isinstance(told, list) else [told]:
            yield await _said(each, context)

    return answer


async def _said(told: Answer, context: Any) -> Any:
    if told is None:
        told = Abort(grpc.StatusCode.UNIMPLEMENTED, "Method not implemented!")
    if callable(told):
        told = told()
    if isinstance(told, Abort):
        await context.abort(told.code, told.words)
    return told


for _rpc in ("PredictStream", "AudioTranscriptionStream", "TTSStream"):
    setattr(Script, _rpc, _stream(_rpc))
for _rpc in (
    *("Predict", "Embedding", "Rerank", "TokenizeString", "AudioTranscription", "TTS", "LoadModel", "Status"),
    *("GenerateImage", "GenerateVideo", "SoundGeneration", "AudioTransform", "Depth", "Detect"),
):
    setattr(Script, _rpc, _unary(_rpc))


@dataclass
class Scripted:
    script: Script
    url: str
    client: openai.AsyncOpenAI

    async def ask(self, path: str, body: Any) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.post(self.url + path, json=body) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text[:1] == "{" else text

    async def events(self, path: str, body: Any) -> list[Any]:
        """Each event of a stream, read."""
        status, text = await self.ask(path, body)
        assert status == 200, text
        told = [line.removeprefix("data: ") for line in text.splitlines() if line]
        return [line if line == "[DONE]" else json.loads(line) for line in told]


class _Mounted:
    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    async def handle(self, request: Request, responder: Responder) -> None:
        await self._bridge.handle(request, responder)


@contextlib.asynccontextmanager
async def scripted(folder: Path, *, accepts_after_s: float = 0.0, **served: Any) -> AsyncIterator[Scripted]:
    """`accepts_after_s`: how long a new connection waits until the backend takes it."""
    script = Script()
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add_BackendServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    told: dict[str, Any] = {"model": "m", "backend": "b", "load": '{"Model": "weights"}', **served}
    line = Line(port, accepts_after_s=accepts_after_s)
    await line.up()
    bridge = Bridge(BackendProcess(address=line.host, **told), LocalFiles(folder / "requests"))
    relay = RelayServer(_Mounted(bridge))
    url = f"http://127.0.0.1:{await relay.listen('127.0.0.1', 0)}"
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0)
    try:
        yield Scripted(script, url, client)
    finally:
        await client.close()
        await relay.drain(1.0)
        await bridge.close()
        await server.stop(0)
        await line.close()
