"""Sounds made, changed and recognised, and speech in pieces: by the mock behind a worker's ingress."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import grpc
import pytest

from corral.contract import backend_pb2 as pb
from tests.integration.inference.conftest import Serve
from tests.integration.inference.media_requests import left_behind, post, send_form
from tests.integration.inference.scripted_backend import Abort, scripted
from tests.support.waiting import until

SOUND = "/v1/sound-generation"
TRANSFORM = "/v1/audio/transformations"
SPEECH = "/v1/audio/speech"


def samples_of(content: bytes) -> bytes:
    with wave.open(io.BytesIO(content)) as sound:
        return bytes(sound.readframes(sound.getnframes()))


def request_of(content: bytes) -> Any:
    return json.loads(samples_of(content).rstrip(b"\0"))


async def test_a_sound_from_text(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    body = {
        "model_id": "m",
        "text": "rain",
        "duration_seconds": 1.5,
        "prompt_influence": 0.5,
        "do_sample": False,
        "lyrics": "la",
        "bpm": 90,
        "vocal_language": "it",
        "instrumental": True,
    }
    status, content = await post(mock, SOUND, json=body)
    assert status == 200, content
    assert request_of(content) == {
        "text": "rain",
        "duration": 1.5,
        "temperature": 0.5,
        "sample": False,
        "lyrics": "la",
        "bpm": 90,
        "language": "it",
        "instrumental": True,
    }
    status, content = await post(mock, SOUND, json={"text": "rain", "response_format": "pcm"})
    assert json.loads(content.rstrip(b"\0")) == {"text": "rain"}, "what was not asked is not set"
    for wrong, status, param in (
        ({}, 400, "text"),
        ({"text": "x", "duration_seconds": 0}, 400, "duration_seconds"),
        ({"text": "x", "bpm": "fast"}, 400, "bpm"),
        ({"text": "x", "response_format": "mp3"}, 400, "response_format"),
        ({"text": "x", "response_format": "doc"}, 400, "response_format"),
        ({"text": "[[refuses=no drums]] x"}, 500, None),
        ({"text": "[[no_file]] x"}, 502, None),
    ):
        found, answer = await post(mock, SOUND, json=wrong)
        assert (found, answer["error"]["param"]) == (status, param), answer
    assert left_behind(tmp_path) == []


async def test_audio_is_transformed(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    status, content = await send_form(mock, TRANSFORM, {"audio": b"1234", "reference": b"r"})
    assert (status, samples_of(content)) == (200, b"4321")
    status, answer = await send_form(
        mock, TRANSFORM, {"audio": b"1234"}, response_format="b64_json", **{"params[stems]": "2"}
    )
    assert status == 200, answer
    assert (answer["sample_rate"], answer["reference_provided"]) == (8000, False)
    assert answer["stems"] == ["stem0", "stem1"]
    assert [samples_of(base64.b64decode(each["b64_json"])) for each in answer["data"]] == [b"stem 0", b"stem 1"]
    encoded = base64.b64encode(b"1234").decode()
    status, answer = await post(mock, TRANSFORM, json={"audio": encoded, "response_format": "b64_json"})
    assert [samples_of(base64.b64decode(each["b64_json"])) for each in answer["data"]] == [b"4321"]
    for files, fields, found, words in (
        ({"sound": b"1234"}, {}, 400, "audio is missing"),
        ({"audio": b"1234"}, {"sample_rate": "48000"}, 400, "not resampled"),
        ({"audio": b"1234"}, {"params[path]": "/etc/passwd"}, 400, "params must be words"),
        ({"audio": b"1234"}, {"params[faults]": "[[no_file]]"}, 502, "wrote no file"),
    ):
        status, answer = await send_form(mock, TRANSFORM, files, **fields)
        assert (status, words in answer["error"]["message"]) == (found, True), answer
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("path", ["/etc/hostname", "{folder}/../other/x.wav", "{folder}/", "{folder}/.."])
async def test_a_stem_elsewhere_is_not_read(tmp_path: Path, path: str) -> None:
    async with scripted(tmp_path) as backend:

        def transform() -> pb.AudioTransformResult:
            dst = Path(backend.script.last("AudioTransform").dst)
            dst.write_bytes(b"RIFF")
            stem = pb.AudioTransformStem(name="x", dst=path.format(folder=dst.parent))
            return pb.AudioTransformResult(dst=str(dst), stems=[stem])

        backend.script.says["AudioTransform"] = transform
        status, answer = await backend.ask(TRANSFORM, {"audio": "aGk=", "response_format": "b64_json"})
        assert (status, "another folder" in answer["error"]["message"]) == (502, True)
        assert left_behind(tmp_path) == []


async def test_sounds_are_recognised(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    status, answer = await send_form(mock, "/v1/audio/classification", {"file": b"aaab"}, top_k="1")
    assert (status, answer) == (
        200,
        {"model": "m", "detections": [{"index": 97, "label": "a", "score": 0.75}]},
    )
    status, answer = await send_form(mock, "/v1/audio/classification", {"file": b"aaab"}, threshold="0.9")
    assert answer["detections"] == []
    status, answer = await send_form(mock, "/v1/audio/classification", {"file": b"x"}, top_k="many")
    assert (status, answer["error"]["param"]) == (400, "top_k")
    assert left_behind(tmp_path) == []


def events_of(content: bytes) -> list[Any]:
    return [json.loads(line.removeprefix(b"data: ")) for line in content.split(b"\n") if line]


async def test_speech_as_events(serve: Serve, tmp_path: Path) -> None:
    """OpenAI's `stream_format: sse`."""
    mock = await serve()
    body = {"input": "good morning", "stream_format": "sse", "response_format": "pcm"}
    status, content = await post(mock, SPEECH, json=body)
    assert status == 200, content
    *deltas, last = events_of(content)
    assert len(deltas) > 1, "in pieces, as the backend sends them"
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(event["audio"]) for event in deltas).rstrip(b"\0") == b"mock says good morning"
    assert last["type"] == "speech.audio.done"
    assert left_behind(tmp_path) == []


