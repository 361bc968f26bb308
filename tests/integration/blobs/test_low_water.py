"""A chunk over a slow link, in plain and over TLS: the process is woken seldom, and for the last byte."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from corral.blobs.swarm.planner import SourceKind
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.swarm.sources import HttpSource
from corral.blobs.transfer.remote import TransferBroken, open_session
from corral.kit.clock import SystemClock
from tests.support.certificates import TestCa

PIECE = 4096
CONTENT = random.Random(11).randbytes(1 << 20)


async def _token(_is_refused: bool) -> Mapping[str, str]:
    return {}


async def serve_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, sent_bytes: int) -> None:
    """Any number of requests for a range, in small pieces. It closes the connection after so many bytes of a body."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            first, last = map(int, head.lower().partition(b"range: bytes=")[2].partition(b"\r\n")[0].split(b"-"))
            body = CONTENT[first : last + 1]
            writer.write(
                b"HTTP/1.1 206 OK\r\nContent-Range: bytes %d-%d/%d\r\nContent-Length: %d\r\n\r\n"
                % (first, last, len(CONTENT), len(body))
            )
            for at in range(0, min(len(body), sent_bytes), PIECE):
                writer.write(body[at : min(at + PIECE, sent_bytes)])
                await writer.drain()
                await asyncio.sleep(0.001)  # the rate of the link
            if sent_bytes < len(body):
                break
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def slow_source(folder: Path, *, tls: bool, sent_bytes: int = 1 << 30) -> AsyncIterator[HttpSource]:
    ca = TestCa()
    there = ca.server_context(folder) if tls else None
    here = ssl.create_default_context(cadata=ca.pem) if tls else None
    server = await asyncio.start_server(
        lambda reader, writer: serve_slowly(reader, writer, sent_bytes=sent_bytes), "127.0.0.1", 0, ssl=there
    )
    async with server, open_session(inside=True, trust=here) as session:
        url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}/blobs/x"
        limit = RateLimit(0, SystemClock())
        yield HttpSource(session, "peer", SourceKind.PEER, url, _token, limit, stall_s=5.0, trust=here or True)


@pytest.mark.parametrize("tls", [False, True])
async def test_every_byte_comes_and_few_wakes_are_needed(tmp_path: Path, tls: bool) -> None:
    async with slow_source(tmp_path, tls=tls) as source:
        for start, count in ((0, len(CONTENT)), (5, 100_001), (7, 40_000), (0, 1)):  # on one connection
            sizes: list[int] = []
            received = await source.read(start, count, sizes.append)
            assert b"".join(received.pieces) == CONTENT[start : start + count]
            if count == len(CONTENT):
                assert len(sizes) <= count // PIECE // 4


async def test_an_end_is_noticed_at_once(tmp_path: Path) -> None:
    async with slow_source(tmp_path, tls=False, sent_bytes=400_000) as source:
        with pytest.raises(TransferBroken, match=r"closed the connection|the connection broke"):
            await source.read(0, len(CONTENT), lambda _count: None)
