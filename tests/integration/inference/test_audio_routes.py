"""Transcripts and speech as backends send them that the mock does not stand for."""

from __future__ import annotations

import io
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest

from corral.contract import backend_pb2 as pb
from tests.integration.inference.scripted_backend import Abort, Scripted, scripted

FILE = ("x.ogg", b"sound")


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Scripted]:
    async with scripted(tmp_path, definition={"tts": {"voice": "bob"}, "parameters": {"language": "it"}}) as opened:
        yield opened


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in (folder / "requests").iterdir()]


async def test_a_transcript_as_it_is_heard(backend: Scripted, tmp_path: Path) -> None:
    final = pb.TranscriptResult(text="Buon giorno.")
    backend.script.says["AudioTranscriptionStream"] = [
        pb.TranscriptStreamResponse(delta="Buon "),
        pb.TranscriptStreamResponse(delta="giorno"),
        pb.TranscriptStreamResponse(final_result=final),
    ]
    stream = await backend.client.audio.transcriptions.create(model="m", file=FILE, stream=True, prompt="names: Anna")
    events = [event.model_dump(exclude_none=True) async for event in stream]
    assert [event["type"] for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert events[-1]["text"] == "Buon giorno."
    asked = backend.script.last("AudioTranscriptionStream")
    assert (asked.stream, asked.language, asked.prompt, asked.ModelIdentity) == (True, "it", "names: Anna", "weights")
    assert asked.dst.endswith("/input.ogg")
    assert left_behind(tmp_path) == []


async def test_a_transcript_that_breaks_off(backend: Scripted, tmp_path: Path) -> None:
    backend.script.says["AudioTranscriptionStream"] = [
        pb.TranscriptStreamResponse(delta="Buon "),
        Abort(grpc.StatusCode.INTERNAL, "out of memory"),
    ]
    stream = await backend.client.audio.transcriptions.create(model="m", file=FILE, stream=True)
    heard: list[str] = []

    async def listen() -> None:
        async for event in stream:
            heard.append(event.type)

    with pytest.raises(openai.APIError, match="out of memory"):
        await listen()
    assert heard == ["transcript.text.delta"]
    assert left_behind(tmp_path) == []


async def test_the_backend_reads_what_was_sent(backend: Scripted) -> None:
    def listen() -> pb.TranscriptResult:
        return pb.TranscriptResult(text=Path(backend.script.last("AudioTranscription").dst).read_text())

    backend.script.says["AudioTranscription"] = listen
    answer = await backend.client.audio.transcriptions.create(model="m", file=FILE)
    assert answer.text == "sound"


def speech(rate: int = 22050, frames: bytes = b"\1\0" * 50) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(frames)
    return out.getvalue()


@pytest.mark.parametrize(
    ("written", "asked", "kind", "body"),
    [
        (speech(), {}, "audio/wav", speech()),
        (speech(), {"response_format": "pcm"}, "audio/pcm", b"\1\0" * 50),
        (b"ID3 an mp3", {}, "audio/mpeg", b"ID3 an mp3"),
        (b"ID3 an mp3", {"response_format": "mp3"}, "audio/mpeg", b"ID3 an mp3"),
        (b"OggS opus", {"response_format": "opus"}, "audio/ogg", b"OggS opus"),
    ],
)
async def test_speech_is_what_the_backend_wrote(
    backend: Scripted, tmp_path: Path, written: bytes, asked: Any, kind: str, body: bytes
) -> None:
    def speak() -> pb.Result:
        Path(backend.script.last("TTS").dst).write_bytes(written)
        return pb.Result(success=True)

    backend.script.says["TTS"] = speak
    told = {"input": "ciao", "params": {"warmth": 0.5}, "speed": 2, "instructions": "softly", **asked}
    async with aiohttp.ClientSession() as session, session.post(f"{backend.url}/v1/audio/speech", json=told) as answer:
        assert (answer.status, answer.content_type) == (200, kind), await answer.read()
        assert await answer.read() == body
    heard = backend.script.last("TTS")
    assert (heard.text, heard.voice, heard.instructions, heard.ModelIdentity) == ("ciao", "bob", "softly", "weights")
    assert dict(heard.params) == {"warmth": "0.5", "speed": "2"}
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("result", "status", "words"),
    [
        (pb.Result(success=False, message="no such voice"), 500, "no such voice"),
        (pb.Result(success=True), 502, "wrote no file"),
        (None, 501, "does not implement TTS"),
    ],
)
async def test_speech_that_did_not_come(backend: Scripted, result: Any, status: int, words: str) -> None:
    backend.script.says["TTS"] = result
    found, answer = await backend.ask("/v1/audio/speech", {"input": "x"})
    assert found == status
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("first", "rate"), [([pb.Reply(message=b'{"sample_rate":24000}')], 24000), ([], 16000)], ids=["told", "as in Go"]
)
async def test_streamed_speech_has_a_header(backend: Scripted, first: list[pb.Reply], rate: int) -> None:
    backend.script.says["TTSStream"] = [*first, pb.Reply(audio=b"\1\0"), pb.Reply(audio=b"\2\0")]
    told = {"input": "x", "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{backend.url}/v1/audio/speech", json=told) as answer:
        sound = await answer.read()
    assert sound[:4] == b"RIFF"
    assert int.from_bytes(sound[24:28], "little") == rate
    assert sound[44:] == b"\1\0\2\0"


async def test_streamed_speech_that_breaks_off_is_cut(backend: Scripted) -> None:
    backend.script.says["TTSStream"] = [pb.Reply(audio=b"\1\0"), Abort(grpc.StatusCode.INTERNAL, "gone")]
    told = {"input": "x", "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{backend.url}/v1/audio/speech", json=told) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
