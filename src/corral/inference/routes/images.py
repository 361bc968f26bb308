"""`/v1/images/…`: GenerateImage makes images from text and from images, UpscaleImage enlarges one.

The shapes are OpenAI's, with LocalAI's extra fields (`step`, `seed`, `negative_prompt`, `ref_images`). One call makes
one image; several images of a request are made one after the other, because each needs the engine's whole memory.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.contract.http import Request, Responder
from corral.inference.api_errors import ApiError, invalid_field
from corral.inference.backend_process import BackendProcess
from corral.inference.grpc.client import BackendClient
from corral.inference.openai.json_body import JsonBody
from corral.inference.openai.media_body import file_as_base64, missing_file, read_media
from corral.inference.request_files import RequestFiles, RequestFolder
from corral.inference.result_files import ResultFile, call_for_file, response_format, send_json_with_files
from corral.kit.threads import run_uncancelled

MAX_IMAGES = 10
MAX_SIDE = 8192
MAX_STEPS = 1000
DEFAULT_STEPS = 15  # LocalAI's
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})\Z")
_DEFAULT_SIZE = (512, 512)  # LocalAI's
_FORMATS = ("png", "jpeg", "webp")
_SCALES = (2, 4)


async def generate(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("file", "files", "ref_images"))
        order = image_request(client.process, body.fields)
        sources = [*await body.files("file", limit=1), *await body.files("files")]
        order.src = sources[0] if sources else ""
        order.ref_images.extend([*sources[1:], *await body.files("ref_images")])
        return await _generate(client, order, body.fields, folder, responder)


async def edit(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    return await _from_images(client, request, responder, files, needs_prompt=True, needs_mask=False)


async def vary(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    return await _from_images(client, request, responder, files, needs_prompt=False, needs_mask=False)


async def inpaint(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    return await _from_images(client, request, responder, files, needs_prompt=True, needs_mask=True)


async def _from_images(
    client: BackendClient,
    request: Request,
    responder: Responder,
    files: RequestFiles,
    *,
    needs_prompt: bool,
    needs_mask: bool,
) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("image", "images", "mask"))
        order = image_request(client.process, body.fields, needs_prompt=needs_prompt)
        images = [*await body.local_files("image"), *await body.local_files("images")]
        masks = await body.local_files("mask", limit=1)
        if not images:
            raise missing_file("image")
        if needs_mask and not masks:
            raise missing_file("mask")
        handed = [await folder.hand_over(path) for path in [*images, *masks]]
        # Engines differ: some change `src`, others compose from `ref_images` and take the first as the source.
        order.src = await _masked_source(folder, images[0], masks[0]) if masks else handed[0]
        order.ref_images.extend(handed)
        return await _generate(client, order, body.fields, folder, responder)


async def _masked_source(folder: RequestFolder, image: Path, mask: Path) -> str:
    """LocalAI's convention for inpainting: `src` is a JSON file with the image and its mask."""
    path = folder.here / "inpaint.json"

    def write() -> None:
        path.write_bytes(encode({"image": file_as_base64(image), "mask_image": file_as_base64(mask)}))

    await run_uncancelled(write)
    return await folder.hand_over(path)


async def upscale(client: BackendClient, request: Request, responder: Responder, files: RequestFiles) -> int:
    async with files.open() as folder:
        body = await read_media(request, folder, ("image",))
        scale = body.fields.whole("scale") or _SCALES[0]
        if scale not in _SCALES:
            raise invalid_field("scale", "scale must be 2 or 4.")
        form = response_format(body.fields.text("response_format"))
        order = pb.UpscaleImageRequest(src=await body.required_file("image"), scale=scale)
        made = await call_for_file(client, "UpscaleImage", order, folder, "upscaled.png")
        await send_json_with_files(responder, {"created": int(time.time())}, [made], form)
        return 200


