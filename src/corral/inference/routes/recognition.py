"""What is in an image or a voice: `/v1/detection`, `/v1/depth`, `/v1/face/…` and `/v1/voice/…`, in LocalAI's shapes.

Images go to the backend as base64 in the message, as LocalAI's own callers send them; recordings of voices are files.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import PurePosixPath
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.contract.http import Request, Responder
from corral.inference.api_errors import JSON, ApiError, invalid_field
from corral.inference.grpc.client import BackendClient
from corral.inference.grpc.predict_options import text_options
from corral.inference.openai.media_body import MediaBody, file_as_base64, read_media
from corral.inference.request_files import RequestFiles, RequestFolder

MAX_COORDINATES = 10_000
MAX_EXPORTED_FILES = 100
EXPORTS = ("glb", "colmap")
_EXPORTED = "exports"
_INCLUDED = ("include_depth", "include_confidence", "include_pose", "include_sky", "include_points")
_MAPS = ("depth", "confidence", "sky", "extrinsics", "intrinsics", "points")


async def detect(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("image",))
        order = pb.DetectOptions(
            prompt=body.fields.text("prompt"),
            points=_coordinates(body, "points", 3),
            boxes=_coordinates(body, "boxes", 4),
            threshold=_threshold(body),
            src=await body.base64("image"),
            ModelIdentity=client.process.identity,
        )
    result = await client.call("Detect", order, pb.DetectResponse)
    return await _send(responder, {"detections": [_detection(each) for each in result.Detections]})


def _detection(found: pb.Detection) -> dict[str, Any]:
    mask = {"mask": base64.b64encode(found.mask).decode()} if found.mask else {}
    return {
        "x": found.x,
        "y": found.y,
        "width": found.width,
        "height": found.height,
        "class_name": found.class_name,
        "confidence": found.confidence,
        **mask,
    }


async def estimate_depth(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("image",))
        order = _depth_request(client, body)
        order.src = await body.base64("image")
        if order.exports:
            order.dst = await folder.output_folder(_EXPORTED)
        result = await client.call("Depth", order, pb.DepthResponse)
        exports = await _exported(folder) if order.exports else []
    answer = await asyncio.to_thread(lambda: encode(_depth(result) | ({"exports": exports} if exports else {})))
    await responder.send(200, (JSON,), answer)
    return 200


def _depth_request(client: BackendClient, body: MediaBody) -> pb.DepthRequest:
    included = {name: body.fields.flag(name) for name in _INCLUDED}
    if not any(included.values()):
        included = {name: name != "include_points" for name in _INCLUDED}  # a point cloud only on request
    exports = body.fields.texts("exports")
    if unknown := [each for each in exports if each not in EXPORTS]:
        raise invalid_field("exports", f"exports: {unknown[0][:40]!r} is neither glb nor colmap.")
    return pb.DepthRequest(
        include_depth=included["include_depth"],
        include_confidence=included["include_confidence"],
        include_pose=included["include_pose"],
        include_sky=included["include_sky"],
        include_points=included["include_points"],
        points_conf_thresh=body.fields.number("points_conf_thresh") or 0.0,
        exports=dict.fromkeys(exports),
        ModelIdentity=client.process.identity,
    )


def _depth(result: pb.DepthResponse) -> dict[str, Any]:
    answer: dict[str, Any] = {"width": result.width, "height": result.height, "is_metric": result.is_metric}
    answer |= {name: list(values) for name in _MAPS if (values := getattr(result, name))}
    if result.num_points:
        answer["num_points"] = result.num_points
    if result.point_colors:
        answer["point_colors"] = base64.b64encode(result.point_colors).decode()
    return answer


async def _exported(folder: RequestFolder) -> list[dict[str, str]]:
    """The files that the backend wrote for `exports`, in place of LocalAI's paths, which mean nothing to a client."""
    names = await folder.list_outputs(_EXPORTED)
    if not names or len(names) > MAX_EXPORTED_FILES:
        what = "no file" if not names else f"more than {MAX_EXPORTED_FILES} files"
        raise ApiError(502, f"Depth: the backend wrote {what} for exports.", code="backend_failed")
    found = []
    for name in names:
        path = await folder.fetch(f"{_EXPORTED}/{name}")
        found.append({"name": str(PurePosixPath(name)), "b64_json": await asyncio.to_thread(file_as_base64, path)})
    return found


