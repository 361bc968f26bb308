"""Sends files that a backend wrote for a request: as they are, or as base64 in OpenAI's JSON, in pieces of constant
size. Nothing is converted."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.contract.http import Headers, Responder
from corral.inference.api_errors import JSON, ApiError, StreamBroken, invalid_field
from corral.inference.grpc.client import BackendClient
from corral.inference.request_files import RequestFolder

RESPONSE_FORMATS = ("b64_json", "url")
_BEGINNING_BYTES = 64
_PIECE_BYTES = 96 * 1024  # a multiple of three: base64 of the pieces is base64 of the whole


@dataclass(frozen=True)
class ResultFile:
    path: Path  # on this machine
    beginning: bytes

    @property
    def content_type(self) -> str:
        return content_type_of(self.beginning)


def content_type_of(beginning: bytes) -> str:
    """By the first bytes: backends write their own format, whatever the file's name says."""
    match beginning[:4]:
        case b"\x89PNG":
            return "image/png"
        case b"RIFF":
            return "image/webp" if beginning[8:12] == b"WEBP" else "audio/wav"
        case b"OggS":
            return "audio/ogg"
        case b"fLaC":
            return "audio/flac"
        case b"GIF8":
            return "image/gif"
        case b"glTF":
            return "model/gltf-binary"
        case b"\x1aE\xdf\xa3":
            return "video/webm"
    if beginning[4:8] == b"ftyp":
        return "video/mp4"
    if beginning.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if beginning.startswith(b"ID3") or (beginning[:1] == b"\xff" and beginning[1:2] >= b"\xe0"):
        return "audio/mpeg"
    return "application/octet-stream"


async def call_for_file(client: BackendClient, rpc: str, request: Any, folder: RequestFolder, name: str) -> ResultFile:
    """Call an RPC that answers `Result` and writes to `request.dst`."""
    request.dst = await folder.output_path(name)
    result = await client.call(rpc, request, pb.Result)
    if not result.success:
        raise ApiError(500, f"{rpc}: {result.message or 'no reason given'}", code="backend_failed")
    return await fetch_result(folder, name, rpc)


async def fetch_result(folder: RequestFolder, name: str, rpc: str) -> ResultFile:
    """The file that the backend wrote. Raises ApiError if there is none, or an empty one."""
    try:
        path = await folder.fetch(name)
        beginning = await asyncio.to_thread(_read_beginning, path)
    except FileNotFoundError as error:
        raise _nothing_written(rpc) from error
    if not beginning:
        raise _nothing_written(rpc)
    return ResultFile(path, beginning)


def _nothing_written(rpc: str) -> ApiError:
    return ApiError(502, f"{rpc}: the backend reported success, but wrote no file.", code="backend_failed")


def _read_beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_BEGINNING_BYTES)


async def send_file(responder: Responder, path: Path, headers: Headers, *, skip: int = 0) -> None:
    """Without its first `skip` bytes."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        with path.open("rb") as file:
            file.seek(skip)
            while data := await asyncio.to_thread(file.read, _PIECE_BYTES):
                yield data

    await responder.stream(200, headers, pieces())


def response_format(wanted: str, *, or_file: bool = False) -> str:
    """`or_file`: the answer may be the file itself, `file`."""
    known = (*RESPONSE_FORMATS, "file") if or_file else RESPONSE_FORMATS
    if wanted and wanted not in known:
        raise invalid_field("response_format", f"response_format must be one of {', '.join(known)}.")
    return wanted or "b64_json"


async def send_json_with_files(
    responder: Responder, answer: Mapping[str, Any], files: Sequence[ResultFile], form: str
) -> None:
    """`answer`, and in its field `data` the files: base64, or a data URL where `form` is `url`. Files are removed with
    their request, so there is no other URL."""
    await responder.stream(200, (JSON,), _json_pieces(answer, files, form))


async def _json_pieces(
    answer: Mapping[str, Any], files: Sequence[ResultFile], form: str
) -> AsyncGenerator[bytes, None]:
    yield encode(answer)[:-1] + (b',"data":[' if answer else b'"data":[')
    try:
        for position, file in enumerate(files):
            url = f"data:{file.content_type};base64," if form == "url" else ""
            yield b'%b{"%b":"%b' % (b"," if position else b"", form.encode(), url.encode())
            with file.path.open("rb") as source:
                while data := await asyncio.to_thread(source.read, _PIECE_BYTES):
                    yield base64.b64encode(data)
            yield b'"}'
    except OSError as error:
        raise StreamBroken(f"a result could not be read: {error}") from error
    yield b"]}"
