"""Downloads one resource over HTTP into one file: resumed, verified, bounded, retried when the connection fails.

This is the only place that retries a transfer. The store decides where finished files live; the caller decides what to
fetch and from where.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from corral.blobs.digests import BLOCK_BYTES
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import TooLarge, WrongDigest, from_os
from corral.blobs.transfer.partial_file import ExpectedBlob, OnBytes, PartialFile, ResumeInfo, remove_partial
from corral.blobs.transfer.range_responses import (
    AlreadyComplete,
    Append,
    ServerBusy,
    ServerRefused,
    StartOver,
    WholeBody,
    interpret_response,
)
from corral.blobs.transfer.remote import Remote, TransferBroken, buffered_bytes, translate_errors
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import Unreachable
from corral.kit.humanize import format_bytes
from corral.kit.log import get_log
from corral.kit.retry import Backoff
from corral.kit.threads import run_in_thread, run_uncancelled

log = get_log(__name__)

MIN_PROGRESS_BYTES = 64 << 10  # an attempt that brought fewer bytes counts as failed
SPACE_CHECK_BYTES = 64 << 20
FLUSH_S = 0.5


@dataclass(frozen=True)
class FetchLimits:
    tries: int = 5  # failed attempts in a row; a connection that breaks every minute but makes progress does not count
    first_wait_s: float = 1.0
    cap_wait_s: float = 30.0
    max_bytes: int = 64 << 30


@dataclass(frozen=True)
class Fetched:
    digest: str
    size: int


def _ignore_bytes(_have: int, _total: int) -> None:
    pass


class Fetcher:
    def __init__(
        self, limits: FetchLimits | None = None, *, space: DiskSpace | None = None, clock: Clock | None = None
    ) -> None:
        self._limits = limits or FetchLimits()
        self._space = space or DiskSpace()
        self._clock = clock or SystemClock()

    async def fetch(
        self, remote: Remote, path: Path, expected: ExpectedBlob, on_bytes: OnBytes = _ignore_bytes
    ) -> Fetched:
        """Download all of it into `path`, synced to the disk. `on_bytes` is called with the received and the total
        bytes.

        Raises Unreachable when the connection fails repeatedly, WrongDigest when the digest is wrong twice, NoSpace,
        TooLarge, NotFound, Denied or Failed. Received bytes stay in `path`, unless their digest was wrong.
        """
        most = self._limits.max_bytes
        if expected.size > most:
            raise TooLarge(f"{remote.name} has {format_bytes(expected.size)}, more than {format_bytes(most)}")
        try:
            for last in (False, True):
                fetched = await self._fetch_once(remote, PartialFile(path, remote.name, expected, on_bytes))
                if not expected.digest or fetched.digest == expected.digest:
                    return fetched
                # The first time it may be a broken proxy or a damaged partial file; the second time the server really
                # has this.
                remove_partial(path)
                log.warning("wrong digest", what=remote.name, wanted=expected.digest, got=fetched.digest, last=last)
        except OSError as error:
            raise from_os(error, f"writing {path.name}") from error
        raise WrongDigest(f"{remote.name} is {fetched.digest}, not {expected.digest}, twice")

    async def _fetch_once(self, remote: Remote, partial: PartialFile) -> Fetched:
        """Download until all bytes are here, over as many connections as needed."""
        backoff = Backoff(self._limits.first_wait_s, self._limits.cap_wait_s)
        try:
            await run_in_thread(partial.open)
            partial.on_bytes(partial.have, partial.total)
            finished = partial.is_whole
            while not finished:
                before = partial.have
                try:
                    await self._receive(remote, partial)
                    finished = True
                except TransferBroken as error:
                    if partial.have - before >= MIN_PROGRESS_BYTES:
                        backoff.reset()
                    if backoff.failures + 1 >= self._limits.tries:
                        raise Unreachable(f"{error}; tried {self._limits.tries} times") from error
                    wait_s = max(backoff.next_s(), error.after_s)
                    log.info(
                        "transfer will be retried", what=remote.name, why=str(error), have=partial.have, wait_s=wait_s
                    )
                    await self._clock.sleep(wait_s)
            digest = await run_uncancelled(partial.finish)
            return Fetched(digest, partial.have)
        finally:
            partial.close()

    async def _receive(self, remote: Remote, partial: PartialFile) -> None:
        """Use one connection. Returns when no byte is missing."""
        async with remote.open(partial.headers()) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            match interpret_response(response.status, headers, have_bytes=partial.have, what=remote.name):
                case AlreadyComplete():
                    return
                case StartOver():
                    await run_uncancelled(partial.start_over, ResumeInfo())
                    raise TransferBroken(f"{remote.name} changed during the transfer")
                case ServerBusy(why, after_s):
                    raise TransferBroken(why, after_s or 0.0)
                case ServerRefused(error):
                    raise error
                case Append(total):
                    pass
                case WholeBody(total):
                    await run_uncancelled(partial.start_over, _resume_info(headers))
            partial.expect(total, self._limits.max_bytes)
            self._space.require(partial.path.parent, max(partial.total - partial.have, 0), remote.name)
            await self._write_body(response, partial)
            if partial.total and not partial.is_whole:
                raise TransferBroken(f"{remote.name} sent {partial.have} of {partial.total} bytes")

    async def _write_body(self, response: aiohttp.ClientResponse, partial: PartialFile) -> None:
        waiting: list[bytes] = []
        held, checked, flushed_s = 0, partial.have, time.monotonic()
        try:
            while True:
                piece = await _read_piece(response, partial.name, FLUSH_S if waiting else None)
                if piece is None:
                    block, waiting, held, flushed_s = waiting, [], 0, time.monotonic()
                    await run_uncancelled(partial.write, block)
                    continue
                if not piece:
                    return
                partial.check_size(partial.have + held + len(piece), self._limits.max_bytes)
                waiting.append(piece)
                held += len(piece)
                partial.on_bytes(partial.have + held, partial.total)
                # By time as well: on a slow connection a crash should lose half a second, not a whole block.
                if held >= BLOCK_BYTES or time.monotonic() - flushed_s >= FLUSH_S:
                    block, waiting, held, flushed_s = waiting, [], 0, time.monotonic()
                    await run_uncancelled(partial.write, block)
                if partial.have - checked >= SPACE_CHECK_BYTES:
                    checked = partial.have
                    self._space.require(partial.path.parent, 0, partial.name)
        except TransferBroken:
            waiting += buffered_bytes(response)
            raise
        finally:
            # After a broken connection or a cancellation, keep the received bytes: they are less than two blocks.
            partial.write(waiting)


async def _read_piece(response: aiohttp.ClientResponse, name: str, timeout_s: float | None) -> bytes | None:
    """The next bytes; empty at the end, None when none came in time: what waits is then written, for a crash loses it
    and others may read the file while it grows."""
    try:
        async with asyncio.timeout(timeout_s), translate_errors(name):
            return await response.content.readany()
    except TimeoutError:  # aiohttp's own is translated
        return None


def _resume_info(headers: Mapping[str, str]) -> ResumeInfo:
    return ResumeInfo(etag=headers.get("etag", ""), modified=headers.get("last-modified", ""))
