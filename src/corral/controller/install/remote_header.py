"""Reads the header of a GGUF file on a server: a few ranges from its beginning, never the file.

A vocabulary takes megabytes, and how many is not known before: each range is larger than the one before. All ranges
must be of one version of the file.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass

import aiohttp

from corral.blobs.transfer.range_responses import Append, ServerBusy, ServerRefused, WholeBody, interpret_response
from corral.blobs.transfer.remote import TransferBroken, UrlRemote, translate_errors
from corral.contract.gguf import MAX_BYTES, GgufHeader, Truncated, read_header
from corral.kit.errors import Unreachable

FIRST_BYTES = 4 << 20
MAX_TRIES = 4


@dataclass(frozen=True)
class RemoteHeader:
    header: GgufHeader
    size_bytes: int  # of the whole file; 0: the server does not say


@dataclass(frozen=True)
class HeaderReader:
    ask_s: float = 60.0  # for one range
    wait_s: float = 0.5  # before the second try; each further one waits twice as long
    first_bytes: int = FIRST_BYTES

    async def read(self, remote: UrlRemote) -> RemoteHeader:
        """Raises Invalid for a file that is no GGUF file, and what the server's refusal means."""
        state, wanted = _Start(), self.first_bytes
        for tries in range(MAX_TRIES):
            try:
                while True:
                    part = await self._read_range(remote, len(state.data), wanted, state.tag)
                    if state.data and (part.whole or part.tag != state.tag):
                        state, wanted = _Start(), self.first_bytes
                        raise TransferBroken(f"{remote.name} changes while it is read")
                    state = _Start(state.data + part.data, part.tag, part.size_bytes or state.size_bytes)
                    at_end = len(state.data) < wanted or wanted >= MAX_BYTES
                    header = await asyncio.to_thread(_parse, state.data, at_end=at_end)
                    if header is not None:
                        return RemoteHeader(header, state.size_bytes)
                    wanted = min(2 * wanted, MAX_BYTES)
                    if part.whole:  # the server knows no ranges: read more of it from the beginning
                        state = _Start()
            except TransferBroken as error:
                last = error
                if tries < MAX_TRIES - 1:
                    await asyncio.sleep(error.after_s or self.wait_s * 2**tries)
        raise Unreachable(str(last)) from last

    async def _read_range(self, remote: UrlRemote, begin: int, end: int, tag: str) -> _Part:
        headers = {"Range": f"bytes={begin}-{end - 1}"} | ({"If-Range": tag} if begin and tag else {})
        try:
            async with asyncio.timeout(self.ask_s), remote.open(headers) as response:
                found = {name.lower(): value for name, value in response.headers.items()}
                judged = interpret_response(response.status, found, have_bytes=begin, what=remote.name)
                if isinstance(judged, ServerBusy):
                    raise TransferBroken(judged.why, judged.after_s or 0.0)
                if isinstance(judged, ServerRefused):
                    raise judged.error
                whole = isinstance(judged, WholeBody)
                total = judged.total if isinstance(judged, WholeBody | Append) else 0
                strong = found.get("etag", "") if not found.get("etag", "").startswith("W/") else ""
                wanted = end - begin if isinstance(judged, WholeBody | Append) else 0
                async with translate_errors(remote.name):
                    data = await _read_at_most(response.content, wanted)
                return _Part(data, strong or found.get("last-modified", ""), total, whole)
        except TimeoutError as error:
            raise TransferBroken(f"{remote.name}: no data received for too long") from error


@dataclass(frozen=True)
class _Start:
    """The beginning of the file, as far as it was read."""

    data: bytes = b""
    tag: str = ""  # of the version of the file
    size_bytes: int = 0


@dataclass(frozen=True)
class _Part:
    data: bytes
    tag: str
    size_bytes: int
    whole: bool  # the server ignores ranges, or the file is another one by now


async def _read_at_most(content: aiohttp.StreamReader, limit: int) -> bytes:
    """A server that ignores ranges would send the whole file."""
    parts, size = [], 0
    while size < limit:
        part = await content.read(limit - size)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _parse(start: bytes, *, at_end: bool) -> GgufHeader | None:
    """None: more bytes are needed. At the end the shape is enough, whatever follows it."""
    try:
        return read_header(io.BytesIO(start), whole=True)
    except Truncated:
        if not at_end:
            return None
        return read_header(io.BytesIO(start))
