"""`/v1/videos` over GenerateVideo and `/v1/3d/generations` over Generate3D.

A video is made while its client waits: the answer is OpenAI's object of a completed video, with the file in `data`, as
in LocalAI's answers. There are no jobs to ask for later, because nothing of a request outlives it.
"""

from __future__ import annotations

import random
import time
import uuid
from typing import Any

from corral.contract import backend_pb2 as pb
from corral.contract.http import Request, Responder
from corral.inference.api_errors import ApiError, invalid_field
from corral.inference.backend_process import BackendProcess
from corral.inference.grpc.client import BackendClient
from corral.inference.openai.json_body import JsonBody
from corral.inference.openai.media_body import read_media
from corral.inference.request_files import RequestFiles
from corral.inference.result_files import (
    ResultFile,
    call_for_file,
    response_format,
    send_file,
    send_json_with_files,
)
from corral.inference.routes.images import MAX_SIDE, read_prompts, read_size, read_steps
from corral.inference.routes.speech import read_params

FRAMES_PER_SECOND = 24  # where the request has a duration only
MAX_FRAMES = 10_000
MAX_FPS = 240
_QUALITIES = ("", "auto", "coarse", "512", "1024")
_BACKGROUNDS = ("", "auto", "keep", "black", "white")


async def generate_video(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    began_at = int(time.time())
    async with files.open() as folder:
        body = await read_media(request, folder, ("start_image", "end_image", "audio", "input_reference"))
        form = response_format(body.fields.text("response_format"), or_file=True)
        order = video_request(client.process, body.fields)
        order.start_image = await body.file("start_image") or await body.file("input_reference")
        order.end_image = await body.file("end_image")
        order.audio = await body.file("audio")
        made = await call_for_file(client, "GenerateVideo", order, folder, "video.mp4")
        await _send(responder, video_object(client.process.model, order, began_at), made, form)
        return 200


def video_request(process: BackendProcess, fields: JsonBody) -> pb.GenerateVideoRequest:
    """The request without its files. Raises ApiError."""
    prompt, negative = read_prompts(fields)
    if not prompt:
        raise invalid_field("prompt", "prompt must be a text.")
    width, height = _size(fields)
    frames, fps = _length(fields)
    return pb.GenerateVideoRequest(
        prompt=prompt,
        negative_prompt=negative,
        width=width,
        height=height,
        num_frames=frames,
        fps=fps,
        seed=_seed(fields),
        cfg_scale=_cfg_scale(process, fields),
        step=read_steps(process, fields),
        params=read_params(fields),
        ModelIdentity=process.identity,
    )


def _size(fields: JsonBody) -> tuple[int, int]:
    """0: the backend's own, because each engine was trained for another size."""
    if (size := read_size(fields.text("size"))) is not None:
        return size
    return _between(fields, "width", MAX_SIDE), _between(fields, "height", MAX_SIDE)


def _length(fields: JsonBody) -> tuple[int, int]:
    """The number of frames and their rate; 0: the backend's own. `seconds` is a text in OpenAI's requests."""
    frames, fps = _between(fields, "num_frames", MAX_FRAMES), _between(fields, "fps", MAX_FPS)
    if frames or "seconds" not in fields:
        return frames, fps
    given = fields.get("seconds")
    try:
        seconds = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else 0.0
    except ValueError:
        seconds = 0.0
    fps = fps or FRAMES_PER_SECOND
    if not 0 < seconds * fps <= MAX_FRAMES:
        raise invalid_field("seconds", f"seconds must be a number above 0, and at most {MAX_FRAMES} frames.")
    return max(1, round(seconds * fps)), fps


def _between(fields: JsonBody, key: str, largest: int) -> int:
    value = fields.whole(key)
    if value is not None and not 0 <= value <= largest:
        raise invalid_field(key, f"{key} must be between 0 and {largest}.")
    return value or 0


def _seed(fields: JsonBody) -> int:
    seed = fields.whole("seed")
    return random.getrandbits(31) if seed is None or seed < 0 else seed


def _cfg_scale(process: BackendProcess, fields: JsonBody) -> float:
    own = process.setting("cfg_scale")
    scale = fields.number("cfg_scale")
    return scale if scale is not None else float(own) if type(own) in (int, float) else 0.0


def video_object(model: str, order: pb.GenerateVideoRequest, began_at: int) -> dict[str, Any]:
    return {
        "id": f"video_{uuid.uuid4().hex}",
        "object": "video",
        "created_at": began_at,
        "completed_at": int(time.time()),
        "expires_at": None,
        "model": model,
        "status": "completed",
        "progress": 100,
        "prompt": order.prompt,
        "seconds": f"{order.num_frames / order.fps:g}" if order.num_frames and order.fps else "",
        "size": f"{order.width}x{order.height}" if order.width and order.height else "",
        "error": None,
        "remixed_from_video_id": None,
    }


async def generate_3d(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("image",))
        form = response_format(body.fields.text("response_format"), or_file=True)
        order = object_request(client.process, body.fields)
        order.src = await body.required_file("image")
        made = await call_for_file(client, "Generate3D", order, folder, "object.glb")
        await _send(responder, {"id": uuid.uuid4().hex, "created": int(time.time())}, made, form)
        return 200


def object_request(process: BackendProcess, fields: JsonBody) -> pb.Generate3DRequest:
    """The request without its files. Raises ApiError."""
    quality, background = fields.text("quality"), fields.text("background")
    if quality not in _QUALITIES:
        raise invalid_field("quality", f"quality must be one of {', '.join(_QUALITIES[1:])}.")
    if background not in _BACKGROUNDS:
        raise invalid_field("background", f"background must be one of {', '.join(_BACKGROUNDS[1:])}.")
    return pb.Generate3DRequest(
        seed=fields.whole("seed") or 0,
        step=read_steps(process, fields),
        cfg_scale=_cfg_scale(process, fields),
        texture_steps=_between(fields, "texture_steps", 1000),
        quality=quality,
        background=background,
        params=read_params(fields),
    )


async def _send(responder: Responder, answer: dict[str, Any], made: ResultFile, form: str) -> None:
    if not made.content_type.startswith(("video/", "image/", "model/")):
        raise ApiError(502, "The backend wrote a file that is neither a video nor an object.", code="backend_failed")
    if form == "file":
        await send_file(responder, made.path, ((b"content-type", made.content_type.encode()),))
    else:
        await send_json_with_files(responder, answer, [made], form)
