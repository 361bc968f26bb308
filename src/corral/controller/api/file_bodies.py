"""Files in HTTP bodies: pieces of uploads, and downloads in blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from litestar import Request
from litestar.params import Parameter

from corral.blobs.upload import Uploads, UploadStatus
from corral.contract.installs import UploadView
from corral.controller.files.upload_operations import UploadOperations
from corral.kit.errors import Unavailable

AnyRequest = Request[Any, Any, Any]
MAX_PIECE_BYTES = 32 << 20  # of one call: it is kept in memory until it is whole
PIECE_TIMEOUT_S = 300.0
BLOCK_BYTES = 256 * 1024
Offset = Annotated[int, Parameter(ge=0, description="Position of the first of these bytes in the file")]
Size = Annotated[int, Parameter(ge=1, description="Size of the whole file in bytes")]
OfUpload = Annotated[str, Parameter(max_length=64, description="The operation of the upload, from its POST")]
Sha256 = Annotated[str, Parameter(pattern="^[0-9a-f]{64}$", description="Of the whole file, in hexadecimal digits")]


async def read_piece(request: AnyRequest, uploads: Uploads) -> bytes:
    """The body of the request, when it is its turn. Raises Unavailable."""
    try:
        async with asyncio.timeout(PIECE_TIMEOUT_S), uploads.slots:
            return await request.body()
    except TimeoutError as error:
        raise Unavailable("too many uploads at once, or this one is too slow: send smaller pieces") from error


async def take_piece(
    request: AnyRequest,
    uploads: Uploads,
    upload_operations: UploadOperations,
    operation: str,
    sha256: str,
    offset: int,
    size: int,
) -> UploadView:
    digest = f"sha256:{sha256}"
    async with upload_operations.piece(operation, digest) as on_received:
        status = await uploads.append(digest, offset, size, await read_piece(request, uploads))
        on_received(status)
    return upload_view(status, size)


def upload_view(status: UploadStatus, size: int = 0) -> UploadView:
    return UploadView(
        sha256=status.digest.removeprefix("sha256:"),
        received_bytes=status.received_bytes,
        size_bytes=size or (status.received_bytes if status.complete else 0),
        complete=status.complete,
    )


async def read_blocks(path: Path, offset: int = 0) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        await asyncio.to_thread(file.seek, offset)
        while block := await asyncio.to_thread(file.read, BLOCK_BYTES):
            yield block
    finally:
        file.close()
