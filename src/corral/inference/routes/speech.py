"""`/v1/audio/speech` over TTS and TTSStream: from text to an audio file.

The audio is not converted: nearly all backends write WAV; the first bytes tell the format.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack

import msgspec

from corral.contract import backend_pb2 as pb
from corral.contract.http import Headers, Responder, UpstreamFailed
from corral.contract.sources import is_safe_path
from corral.inference.api_errors import ApiError, StreamBroken, invalid_field
from corral.inference.backend_process import BackendProcess
from corral.inference.grpc.client import BackendClient
from corral.inference.openai.json_body import JsonBody
from corral.inference.request_files import RequestFiles
from corral.inference.result_files import ResultFile, call_for_file, send_file

SAMPLE_RATE = 16_000
SPEECH = "speech.wav"
_CONTENT_TYPES = {
    "wav": b"audio/wav",
    "mp3": b"audio/mpeg",
    "opus": b"audio/ogg",
    "flac": b"audio/flac",
    "pcm": b"audio/pcm",
}


async def create_speech(client: BackendClient, body: JsonBody, responder: Responder, files: RequestFiles) -> int:
    request = tts_request(client.process, body)
    wanted = audio_response_format(body.text("response_format"))
    if body.text("stream_format", "audio") != "audio":
        raise invalid_field("stream_format", "stream_format must be audio.")
    if body.flag("stream"):
        if wanted not in ("", "wav", "pcm"):
            raise invalid_field("response_format", "A stream of speech is wav or pcm.")
        streamed = await _stream(client, request, responder, header=wanted != "pcm")
        if streamed:
            return 200
    async with files.open() as folder:
        await send_audio(responder, await call_for_file(client, "TTS", request, folder, SPEECH), wanted)
    return 200


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
    if voice.startswith(("/", "\\")) or ".." in voice:
        raise invalid_field("voice", "voice must be a name.")  # a path would let a client read files of this machine
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


async def _stream(client: BackendClient, request: pb.TTSRequest, responder: Responder, *, header: bool) -> bool:
    """False if the backend does not stream; the caller then requests the whole file."""
    async with AsyncExitStack() as stack:
        try:
            replies = await stack.enter_async_context(client.stream("TTSStream", request))
        except ApiError as refused:
            if refused.status != 501:
                raise
            return False
        await responder.stream(200, _headers("wav" if header else "pcm"), _audio(replies, header))
    return True


async def _audio(replies: AsyncIterator[pb.Reply], header: bool) -> AsyncGenerator[bytes, None]:
    """The first reply contains the sample rate; without one it is audio at the default rate."""
    begun = not header
    try:
        async for reply in replies:
            if not begun:
                begun = True
                yield wav_header(sample_rate(reply.message))
            if reply.audio:
                yield reply.audio
    except (ApiError, UpstreamFailed) as failure:
        # A stream of samples cannot contain an error: the connection is cut, so that the client does not take it as
        # complete.
        raise StreamBroken(f"speech broke off: {failure}") from failure


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
