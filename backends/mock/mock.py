"""A backend without an engine, on both protocols: it answers with what it was asked, and misbehaves on request.

    mock.py --addr HOST:PORT                 gRPC
    mock.py --http HOST:PORT --model NAME    OpenAI's HTTP

It says its own version (the file VERSION beside it) at the head of every answer, so that an upgrade can be seen.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from misbehaviour import from_environment, from_prompt

from corral.contract import backend_pb2 as pb
from corral.sdk import Backend, Busy, Chat, Model, serve
from corral.sdk.grpc_server import GrpcService


class Mock(Backend):
    def __init__(self) -> None:
        self.faults = from_environment(os.environ)
        self.version = (Path(__file__).parent / "VERSION").read_text().strip()
        self.leaked: list[bytearray] = []

    async def load(self, model: Model) -> None:
        self.faults = self.faults.but(model.options)
        print(f"loading {model.name or 'nothing'}", flush=True)
        await asyncio.sleep(self.faults.load_delay_s)
        if self.faults.load_fails:
            raise RuntimeError(self.faults.load_fails)
        self.model_name = self.faults.identity

    async def unload(self) -> None:
        self.leaked.clear()

    async def generate(self, chat: Chat) -> AsyncIterator[str]:
        said, text = from_prompt(chat.text)
        faults = self.faults.but(said)
        faults.at_request(self.leaked)
        if faults.busy:
            raise Busy("all slots are taken")
        words = [f"mock {self.version}:", *text.split()]
        for count, word in enumerate(words[: chat.max_tokens or None]):
            if faults.crash_after and count == faults.crash_after:
                os._exit(3)
            if faults.hang_after and count == faults.hang_after:
                await asyncio.Event().wait()
            await asyncio.sleep(faults.piece_delay_s)
            yield word if count == 0 else f" {word}"

    async def embed(self, text: str) -> Sequence[float]:
        return [byte / 255 for byte in hashlib.sha256(text.encode()).digest()[:8]]

    async def tokenize(self, text: str) -> Sequence[int]:
        return [len(word) for word in text.split()]


class MockService(GrpcService):
    backend: Mock

    async def LoadModel(self, request: pb.ModelOptions, context: Any) -> pb.Result:
        result = await super().LoadModel(request, context)
        self.identity = self.backend.faults.identity or self.identity
        return result

    async def Free(self, request: pb.HealthMessage, context: Any) -> pb.Result:
        if self.backend.faults.free_hangs:
            await asyncio.Event().wait()
        return await super().Free(request, context)


if __name__ == "__main__":
    mock = Mock()
    mock.faults.at_start()
    serve(mock, service=MockService)
