"""`/v1/audio/speech` over TTS and TTSStream: text in, a sound file out, as the backend made it.

Nothing is converted: a backend makes WAV, nearly always, and what it makes is told by its first bytes.
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
from corral.inference.api_errors import BrokenOff, Refused, bad
from corral.inference.backend_process import Served
from corral.inference.grpc.client import Caller
from corral.inference.openai.json_body import Asked
from corral.inference.request_files import Files, Folder

SAMPLE_RATE = 16_000
SPEECH = "speech.wav"
_KINDS = {"wav": b"audio/wav", "mp3": b"audio/mpeg", "opus": b"audio/ogg", "flac": b"audio/flac", "pcm": b"audio/pcm"}
_PIECE_BYTES = 64 * 1024


async def speak(caller: Caller, asked: Asked, responder: Responder, files: Files) -> int:
    request = tts_request(caller.served, asked)
    wanted = asked.text("response_format")
    if wanted and wanted not in _KINDS:
        raise bad("response_format", f"response_format must be one of {', '.join(_KINDS)}.")
    if asked.text("stream_format", "audio") != "audio":
        raise bad("stream_format", "stream_format must be audio.")
    if asked.flag("stream"):
        if wanted not in ("", "wav", "pcm"):
            raise bad("response_format", "A stream of speech is wav or pcm.")
        streamed = await _stream(caller, request, responder, header=wanted != "pcm")
        if streamed:
            return 200
    async with files.open() as folder:
        request.dst = await folder.there(SPEECH)
        result = await caller.ask("TTS", request, pb.Result)
        if not result.success:
            raise Refused(500, f"TTS: {result.message or 'no reason given'}", code="backend_failed")
        await _send_file(responder, folder, wanted)
    return 200


def tts_request(served: Served, asked: Asked) -> pb.TTSRequest:
    """All but where to write. Raises Refused."""
    text = asked.text("input")
    if not text:
        raise bad("input", "input must be a text.")
    own = served.setting("tts", "voice")
    voice = asked.text("voice")
    if voice.startswith(("/", "\\")) or ".." in voice:
        raise bad("voice", "voice must be a name.")  # a path would let a client point at files of this machine
    request = pb.TTSRequest(
        text=text,
        model=served.model_file or served.identity,
        voice=voice or (_own_voice(own, served.models_folder) if isinstance(own, str) else ""),
        ModelIdentity=served.identity,
    )
    if language := asked.text("language"):
        request.language = language
    if instructions := asked.text("instructions"):
        request.instructions = instructions
    if (speed := asked.number("speed")) is not None:
        request.params["speed"] = f"{speed:g}"
    request.params.update(_params(asked))
    return request


def _params(asked: Asked) -> dict[str, str]:
    told = {key: _word(value) for key, value in asked.mapping("params").items()}
    if any(value is None or "/" in value or "\\" in value for value in told.values()):
        raise bad("params", "params must be words, numbers, true or false.")  # no paths, either
    return {key: value for key, value in told.items() if value is not None}


def _word(value: object) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else None


def _own_voice(voice: str, folder: str) -> str:
    """The definition may name a clip that lies with the model."""
    path = os.path.join(folder, voice) if folder and is_safe_path(voice) else ""
    return path if path and os.path.isfile(path) else voice


async def _send_file(responder: Responder, folder: Folder, wanted: str) -> None:
    try:
        path = await folder.fetch(SPEECH)
    except FileNotFoundError as error:
        raise _silent() from error
    with path.open("rb") as file:
        beginning = await asyncio.to_thread(file.read, 64)
        if not beginning:
            raise _silent()
        found = kind_of(beginning)
        skipped = 0
        if wanted == "pcm" and found == "wav":
            file.seek(0)
            skipped = samples_at(await asyncio.to_thread(file.read, 4096))
        elif wanted and wanted != found:
            raise bad("response_format", f"This backend makes {found}; ask for that.")
        file.seek(skipped)

        async def pieces() -> AsyncGenerator[bytes, None]:
            while data := await asyncio.to_thread(file.read, _PIECE_BYTES):
                yield data

        await responder.stream(200, _headers(wanted or found), pieces())


def _silent() -> Refused:
    return Refused(502, "The backend said it spoke, and wrote nothing.", code="backend_failed")


def kind_of(beginning: bytes) -> str:
    if beginning.startswith(b"RIFF"):
        return "wav"
    if beginning.startswith(b"OggS"):
        return "opus"
    if beginning.startswith(b"fLaC"):
        return "flac"
    if beginning.startswith(b"ID3") or (beginning[:1] == b"\xff" and beginning[1:2] >= b"\xe0"):
        return "mp3"
    return "wav"  # the contract's word for what TTS writes


def samples_at(beginning: bytes) -> int:
    """Where the samples of a WAV begin."""
    at = 12
    while at + 8 <= len(beginning):
        name, size = beginning[at : at + 4], int(struct.unpack_from("<I", beginning, at + 4)[0])
        if name == b"data":
            return at + 8
        at += 8 + size + size % 2
    raise Refused(502, "The backend wrote a WAV without samples.", code="backend_failed")


def _headers(kind: str) -> Headers:
    return ((b"content-type", _KINDS[kind]),)


async def _stream(caller: Caller, request: pb.TTSRequest, responder: Responder, *, header: bool) -> bool:
    """False when the backend cannot: then it is asked for the whole."""
    async with AsyncExitStack() as stack:
        try:
            replies = await stack.enter_async_context(caller.stream("TTSStream", request))
        except Refused as refused:
            if refused.status != 501:
                raise
            return False
        await responder.stream(200, _headers("wav" if header else "pcm"), _sound(replies, header))
    return True


async def _sound(replies: AsyncIterator[pb.Reply], header: bool) -> AsyncGenerator[bytes, None]:
    """The first reply tells the rate; one that does not is sound already, at the usual one."""
    begun = not header
    try:
        async for reply in replies:
            if not begun:
                begun = True
                yield wav_header(rate_of(reply.message))
            if reply.audio:
                yield reply.audio
    except (Refused, UpstreamFailed) as failure:
        # There is no way to say it in a stream of samples: the connection is cut, so that nobody takes it for all.
        raise BrokenOff(f"speech broke off: {failure}") from failure


def rate_of(message: bytes) -> int:
    try:
        told = msgspec.json.decode(message) if message else {}
    except msgspec.DecodeError:
        return SAMPLE_RATE
    rate = told.get("sample_rate") if isinstance(told, dict) else None
    return rate if isinstance(rate, int) and 0 < rate < 2**31 else SAMPLE_RATE


def wav_header(rate: int) -> bytes:
    """Mono, 16 bits, of a length nobody knows yet."""
    unknown = 0xFFFFFFFF
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", unknown, b"WAVE") + form + struct.pack("<4sI", b"data", unknown)
