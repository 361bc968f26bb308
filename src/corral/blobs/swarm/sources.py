"""Requests one chunk from one source over HTTP, and names the ways in which that can fail."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from corral.blobs.swarm.planner import SourceKind
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.transfer.low_water import LowWaterMark
from corral.blobs.transfer.range_responses import (
    Append,
    ServerBusy,
    ServerRefused,
    WholeBody,
    interpret_response,
)
from corral.blobs.transfer.remote import TransferBroken, translate_errors
from corral.kit.errors import CorralError, Denied

CHUNKS_HEADER = "X-Corral-Chunks"  # of a peer's response: the chunks that it has now, as ChunkSet.encode writes them
DEFAULT_BUSY_S = 1.0


@dataclass(frozen=True)
class ReceivedChunk:
    pieces: list[bytes]
    peer_has: str = ""  # the source's own list of its chunks; empty: unknown


class SourceBusy(Exception):
    def __init__(self, wait_s: float) -> None:
        super().__init__(f"busy for {wait_s} s")
        self.wait_s = wait_s


class ChunkSource(Protocol):
    """A source of chunks of one blob."""

    @property
    def name(self) -> str:
        """Identifies the source, for the planner, messages and counters: `controller`, or the name of a node."""

    @property
    def kind(self) -> SourceKind: ...

    async def read(self, start: int, count: int, on_bytes: Callable[[int], None]) -> ReceivedChunk:
        """These bytes, unverified. Raises SourceBusy, TransferBroken (retry), NotFound (not there) and Denied."""


@dataclass(frozen=True)
class HttpSource:
    session: aiohttp.ClientSession
    name: str
    kind: SourceKind
    url: str
    authorize: Callable[[bool], Awaitable[Mapping[str, str]]] = field(repr=False)  # True: the last headers were refused
    limit: RateLimit
    stall_s: float = 10.0
    trust: ssl.SSLContext | bool = True  # True: as the session
    server_name: str = ""  # to verify in the certificate, when it is not the host of the URL

    async def read(self, start: int, count: int, on_bytes: Callable[[int], None]) -> ReceivedChunk:
        try:
            return await self._read(start, count, on_bytes, await self._headers(is_refused=False))
        except Denied:
            return await self._read(start, count, on_bytes, await self._headers(is_refused=True))

    async def _headers(self, *, is_refused: bool) -> Mapping[str, str]:
        try:
            return await self.authorize(is_refused)
        except Denied:
            raise
        except CorralError as error:
            raise TransferBroken(f"{self.name}: no token: {error.message}") from error

    async def _read(
        self, start: int, count: int, on_bytes: Callable[[int], None], headers: Mapping[str, str]
    ) -> ReceivedChunk:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.stall_s, sock_read=self.stall_s)
        span = {"Range": f"bytes={start}-{start + count - 1}"}
        async with translate_errors(self.name):
            response = await self.session.get(
                self.url,
                headers={**headers, **span},
                timeout=timeout,
                allow_redirects=False,
                server_hostname=self.server_name or None,
                ssl=self.trust,
            )
        async with response:
            self._check(response, start)
            pieces = await self._receive(response, count, on_bytes)
            return ReceivedChunk(pieces, response.headers.get(CHUNKS_HEADER, ""))

    def _check(self, response: aiohttp.ClientResponse, start: int) -> None:
        headers = {name.lower(): value for name, value in response.headers.items()}
        match interpret_response(response.status, headers, have_bytes=start, what=self.name):
            case Append():
                return
            case WholeBody() if start == 0:
                return
            case ServerBusy(_, after_s) if response.status in (429, 503):
                raise SourceBusy(after_s or DEFAULT_BUSY_S)
            case ServerRefused(error):
                raise error
            case _:
                raise TransferBroken(f"{self.name} answered {response.status}")

    async def _receive(
        self, response: aiohttp.ClientResponse, count: int, on_bytes: Callable[[int], None]
    ) -> list[bytes]:
        pieces: list[bytes] = []
        size = 0
        with LowWaterMark(response, min(count, response.content_length or count)) as mark:
            while size < count:
                async with translate_errors(self.name):
                    piece = await response.content.readany()
                if not piece:
                    raise TransferBroken(f"{self.name} closed the connection after {size} of {count} bytes")
                size += len(piece)
                if size > count:
                    raise TransferBroken(f"{self.name} sends more than the requested {count} bytes")
                pieces.append(piece)
                mark.on_bytes(len(piece))
                on_bytes(len(piece))
                if self.limit.is_limited:
                    await self.limit.take(len(piece))
        async with translate_errors(self.name):
            if await asyncio.wait_for(response.content.readany(), self.stall_s):
                raise TransferBroken(f"{self.name} sends more than the requested {count} bytes")
        return pieces
