"""`/v1/audio/speech` over TTS and TTSStream: from text to an audio file.

The audio is not converted: nearly all backends write WAV; the first bytes tell the format.
"""

from __future__ import annotations

import asyncio
import base64
import os
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import NamedTuple

import msgspec

from corral.contract import backend_pb2 as pb
from corral.contract.http import Headers, Request, Responder, UpstreamFailed
from corral.contract.sources import is_safe_path
from corral.inference.api_errors import ApiError, StreamBroken, invalid_field
from corral.inference.backend_process import BackendProcess
from corral.inference.grpc.client import BackendClient
from corral.inference.openai.completion_format import event
from corral.inference.openai.json_body import JsonBody
from corral.inference.openai.media_body import MediaBody, read_json
from corral.inference.request_files import RequestFiles
from corral.inference.result_files import ResultFile, call_for_file, send_file
from corral.inference.routes.completions import EVENTS

SAMPLE_RATE = 16_000
SPEECH = "speech.wav"
_EVENT_BYTES = 48 * 1024
_CONTENT_TYPES = {
    "wav": b"audio/wav",
    "mp3": b"audio/mpeg",
    "opus": b"audio/ogg",
    "flac": b"audio/flac",
    "pcm": b"audio/pcm",
}


async def create_speech(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    body = await read_json(request)
    order = tts_request(client.process, body)
    wanted = audio_response_format(body.text("response_format"))
    delivery = _Delivery.read(body, wanted)
    async with files.open() as folder:
        if _is_clip(order.voice):
            order.voice = await MediaBody(body, folder).required_file("voice")
        if delivery is not None and await _stream(client, order, responder, delivery):
            return 200
        made = await call_for_file(client, "TTS", order, folder, SPEECH)
        if delivery is not None and delivery.events:
            await responder.stream(200, EVENTS, _events(_samples(made, delivery)))
        else:
            await send_audio(responder, made, wanted)
    return 200


class _Delivery(NamedTuple):
    """How speech is streamed."""

    header: bool  # begins with the header of a WAV file
    events: bool  # as OpenAI's events, each with a piece of audio

    @classmethod
    def read(cls, body: JsonBody, wanted: str) -> _Delivery | None:
        """None: not streamed. Raises ApiError."""
        form = body.text("stream_format", "audio")
        if form not in ("audio", "sse"):
            raise invalid_field("stream_format", "stream_format must be audio or sse.")
        if not body.flag("stream") and form == "audio":
            return None
        if wanted not in ("", "wav", "pcm"):
            raise invalid_field("response_format", "A stream of speech is wav or pcm.")
        return cls(header=wanted != "pcm", events=form == "sse")


def _is_clip(voice: str) -> bool:
    """A recording of a voice to imitate, as a data URL."""
    return voice.startswith("data:")


def audio_response_format(wanted: str) -> str:
    if wanted and wanted not in _CONTENT_TYPES:
        raise invalid_field("response_format", f"response_format must be one of {', '.join(_CONTENT_TYPES)}.")
    return wanted


def tts_request(process: BackendProcess, body: JsonBody) -> pb.TTSRequest:
    """The request without the output path. Raises ApiError."""
    text = body.text("input")
    if not text:
        raise invalid_field("input", "input must be a text.")
    own = process.setting("tts", "voice")
    voice = body.text("voice")
    if not _is_clip(voice) and (voice.startswith(("/", "\\")) or ".." in voice):
        # A path would let a client read files of this machine.
        raise invalid_field("voice", "voice must be a name, or a recording as a data URL.")
    request = pb.TTSRequest(
        text=text,
        model=process.model_file or process.identity,
        voice=voice or (_own_voice(own, process.models_folder) if isinstance(own, str) else ""),
        ModelIdentity=process.identity,
    )
    if language := body.text("language"):
        request.language = language
    if instructions := body.text("instructions"):
        request.instructions = instructions
    if (speed := body.number("speed")) is not None:
        request.params["speed"] = f"{speed:g}"
    request.params.update(read_params(body))
    return request


def read_params(body: JsonBody) -> dict[str, str]:
    params = {key: _word(value) for key, value in body.mapping("params").items()}
    if any(value is None or "/" in value or "\\" in value for value in params.values()):
        raise invalid_field("params", "params must be words, numbers, true or false.")  # no paths
    return {key: value for key, value in params.items() if value is not None}


def _word(value: object) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else None


def _own_voice(voice: str, folder: str) -> str:
    """The definition may name an audio file in the models folder."""
    path = os.path.join(folder, voice) if folder and is_safe_path(voice) else ""
    return path if path and os.path.isfile(path) else voice


async def send_audio(responder: Responder, file: ResultFile, wanted: str) -> None:
    """Audio as the backend wrote it. `wanted`: the format that the client named, or empty."""
    found, skipped = audio_format(file.beginning), 0
    if wanted == "pcm" and found == "wav":
        with file.path.open("rb") as source:
            skipped = samples_offset(await asyncio.to_thread(source.read, 4096))
    elif wanted and wanted != found:
        raise invalid_field("response_format", f"This backend writes {found}: request that format.")
    await send_file(responder, file.path, _headers(wanted or found), skip=skipped)


def audio_format(beginning: bytes) -> str:
    if beginning.startswith(b"RIFF"):
        return "wav"
    if beginning.startswith(b"OggS"):
        return "opus"
    if beginning.startswith(b"fLaC"):
        return "flac"
    if beginning.startswith(b"ID3") or (beginning[:1] == b"\xff" and beginning[1:2] >= b"\xe0"):
        return "mp3"
    return "wav"  # the documented format of TTS


def samples_offset(beginning: bytes) -> int:
    """The offset of the samples in a WAV file."""
    at = 12
    while at + 8 <= len(beginning):
        name, size = beginning[at : at + 4], int(struct.unpack_from("<I", beginning, at + 4)[0])
        if name == b"data":
            return at + 8
        at += 8 + size + size % 2
    raise ApiError(502, "The backend wrote a WAV without samples.", code="backend_failed")


def _headers(kind: str) -> Headers:
    return ((b"content-type", _CONTENT_TYPES[kind]),)


async def _stream(client: BackendClient, order: pb.TTSRequest, responder: Responder, delivery: _Delivery) -> bool:
    """False if the backend does not stream; the caller then requests the whole file."""
    async with AsyncExitStack() as stack:
        replies = await client.enter_stream(stack, "TTSStream", order)
        if replies is None:
            return False
        audio = _audio(replies, delivery.header)
        if delivery.events:
            await responder.stream(200, EVENTS, _events(audio))
        else:
            await responder.stream(200, _headers("wav" if delivery.header else "pcm"), _cut_when_broken(audio))
    return True


async def _audio(replies: AsyncIterator[pb.Reply], header: bool) -> AsyncGenerator[bytes, None]:
    """The first reply contains the sample rate; without one it is audio at the default rate."""
    begun = not header
    async for reply in replies:
        if not begun:
            begun = True
            yield wav_header(sample_rate(reply.message))
        if reply.audio:
            yield reply.audio


async def _samples(made: ResultFile, delivery: _Delivery) -> AsyncGenerator[bytes, None]:
    """A whole file, for a backend that does not stream."""
    content = await asyncio.to_thread(made.path.read_bytes)
    skipped = 0 if delivery.header or audio_format(content) != "wav" else samples_offset(content[:4096])
    for at in range(skipped, len(content), _EVENT_BYTES):
        yield content[at : at + _EVENT_BYTES]


async def _cut_when_broken(audio: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(audio):
        try:
            async for piece in audio:
                yield piece
        except (ApiError, UpstreamFailed) as failure:
            # A stream of samples cannot contain an error: the connection is cut, so that the client does not take it
            # as complete.
            raise StreamBroken(f"speech broke off: {failure}") from failure


async def _events(audio: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(audio):
        try:
            async for piece in audio:
                yield event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
        except (ApiError, UpstreamFailed) as failure:
            broken = failure if isinstance(failure, ApiError) else ApiError(502, str(failure), code="upstream_failed")
            yield b"data: %b\n\n" % broken.body
            return
    usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}  # backends report none
    yield event({"type": "speech.audio.done", "usage": usage})


def sample_rate(message: bytes) -> int:
    try:
        params = msgspec.json.decode(message) if message else {}
    except msgspec.DecodeError:
        return SAMPLE_RATE
    rate = params.get("sample_rate") if isinstance(params, dict) else None
    return rate if isinstance(rate, int) and 0 < rate < 2**31 else SAMPLE_RATE


def wav_header(rate: int) -> bytes:
    """Mono, 16 bits, unknown length."""
    unknown = 0xFFFFFFFF
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", unknown, b"WAVE") + form + struct.pack("<4sI", b"data", unknown)
