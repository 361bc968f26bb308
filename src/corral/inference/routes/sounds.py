"""Sounds: `/v1/sound-generation` over SoundGeneration, `/v1/audio/transformations` over AudioTransform,
`/v1/audio/classification` over SoundDetection. The shapes are LocalAI's."""

from __future__ import annotations

import os
from collections.abc import Sequence

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.contract.http import Request, Responder
from corral.inference.api_errors import JSON, ApiError, invalid_field
from corral.inference.backend_process import BackendProcess
from corral.inference.grpc.client import BackendClient
from corral.inference.openai.json_body import JsonBody
from corral.inference.openai.media_body import read_json, read_media
from corral.inference.request_files import RequestFiles, RequestFolder
from corral.inference.result_files import ResultFile, call_for_file, fetch_result, send_json_with_files
from corral.inference.routes.speech import audio_response_format, read_params, send_audio

MAX_DURATION_S = 3600
MAX_STEMS = 16
_SOUND = "sound.wav"
_TRANSFORMED = "transformed.wav"
_TEXTS = ("caption", "lyrics", "keyscale", "timesignature")
_FLAGS = (("do_sample", "sample"), ("think", "think"), ("instrumental", "instrumental"))


async def generate_sound(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    body = await read_json(request)
    order = sound_request(client.process, body)
    wanted = audio_response_format(body.text("response_format"))
    async with files.open() as folder:
        made = await call_for_file(client, "SoundGeneration", order, folder, _SOUND)
        await send_audio(responder, made, wanted)
    return 200


def sound_request(process: BackendProcess, body: JsonBody) -> pb.SoundGenerationRequest:
    """The request without its output. `src`, a sound to continue, is never set: engines of LocalAI crash on it, so
    LocalAI's own API has no field for it either."""
    text = body.text("text")
    if not text and "caption" not in body and "lyrics" not in body:
        raise invalid_field("text", "text must describe the sound.")
    order = pb.SoundGenerationRequest(
        text=text, model=process.model_file or process.identity, ModelIdentity=process.identity
    )
    if (duration := body.number("duration_seconds")) is not None:
        if not 0 < duration <= MAX_DURATION_S:
            raise invalid_field("duration_seconds", f"duration_seconds must be above 0, at most {MAX_DURATION_S}.")
        order.duration = duration
    if (temperature := body.number("prompt_influence")) is not None:
        order.temperature = temperature
    if (bpm := body.whole("bpm")) is not None:
        order.bpm = bpm
    if language := body.text("language") or body.text("vocal_language"):
        order.language = language
    for name in _TEXTS:
        if name in body:
            setattr(order, name, body.text(name))
    for key, name in _FLAGS:
        if key in body:
            setattr(order, name, body.flag(key))
    return order


async def transform(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("audio", "reference"))
        if body.fields.whole("sample_rate"):
            raise invalid_field("sample_rate", "Audio is not resampled: leave sample_rate out.")
        wanted = body.fields.text("response_format")
        wanted = wanted if wanted == "b64_json" else audio_response_format(wanted)
        order = pb.AudioTransformRequest(
            params=read_params(body.fields),
            audio_path=await body.required_file("audio"),
            reference_path=await body.file("reference"),
            dst=await folder.output_path(_TRANSFORMED),
            ModelIdentity=client.process.identity,
        )
        result = await client.call("AudioTransform", order, pb.AudioTransformResult)
        made = await fetch_result(folder, _TRANSFORMED, "AudioTransform")
        if wanted == "b64_json":
            await _send_stems(responder, folder, order.dst, result, made)
        else:
            await send_audio(responder, made, wanted)
    return 200


async def _send_stems(
    responder: Responder, folder: RequestFolder, dst: str, result: pb.AudioTransformResult, made: ResultFile
) -> None:
    """All outputs of one run, in the order of `stems`; where the backend names none, its only output."""
    names = [stem_file(dst, stem.dst) for stem in result.stems[:MAX_STEMS]]
    outputs = [await fetch_result(folder, name, "AudioTransform") for name in names] or [made]
    answer = {
        "sample_rate": result.sample_rate,
        "samples": result.samples,
        "reference_provided": result.reference_provided,
        "stems": [stem.name for stem in result.stems[:MAX_STEMS]],
    }
    await send_json_with_files(responder, answer, outputs, "b64_json")


def stem_file(dst: str, path: str) -> str:
    """The name of a file beside `dst`. A backend must not make this process read another one."""
    folder, name = os.path.split(path)
    if folder != os.path.dirname(dst) or name in ("", ".", ".."):
        raise ApiError(502, "AudioTransform: the backend wrote a stem to another folder.", code="backend_failed")
    return name


async def classify(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("file",))
        order = pb.SoundDetectionRequest(
            top_k=body.fields.whole("top_k") or 0,
            threshold=body.fields.number("threshold") or 0.0,
            src=await body.required_file("file"),
            ModelIdentity=client.process.identity,
        )
        result = await client.call("SoundDetection", order, pb.SoundDetectionResponse)
    answer = {"model": client.process.model, "detections": _classes(result.detections)}
    await responder.send(200, (JSON,), encode(answer))
    return 200


def _classes(found: Sequence[pb.SoundClass]) -> list[dict[str, object]]:
    return [{"index": each.index, "label": each.label, "score": each.score} for each in found]
