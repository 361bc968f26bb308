"""A backend without an engine, on both protocols: it answers with what it was asked, and misbehaves on request.

    mock.py --addr HOST:PORT                 gRPC
    mock.py --http HOST:PORT --model NAME    OpenAI's HTTP

It says its own version (the file VERSION beside it) at the head of every answer, so that an upgrade can be seen.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from media import RATE, MediaService, wav
from misbehaviour import Misbehaviour, from_environment, from_prompt

from corral.contract import backend_pb2 as pb
from corral.sdk import Backend, Busy, Chat, Model, ToolCall, serve
from corral.sdk.backend import Piece

SPOKEN = b"mock says "  # in place of sound


class Mock(Backend):
    def __init__(self) -> None:
        self.faults = from_environment(os.environ)
        self.version = (Path(__file__).parent / "VERSION").read_text().strip()
        self.leaked: list[bytearray] = []
        self.requests = 0

    async def load(self, model: Model) -> None:
        self.faults = self.faults.but(model.options)
        print(f"loading {model.name or 'nothing'}", flush=True)
        await asyncio.sleep(self.faults.load_delay_s)
        if self.faults.load_fails:
            raise RuntimeError(self.faults.load_fails)
        self.model_name = self.faults.identity

    async def unload(self) -> None:
        self.leaked.clear()

    async def generate(self, chat: Chat) -> AsyncIterator[Piece]:
        asked, said = self.parts(chat)
        faults, text = await self.begin(asked)
        if faults.tool:
            yield ToolCall(faults.tool, '{"said": ')
            yield ToolCall(arguments=json.dumps(text) + "}")
            return
        words = [f"mock {self.version}:", *(f" {word}" for word in text.split())]
        while words and said.startswith(words[0]):
            said = said.removeprefix(words.pop(0))
        for count, word in enumerate(words[: chat.max_tokens or None]):
            if faults.crash_after and count == faults.crash_after:
                os._exit(3)
            if faults.hang_after and count == faults.hang_after:
                await asyncio.Event().wait()
            while count and faults.until_file and not await asyncio.to_thread(os.path.exists, faults.until_file):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(faults.piece_delay_s)
            yield word

    def parts(self, chat: Chat) -> tuple[str, str]:
        """What is asked, and the beginning of the answer that another process gave."""
        if chat.messages:
            *before, last = chat.messages
            return (before[-1].content, last.content) if before and last.role == "assistant" else (last.content, "")
        asked, own, said = chat.prompt.partition(f"mock {self.version}:")
        return asked, own + said

    async def embed(self, text: str) -> Sequence[float]:
        _, text = await self.begin(text)
        return [byte / 255 for byte in hashlib.sha256(text.encode()).digest()[:8]]

    async def tokenize(self, text: str) -> Sequence[int]:
        _, text = await self.begin(text)
        return [len(word) for word in text.split()]

    async def rerank(self, query: str, documents: Sequence[str]) -> Sequence[float]:
        """By the share of the query's words that are in the document."""
        _, query = await self.begin(query)
        wanted = set(query.lower().split())
        return [len(wanted & set(text.lower().split())) / max(1, len(wanted)) for text in documents]

    async def transcribe(self, audio: Path, language: str) -> str:
        """What a WAV from `speak` says is in its samples; of any other file, how long it is."""
        content = await asyncio.to_thread(audio.read_bytes)
        said = content.partition(SPOKEN)[2].rstrip(b"\0").decode(errors="replace")
        _, text = await self.begin(said)
        return text or f"{len(content)} bytes{f' in {language}' if language else ''}"

    async def speak(self, text: str, voice: str) -> bytes:
        _, text = await self.begin(text)
        samples = SPOKEN + (f"{voice}: " if voice else "").encode() + text.encode()
        return wav(samples)

    async def begin(self, text: str) -> tuple[Misbehaviour, str]:
        """What is wrong with this request, and the rest of what it says."""
        said, rest = from_prompt(text)
        faults = self.faults.but(said)
        self.requests += 1
        faults.at_request(self.leaked, self.requests)
        if faults.busy:
            raise Busy("all slots are taken")
        if faults.hang:
            await asyncio.Event().wait()
        await asyncio.sleep(faults.first_delay_s)
        return faults, rest


class MockService(MediaService):
    backend: Mock

    async def LoadModel(self, request: pb.ModelOptions, context: Any) -> pb.Result:
        result = await super().LoadModel(request, context)
        self.identity = self.backend.faults.identity or self.identity
        return result

    async def TTSStream(self, request: pb.TTSRequest, context: Any) -> AsyncIterator[pb.Reply]:
        async with self.answering(context):
            sound = await self.backend.speak(request.text, request.voice)
        yield pb.Reply(message=json.dumps({"sample_rate": RATE}).encode())
        for at in range(44, len(sound), 16):
            yield pb.Reply(audio=sound[at : at + 16])

    async def VAD(self, request: pb.VADRequest, context: Any) -> pb.VADResponse:
        """Somebody speaks where it is louder than a tenth."""
        loud = [at for at, sample in enumerate(request.audio) if abs(sample) > 0.1]
        if not loud:
            return pb.VADResponse()
        return pb.VADResponse(segments=[pb.VADSegment(start=loud[0] / RATE, end=(loud[-1] + 1) / RATE)])

    async def Diarize(self, request: pb.DiarizeRequest, context: Any) -> pb.DiarizeResponse:
        async with self.answering(context):
            text = await self.backend.transcribe(Path(request.dst), request.language)
        segment = pb.DiarizeSegment(start=0.0, end=1.0, speaker="SPEAKER_00", text=text if request.include_text else "")
        return pb.DiarizeResponse(segments=[segment], num_speakers=1, duration=1.0, language=request.language)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(content=" ".join("x" * length for length in request.tokens))

    async def Free(self, request: pb.HealthMessage, context: Any) -> pb.Result:
        if self.backend.faults.free_hangs:
            await asyncio.Event().wait()
        return await super().Free(request, context)


if __name__ == "__main__":
    mock = Mock()
    mock.faults.at_start()
    serve(mock, service=MockService)
