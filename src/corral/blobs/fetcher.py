"""One thing over HTTP into one file: resumed where it stopped, verified, bounded, tried again when the line fails.

This is the only place that repeats a transfer. Where finished files live is the store's; which thing to fetch, and from
where, is the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from corral.blobs.answers import Append, Busy, Complete, Refused, StartOver, Whole, judge_answer
from corral.blobs.digests import BLOCK_BYTES
from corral.blobs.errors import TooLarge, WrongDigest, from_os
from corral.blobs.partial import At, Note, Partial, Wanted, drop
from corral.blobs.remote import Broken, Remote, translated, unread
from corral.blobs.space import Room
from corral.kit.backoff import Backoff
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import Unreachable
from corral.kit.humanize import format_bytes
from corral.kit.log import get_log
from corral.kit.threads import run_in_thread, run_uncancelled

log = get_log(__name__)

WORTH_BYTES = 64 << 10  # a try that brought less than this counts as fruitless
ROOM_CHECK_BYTES = 64 << 20
FLUSH_S = 0.5


@dataclass(frozen=True)
class FetchLimits:
    tries: int = 5  # fruitless ones in a row; a line that breaks every minute but moves is none
    first_wait_s: float = 1.0
    cap_wait_s: float = 30.0
    max_bytes: int = 64 << 30


@dataclass(frozen=True)
class Fetched:
    digest: str
    size: int


def _unwatched(_have: int, _total: int) -> None:
    pass


class Fetcher:
    def __init__(
        self, limits: FetchLimits | None = None, *, room: Room | None = None, clock: Clock | None = None
    ) -> None:
        self._limits = limits or FetchLimits()
        self._room = room or Room()
        self._clock = clock or SystemClock()

    async def fetch(self, remote: Remote, path: Path, wanted: Wanted, at: At = _unwatched) -> Fetched:
        """Have all of it in `path`, synced to the disk. `at` hears how many bytes of how many are there.

        Raises Unreachable when the line fails again and again, WrongDigest when the bytes are wrong twice, NoSpace,
        TooLarge, NotFound, Denied or Failed. What was received stays there, unless it was wrong.
        """
        most = self._limits.max_bytes
        if wanted.size > most:
            raise TooLarge(f"{remote.name} has {format_bytes(wanted.size)}, more than {format_bytes(most)}")
        try:
            for last in (False, True):
                fetched = await self._fetch_once(remote, Partial(path, remote.name, wanted, at))
                if not wanted.digest or fetched.digest == wanted.digest:
                    return fetched
                # Once may be a broken proxy or a damaged partial file. Twice is what the server really has.
                drop(path)
                log.warning("wrong digest", what=remote.name, wanted=wanted.digest, got=fetched.digest, last=last)
        except OSError as error:
            raise from_os(error, f"writing {path.name}") from error
        raise WrongDigest(f"{remote.name} is {fetched.digest}, not {wanted.digest}, twice")

    async def _fetch_once(self, remote: Remote, partial: Partial) -> Fetched:
        """Until all bytes are there, over as many connections as that takes."""
        backoff = Backoff(self._limits.first_wait_s, self._limits.cap_wait_s)
        try:
            await run_in_thread(partial.open)
            partial.at(partial.have, partial.total)
            finished = partial.is_whole
            while not finished:
                before = partial.have
                try:
                    await self._receive(remote, partial)
                    finished = True
                except Broken as error:
                    if partial.have - before >= WORTH_BYTES:
                        backoff.reset()
                    if backoff.failures + 1 >= self._limits.tries:
                        raise Unreachable(f"{error}; tried {self._limits.tries} times") from error
                    wait_s = max(backoff.next_s(), error.after_s)
                    log.info("fetch will go on", what=remote.name, why=str(error), have=partial.have, wait_s=wait_s)
                    await self._clock.sleep(wait_s)
            digest = await run_uncancelled(partial.finish)
            return Fetched(digest, partial.have)
        finally:
            partial.close()

    async def _receive(self, remote: Remote, partial: Partial) -> None:
        """One connection. Returns when nothing is missing any more."""
        async with remote.ask(partial.headers()) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            match judge_answer(response.status, headers, have_bytes=partial.have, what=remote.name):
                case Complete():
                    return
                case StartOver():
                    await run_uncancelled(partial.start_over, Note())
                    raise Broken(f"{remote.name} has changed meanwhile")
                case Busy(why, after_s):
                    raise Broken(why, after_s or 0.0)
                case Refused(error):
                    raise error
                case Append(total):
                    pass
                case Whole(total):
                    await run_uncancelled(partial.start_over, _note_of(headers))
            partial.expect(total, self._limits.max_bytes)
            self._room.require(partial.path.parent, max(partial.total - partial.have, 0), remote.name)
            await self._write_body(response, partial)
            if partial.total and not partial.is_whole:
                raise Broken(f"{remote.name} sent {partial.have} of {partial.total} bytes")

    async def _write_body(self, response: aiohttp.ClientResponse, partial: Partial) -> None:
        waiting: list[bytes] = []
        held, checked, flushed_s = 0, partial.have, time.monotonic()
        try:
            while True:
                async with translated(partial.name):
                    piece = await response.content.readany()
                if not piece:
                    return
                partial.check_size(partial.have + held + len(piece), self._limits.max_bytes)
                waiting.append(piece)
                held += len(piece)
                partial.at(partial.have + held, partial.total)
                # By time too: on a slow line a crash should cost half a second, not a whole block.
                if held >= BLOCK_BYTES or time.monotonic() - flushed_s >= FLUSH_S:
                    block, waiting, held, flushed_s = waiting, [], 0, time.monotonic()
                    await run_uncancelled(partial.write, block)
                if partial.have - checked >= ROOM_CHECK_BYTES:
                    checked = partial.have
                    self._room.require(partial.path.parent, 0, partial.name)
        except Broken:
            waiting += unread(response)
            raise
        finally:
            # The line broke, or somebody cancelled: what came is worth keeping, and it is less than a block or two.
            partial.write(waiting)


def _note_of(headers: Mapping[str, str]) -> Note:
    return Note(etag=headers.get("etag", ""), modified=headers.get("last-modified", ""))
