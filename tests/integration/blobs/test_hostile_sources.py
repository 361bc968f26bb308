"""A source may send anything: what it sends is never more than a failure of this source."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest

from corral.blobs.swarm.planner import SourceKind
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.swarm.sources import HttpSource, SourceBusy
from corral.blobs.transfer.remote import TransferBroken, open_session
from corral.kit.clock import SystemClock
from corral.kit.errors import CorralError

COUNT = 1000
PART = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-999/5000\r\n"
FAILURES = (TransferBroken, SourceBusy, CorralError)


async def _token(_is_refused: bool) -> Mapping[str, str]:
    return {"Authorization": "Bearer x"}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session(inside=True) as opened:
        yield opened


async def read_from(session: aiohttp.ClientSession, answer: bytes) -> bytes:
    """What a source makes of a server that sends just this and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/blobs/sha256:{'0' * 64}"
        source = HttpSource(session, "peer", SourceKind.PEER, url, _token, RateLimit(0, SystemClock()), stall_s=2.0)
        async with asyncio.timeout(20):
            return b"".join((await source.read(0, COUNT, lambda _size: None)).pieces)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x16\x03\x01 no HTTP at all\r\n\r\n", id="no HTTP"),
        pytest.param(b"HTTP/1.1 206 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000, id="no range"),
        pytest.param(
            b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-9/" + b"9" * 5000 + b"\r\n\r\n" + b"x" * 10, id="endless number"
        ),
        pytest.param(b"HTTP/1.1 206 OK\r\nContent-Range: bytes 5-1004/5000\r\n\r\n" + b"x" * 1000, id="another range"),
        pytest.param(PART + b"Content-Length: 1000\r\n\r\n" + b"x" * 999, id="a byte too few"),
        pytest.param(PART + b"Content-Length: 1001\r\n\r\n" + b"x" * 1001, id="a byte too many"),
        pytest.param(PART + b"Content-Length: -5\r\n\r\n" + b"x" * 1000, id="negative length"),
        pytest.param(PART + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nxxx", id="broken chunks"),
        pytest.param(
            PART + b"Content-Encoding: gzip\r\nContent-Length: 10\r\n\r\nnot gzip!!", id="not the declared encoding"
        ),
        pytest.param(PART + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(50_000_000)), id="a bomb"),
        pytest.param(PART + b"X-Large: " + b"x" * 100_000 + b"\r\n\r\n", id="endless header"),
        pytest.param(
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", id="redirect"
        ),
        pytest.param(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", id="refused"),
        pytest.param(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", id="not there"),
        pytest.param(b"HTTP/1.1 503 No\r\nRetry-After: " + b"9" * 300 + b"\r\nContent-Length: 0\r\n\r\n", id="busy"),
        pytest.param(b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n", id="unknown status"),
    ],
)
async def test_it_is_a_failure_of_this_source(session: aiohttp.ClientSession, answer: bytes) -> None:
    with pytest.raises(FAILURES):
        await read_from(session, answer)


async def test_an_honest_answer_is_read(session: aiohttp.ClientSession) -> None:
    body = bytes(range(250)) * 4
    assert await read_from(session, PART + b"Content-Length: 1000\r\n\r\n" + body) == body