async def verify_faces(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("img1", "img2"))
        order = pb.FaceVerifyRequest(
            threshold=_threshold(body),
            anti_spoofing=body.fields.flag("anti_spoofing"),
            img1=await body.base64("img1"),
            img2=await body.base64("img2"),
            ModelIdentity=client.process.identity,
        )
    result = await client.call("FaceVerify", order, pb.FaceVerifyResponse)
    answer = as_json(result)
    return await _send(responder, answer if order.anti_spoofing else _without_liveness(answer))


async def analyze_faces(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("img",))
        order = pb.FaceAnalyzeRequest(
            actions=body.fields.texts("actions"),
            anti_spoofing=body.fields.flag("anti_spoofing"),
            img=await body.base64("img"),
            ModelIdentity=client.process.identity,
        )
    result = await client.call("FaceAnalyze", order, pb.FaceAnalyzeResponse)
    faces = [as_json(face) for face in result.faces]
    return await _send(
        responder, {"faces": faces if order.anti_spoofing else [_without_liveness(face) for face in faces]}
    )


async def embed_face(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("img",))
        options = text_options(client.process)
        options.Images.append(await body.base64("img"))
    result = await client.call("Embedding", options, pb.EmbeddingResult)
    if not result.embeddings:
        raise ApiError(404, "The backend found no face in the image.", code="not_found")
    vector = list(result.embeddings)
    return await _send(responder, {"embedding": vector, "dim": len(vector), "model": client.process.model})


async def verify_voices(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("audio1", "audio2"))
        order = pb.VoiceVerifyRequest(
            threshold=_threshold(body),
            anti_spoofing=body.fields.flag("anti_spoofing"),
            audio1=await body.required_file("audio1"),
            audio2=await body.required_file("audio2"),
            ModelIdentity=client.process.identity,
        )
        result = await client.call("VoiceVerify", order, pb.VoiceVerifyResponse)
    return await _send(responder, as_json(result))


async def analyze_voice(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("audio",))
        order = pb.VoiceAnalyzeRequest(
            actions=body.fields.texts("actions"),
            audio=await body.required_file("audio"),
            ModelIdentity=client.process.identity,
        )
        result = await client.call("VoiceAnalyze", order, pb.VoiceAnalyzeResponse)
    return await _send(responder, {"segments": [as_json(segment) for segment in result.segments]})


async def embed_voice(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("audio",))
        order = pb.VoiceEmbedRequest(audio=await body.required_file("audio"), ModelIdentity=client.process.identity)
        result = await client.call("VoiceEmbed", order, pb.VoiceEmbedResponse)
    vector = list(result.embedding)
    return await _send(responder, {"embedding": vector, "dim": len(vector), "model": result.model})


def as_json(message: Message) -> dict[str, Any]:
    """LocalAI's JSON has the names of the messages."""
    return dict(
        json_format.MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )


def _without_liveness(answer: dict[str, Any]) -> dict[str, Any]:
    """Where liveness was not checked, `false` would read as a forgery."""
    return {key: value for key, value in answer.items() if not key.endswith(("is_real", "antispoof_score"))}


def _threshold(body: MediaBody) -> float:
    """0: the backend's own."""
    return body.fields.number("threshold") or 0.0


def _coordinates(body: MediaBody, key: str, size: int) -> list[float]:
    """Numbers in groups of `size`."""
    given = body.fields.numbers(key)
    if len(given) % size or len(given) > MAX_COORDINATES:
        raise invalid_field(key, f"{key} must be a list of numbers, {size} for each.")
    return given


async def _send(responder: Responder, answer: dict[str, Any]) -> int:
    await responder.send(200, (JSON,), encode(answer))
    return 200
