"""The body of a request with media, as JSON or as a form: its fields, and its files as paths on the backend's machine.

In JSON a file is a data URL or plain base64. Nothing is fetched: a URL would make this machine read what a client
names, and a path would let a client read its files.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Collection
from pathlib import Path

from corral.contract.http import BodyTooLarge, Request
from corral.inference.api_errors import ApiError, invalid_field
from corral.inference.openai.forms import MAX_FILES, FormBody, read_form
from corral.inference.openai.json_body import JsonBody
from corral.inference.request_files import RequestFolder
from corral.kit.threads import run_uncancelled

MAX_BODY_BYTES = 64 * 1024 * 1024
_LARGE = 1024 * 1024  # characters of base64 that are decoded in a thread
# How files begin that backends recognise by their extension.
_BEGINNINGS = (
    (b"\x89PNG", ".png"),
    (b"\xff\xd8\xff", ".jpg"),
    (b"GIF8", ".gif"),
    (b"OggS", ".ogg"),
    (b"fLaC", ".flac"),
    (b"ID3", ".mp3"),
    (b"glTF", ".glb"),
)


async def read_json(request: Request) -> JsonBody:
    try:
        return JsonBody.read(await request.body.read(MAX_BODY_BYTES))
    except BodyTooLarge as error:
        words = f"The body is larger than {MAX_BODY_BYTES} bytes."
        raise ApiError(413, words, code="request_too_large") from error


class MediaBody:
    """`fields`: everything but the files."""

    def __init__(self, fields: JsonBody, folder: RequestFolder) -> None:
        self.fields = fields
        self._folder = folder
        self._count = 0

    async def file(self, name: str) -> str:
        """The path of the file on the backend's machine; empty if the request has none. Raises ApiError."""
        return next(iter(await self.files(name, limit=1)), "")

    async def required_file(self, name: str) -> str:
        path = await self.file(name)
        if not path:
            raise missing_file(name)
        return path

    async def files(self, name: str, *, limit: int = MAX_FILES) -> list[str]:
        """The paths of all files of that name, in their order."""
        found = await self.local_files(name, limit=limit)
        return [await self._folder.hand_over(path) for path in found]

    async def local_files(self, name: str, *, limit: int = MAX_FILES) -> list[Path]:
        """The same files on this machine."""
        uploaded = self.fields.uploads.get(name, []) if isinstance(self.fields, FormBody) else []
        if any(not path.stat().st_size for path in uploaded):
            raise invalid_field(name, f"{name} is an empty file.")
        texts = _texts(self.fields, name)
        if len(uploaded) + len(texts) > limit:
            raise invalid_field(name, f"{name} has more than {limit} {'file' if limit == 1 else 'files'}.")
        return [*uploaded, *[await self._write(name, await decode_media(text, name)) for text in texts]]

    async def base64(self, name: str) -> str:
        """The file as base64, for an RPC that takes its content in the message."""
        found = await self.local_files(name, limit=1)
        if not found:
            raise missing_file(name)
        return await asyncio.to_thread(file_as_base64, found[0])

    async def _write(self, name: str, content: bytes) -> Path:
        path = self._folder.here / f"{name}-json-{self._count}{extension_by_content(content)}"
        self._count += 1
        await run_uncancelled(path.write_bytes, content)
        return path


async def read_media(request: Request, folder: RequestFolder, files: Collection[str]) -> MediaBody:
    """`files`: the names of fields that are files."""
    kind = (request.header(b"content-type") or b"").lower()
    if kind.startswith(b"multipart/"):
        return MediaBody(await read_form(request, folder, files=files), folder)
    if kind.startswith((b"image/", b"audio/", b"video/", b"application/octet-stream")):
        words = "The body must be application/json or multipart/form-data, not the file alone."
        raise ApiError(415, words, code="unsupported_media_type")
    return MediaBody(await read_json(request), folder)


def _texts(fields: JsonBody, name: str) -> list[str]:
    """Newer clients of OpenAI wrap the URL of an image: `{"image_url": …}`."""
    value = fields.get(name)
    listed = value if isinstance(value, list) else [value]
    plain = [each["image_url"] if isinstance(each, dict) and "image_url" in each else each for each in listed]
    return fields.texts(name) if isinstance(fields, FormBody) or value is None else JsonBody({name: plain}).texts(name)


def file_as_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def missing_file(name: str) -> ApiError:
    return invalid_field(name, f"{name} is missing: send it as a data URL, as base64, or as a file of a form.")


async def decode_media(text: str, name: str) -> bytes:
    return await asyncio.to_thread(_decode, text, name) if len(text) > _LARGE else _decode(text, name)


def _decode(text: str, name: str) -> bytes:
    if text.lower().startswith(("http://", "https://", "file:")):
        raise invalid_field(name, f"{name}: send a data URL (data:…;base64,…) or base64; URLs and paths are not read.")
    head, comma, payload = text.partition(",") if text.startswith("data:") else ("", "", text)
    if head and (not comma or not head.endswith(";base64")):
        raise invalid_field(name, f"{name}: a data URL must be data:…;base64,….")
    try:
        content = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_field(name, f"{name} is not base64.") from error
    if not content:
        raise invalid_field(name, f"{name} is empty.")
    return content


def extension_by_content(content: bytes) -> str:
    for beginning, extension in _BEGINNINGS:
        if content.startswith(beginning):
            return extension
    if content.startswith(b"RIFF"):
        return {b"WAVE": ".wav", b"WEBP": ".webp"}.get(content[8:12], ".bin")
    return ".mp4" if content[4:8] == b"ftyp" else ".bin"
