"""Writes the body of a request to a file as it arrives. One block is written and hashed in a thread while the next one
is received, so neither waits for the other, and at most two blocks are in memory."""

from __future__ import annotations

import asyncio

from corral.contract.http import Body, BodyTooLarge
from corral.kit.threads import wait_until_done
from corral.worker.localai.uploads import Upload

BLOCK_BYTES = 1 << 20


async def receive_body(body: Body, upload: Upload, *, expected: int | None = None, limit_bytes: int = 0) -> int:
    """Append the body to the upload and return its length. `expected`: the bytes behind it are not written.
    `limit_bytes`: a longer body raises `BodyTooLarge`; 0: none. The bytes that arrived before an error are written."""
    loop = asyncio.get_running_loop()
    waiting: list[bytes] = []
    got = held = 0
    writing: asyncio.Future[None] | None = None
    try:
        async for piece in body.chunks():
            if expected is not None:
                piece = piece[: expected - got]
            got += len(piece)
            if limit_bytes and got > limit_bytes:
                raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
            waiting.append(piece)
            held += len(piece)
            if held >= BLOCK_BYTES:
                if writing is not None:
                    await asyncio.shield(writing)
                writing = loop.run_in_executor(None, upload.write, waiting)
                waiting, held = [], 0
    finally:
        if writing is not None:
            await wait_until_done(writing)
        if writing is None or writing.exception() is None:
            rest = loop.run_in_executor(None, upload.write, waiting)
            await wait_until_done(rest)
            writing = rest
    writing.result()
    return got