def image_request(process: BackendProcess, fields: JsonBody, *, needs_prompt: bool = True) -> pb.GenerateImageRequest:
    """The request without its files. Raises ApiError."""
    prompt, negative = read_prompts(fields)
    if needs_prompt and not prompt:
        raise invalid_field("prompt", "prompt must be a text.")
    _check_unsupported(fields)
    width, height = read_size(fields.text("size")) or _DEFAULT_SIZE
    seed = fields.whole("seed")
    return pb.GenerateImageRequest(
        width=width,
        height=height,
        step=read_steps(process, fields) or DEFAULT_STEPS,
        seed=random.getrandbits(31) if seed is None or seed < 0 else seed,
        positive_prompt=prompt,
        negative_prompt=negative,
        EnableParameters=_text(process.setting("diffusers", "enable_parameters")),
        CLIPSkip=_count(process.setting("diffusers", "clip_skip")),
        ModelIdentity=process.identity,
    )


def read_prompts(fields: JsonBody) -> tuple[str, str]:
    """The prompt and the negative prompt, which LocalAI's clients also write after a `|` in the prompt."""
    prompt, negative = fields.text("prompt"), fields.text("negative_prompt")
    if not negative:
        prompt, _, negative = prompt.partition("|")
    return prompt.strip(), negative.strip()


def read_size(text: str) -> tuple[int, int] | None:
    """Width and height; None: not given, or `auto`. Raises ApiError."""
    if text in ("", "auto"):
        return None
    found = _SIZE.match(text)
    sides = (int(found[1]), int(found[2])) if found else (0, 0)
    if not all(0 < side <= MAX_SIDE for side in sides):
        raise invalid_field("size", f"size must be WIDTHxHEIGHT, each at most {MAX_SIDE}, for example 512x512.")
    return sides


def read_steps(process: BackendProcess, fields: JsonBody) -> int:
    """0: neither the request nor the definition has a number of steps."""
    key = "step" if "step" in fields else "steps"
    steps = fields.whole(key)
    if steps is None:
        return _count(process.setting("step"))
    if not 0 < steps <= MAX_STEPS:
        raise invalid_field(key, f"{key} must be between 1 and {MAX_STEPS}.")
    return steps


def _check_unsupported(fields: JsonBody) -> None:
    if fields.flag("stream"):
        raise invalid_field("stream", "Images are not streamed: leave stream out.")
    if fields.text("output_format", _FORMATS[0]) not in _FORMATS:
        raise invalid_field("output_format", f"output_format must be one of {', '.join(_FORMATS)}.")
    response_format(fields.text("response_format"))
    _number_of_images(fields)


def _number_of_images(fields: JsonBody) -> int:
    count = fields.whole("n")
    if count is not None and not 0 < count <= MAX_IMAGES:
        raise invalid_field("n", f"n must be between 1 and {MAX_IMAGES}.")
    return count or 1


async def _generate(
    client: BackendClient,
    order: pb.GenerateImageRequest,
    fields: JsonBody,
    folder: RequestFolder,
    responder: Responder,
) -> int:
    made: list[ResultFile] = []
    first_seed = order.seed
    for number in range(_number_of_images(fields)):
        order.seed = (first_seed + number) % 2**31  # equal seeds would make equal images
        made.append(await call_for_file(client, "GenerateImage", order, folder, f"image-{number}.png"))
    _check_format(fields, made)
    answer: dict[str, Any] = {"created": int(time.time()), "size": f"{order.width}x{order.height}"}
    if (written := _format_of(made)) in _FORMATS:
        answer["output_format"] = written
    await send_json_with_files(responder, answer, made, response_format(fields.text("response_format")))
    return 200


def _check_format(fields: JsonBody, made: Sequence[ResultFile]) -> None:
    wanted = fields.text("output_format")
    if wanted and (written := _format_of(made)) != wanted:
        raise invalid_field("output_format", f"This backend writes {written}: request that format.")
    if not all(file.content_type.startswith(("image/", "video/")) for file in made):
        raise ApiError(502, "GenerateImage: the backend wrote a file that is no image.", code="backend_failed")


def _format_of(made: Sequence[ResultFile]) -> str:
    return made[0].content_type.partition("/")[2]


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if type(value) is int and 0 < value <= MAX_STEPS else 0
