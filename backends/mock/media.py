"""The mock's RPCs that read and write files: each answers with what it was asked and what it was given.

An image is a real PNG of the size asked for, one grey, with the request as a text inside it; a video, a sound and a 3D
object begin as such files do and hold the request behind that. So a test sees at the other end what arrived here.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from corral.contract import backend_pb2 as pb
from corral.sdk import BadRequest
from corral.sdk.grpc_server import GrpcService


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of(path: str) -> str:
    """Of the file's content: the test that sent it knows it. Empty for no path."""
    return digest(Path(path).read_bytes()) if path else ""


def png(width: int, height: int, text: str) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits of grey
    pixels = zlib.compress((b"\0" + b"\x80" * width) * height)
    said = chunk(b"tEXt", b"Comment\0" + base64.b64encode(text.encode()))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + said + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


class MediaService(GrpcService):
    backend: Any  # the mock, which has `begin`

    async def GenerateImage(self, request: pb.GenerateImageRequest, context: Any) -> pb.Result:
        return await self._write(
            context,
            request.dst,
            request.positive_prompt,
            lambda prompt: png(
                request.width,
                request.height,
                json.dumps(
                    {
                        "prompt": prompt,
                        "negative": request.negative_prompt,
                        "step": request.step,
                        "seed": request.seed,
                        "src": digest_of(request.src),
                        "refs": [digest_of(path) for path in request.ref_images],
                    }
                ),
            ),
        )

    async def UpscaleImage(self, request: pb.UpscaleImageRequest, context: Any) -> pb.Result:
        def larger(_: str) -> bytes:
            content = Path(request.src).read_bytes()
            if not content.startswith(b"\x89PNG"):
                raise BadRequest("the image is no PNG")
            width, height = struct.unpack_from(">II", content, 16)
            return png(width * request.scale, height * request.scale, digest(content))

        return await self._write(context, request.dst, "", larger)

    async def _write(self, context: Any, dst: str, prompt: str, make: Any) -> pb.Result:
        async with self.answering(context):
            faults, text = await self.backend.begin(prompt)
            if faults.refuses:
                return pb.Result(success=False, message=faults.refuses)
            if not faults.no_file:
                await asyncio.to_thread(lambda: Path(dst).write_bytes(make(text)))
        return pb.Result(success=True)
