"""Bytes to a port and back, for what no HTTP client would send."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def exchange(port: int, data: bytes) -> bytes:
    """Send, then read until the other side closes."""
    async with connected(port) as (reader, writer), asyncio.timeout(20):
        writer.write(data)
        return await reader.read()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])