async def test_a_voice_to_imitate_is_a_file_of_the_request(tmp_path: Path) -> None:
    async with scripted(tmp_path) as backend:

        def speak() -> pb.Reply:
            voice = Path(backend.script.last("TTSStream").voice)
            return pb.Reply(audio=voice.suffix.encode() + b" " + voice.read_bytes())

        backend.script.says["TTSStream"] = [speak]
        clip = b"OggS a voice"
        voice = f"data:audio/ogg;base64,{base64.b64encode(clip).decode()}"
        body = {"input": "x", "voice": voice, "stream": True, "response_format": "pcm"}
        assert await backend.ask(SPEECH, body) == (200, ".ogg OggS a voice")
        status, answer = await backend.ask(SPEECH, {**body, "voice": "data:audio/ogg;base64,%%"})
        assert (status, answer["error"]["param"]) == (400, "voice")
        assert left_behind(tmp_path) == []


async def test_events_of_a_backend_that_does_not_stream_or_breaks_off(tmp_path: Path) -> None:
    async with scripted(tmp_path) as backend:

        def speak() -> pb.Result:
            Path(backend.script.last("TTS").dst).write_bytes(b"RIFF a whole file")
            return pb.Result(success=True)

        backend.script.says["TTS"] = speak
        delta, done = await backend.events(SPEECH, {"input": "x", "stream_format": "sse"})
        assert (base64.b64decode(delta["audio"]), done["type"]) == (b"RIFF a whole file", "speech.audio.done")
        backend.script.says["TTSStream"] = [pb.Reply(audio=b"12"), Abort(grpc.StatusCode.INTERNAL, "out of breath")]
        *_, broken = await backend.events(SPEECH, {"input": "x", "stream_format": "sse"})
        assert "out of breath" in broken["error"]["message"]
        assert left_behind(tmp_path) == []


async def test_a_client_that_leaves_cancels_the_sound(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    asking = asyncio.ensure_future(post(mock, SOUND, json={"text": "[[hang]] x"}))

    async def state() -> str:
        return str((await mock.ask("/status", method="GET"))[1]["state"])

    async def is_busy() -> bool:
        return await state() == "busy"

    async def is_ready() -> bool:
        return await state() == "ready"

    await until(is_busy, "the call has begun")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(is_ready, "the backend is free again")
    await until(lambda: left_behind(tmp_path) == [], "the request's files removed")
