"""Fetches one blob by its digest from the fleet, into any blob store of this worker.

The callers (model files, artifacts of backends) know the digest, the size and the sources that an order names; this
module knows how to reach the sources, which token opens them and what to do when one fails. A blob of more than one
chunk is fetched in chunks from several sources at once (`blobs/swarm/`): from the controllers, and from other workers
that `blob_exchange.py` finds. A smaller blob, or one of a controller without chunk lists, is fetched in one piece.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp

from corral.blobs.chunks import CHUNK_BYTES, ChunkList, check_chunks
from corral.blobs.disk import DiskSpace
from corral.blobs.progress import OnProgress, Progress, ignore_progress
from corral.blobs.store import Blob, BlobStore
from corral.blobs.swarm.chunk_set import MAX_CHUNKS
from corral.blobs.swarm.download import SwarmDownload
from corral.blobs.swarm.planner import PlanLimits, SourceKind
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.swarm.sources import HttpSource
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import TransferBroken, UrlRemote, read_bounded
from corral.contract.codec import Undecodable, decode
from corral.contract.messages.backends import Phase
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import CorralError, Denied, Failed, Invalid, NotFound, Unreachable
from corral.kit.log import get_log

log = get_log(__name__)

CONTROLLER = "controller"
CHUNK_LIST_TRIES = 60
CHUNK_LIST_WAIT_S = 2.0
MAX_CHUNK_LIST_BYTES = MAX_CHUNKS * 80
RENEW_EVERY_S = 10.0
_HOST = "{host}"


class BlobExchange(Protocol):
    """Finds other workers that have the blob, while it is downloaded."""

    def take_part(self, download: SwarmDownload, store: BlobStore) -> AbstractAsyncContextManager[None]: ...

    def announce_soon(self) -> None:
        """A blob was stored."""


class SourceToken:
    """The token for controllers; renewed when a controller refuses it, once for all requests."""

    def __init__(self, token: str, fresh_token: Callable[[], Awaitable[str]] | None, clock: Clock) -> None:
        self._token = token
        self._fresh_token = fresh_token
        self._clock = clock
        self._renewed_s = float("-inf")

    async def authorize(self, is_refused: bool) -> Mapping[str, str]:
        """Headers of a request. Raises Denied if the last ones were refused and there are no others."""
        if is_refused:
            if self._fresh_token is None:
                raise Denied("the token was refused and cannot be renewed")
            if self._clock.monotonic() - self._renewed_s >= RENEW_EVERY_S:
                self._renewed_s = self._clock.monotonic()
                self._token = await self._fresh_token()
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}


class FleetBlobs:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        controller: str = "",
        fresh_token: Callable[[], Awaitable[str]] | None = None,
        exchange: BlobExchange | None = None,
        limits: PlanLimits | None = None,
        max_download: RateLimit | None = None,
        space: DiskSpace | None = None,
        clock: Clock | None = None,
        on_received: Callable[[SourceKind, int], None] = lambda _kind, _count: None,
    ) -> None:
        """`controller` is the URL by which this worker reaches the cluster: its host replaces `{host}` in a source.
        `fresh_token` requests a new token when the one of the order has expired. `exchange` None: no peers.
        `on_received` counts received bytes."""
        self._session = session
        self._host = _host_of(controller)
        self._fresh_token = fresh_token
        self._exchange = exchange
        self._limits = limits or PlanLimits()
        self._clock = clock or SystemClock()
        self._max_download = max_download or RateLimit(0, self._clock)
        self._space = space
        self._on_received = on_received

    async def obtain(
        self,
        store: BlobStore,
        wanted: ExpectedBlob,
        sources: Sequence[str],
        token: str,
        on_progress: OnProgress = ignore_progress,
        *,
        name: str,
    ) -> Blob:
        """The verified blob, from the store or from the fleet; bytes that a source sent before it failed are kept, and
        other sources send the rest. `sources`: URLs of controllers' blob listeners, best first. `name` is for messages
        and progress.

        Hold the digest in the store before the call. May be cancelled and called again: the transfer is resumed.
        Raises NotFound (no source has it), Unreachable, Denied, Failed, NoSpace, WrongDigest."""
        if (blob := store.find(wanted.digest)) is not None:
            return blob
        if not sources:
            raise NotFound(f"{name} is not on this machine, and the order names no source for it")

        def on_named_progress(progress: Progress) -> None:
            on_progress(replace(progress, file=name))

        urls = [f"{self._address(source)}/blobs/{wanted.digest}" for source in sources]
        source_token = SourceToken(token, self._fresh_token, self._clock)
        try:
            listed = await self._find_chunk_list(urls, source_token, wanted)
            if listed is None:
                return await self._obtain_whole(store, wanted, urls, source_token, on_named_progress)
            fetch = partial(self._download, store, wanted.digest, listed, urls, source_token, name)
            blob = await store.assemble(wanted, fetch, on_named_progress)
            if self._exchange is not None:
                self._exchange.announce_soon()
            return blob
        except (Unreachable, NotFound, Denied, Failed) as error:
            raise type(error)(f"{name}: {error.message}") from error

    # In chunks

    async def _download(
        self,
        store: BlobStore,
        digest: str,
        listed: ChunkList,
        urls: Sequence[str],
        token: SourceToken,
        name: str,
        path: Path,
        on_progress: OnProgress,
    ) -> None:
        banned: list[str] = []

        def on_bytes(have: int, total: int) -> None:
            sources, wrong = dict(download.received), tuple(banned)
            on_progress(Progress(Phase.DOWNLOADING, name, have, total, sources=sources, banned=wrong))

        download = SwarmDownload(
            digest,
            listed,
            path,
            name=name,
            on_bytes=on_bytes,
            limits=self._limits,
            space=self._space,
            seed=random.randrange(1 << 30),
            monotonic=self._clock.monotonic,
            on_received=self._on_received,
            on_banned=lambda source: banned.append(source) if source not in banned else None,
        )
        for number, url in enumerate(urls, 1):
            named = CONTROLLER if number == 1 else f"{CONTROLLER}-{number}"
            download.offer(
                HttpSource(self._session, named, SourceKind.CONTROLLER, url, token.authorize, self._max_download)
            )
        exchange = self._exchange.take_part(download, store) if self._exchange is not None else nullcontext()
        async with exchange:
            await download.run()

    async def _find_chunk_list(self, urls: Sequence[str], token: SourceToken, wanted: ExpectedBlob) -> ChunkList | None:
        """None: the blob is fetched in one piece, because a source has no list of it. Raises Unreachable: in one piece,
        the chunks that are here already would be fetched again."""
        if wanted.size <= CHUNK_BYTES:
            return None
        why, has_answer = "", False
        for attempt in range(self._limits.max_failures):
            if attempt:
                await self._clock.sleep(min(self._limits.cap_pause_s, self._limits.first_pause_s * 2.0**attempt))
            for url in urls:
                try:
                    return await self._fetch_chunk_list(f"{url}/chunks", token, wanted)
                except TransferBroken as error:
                    why = why or str(error)
                    log.info("a source cannot be reached for a chunk list", source=url, reason=str(error))
                except CorralError as error:
                    has_answer = True
                    log.info("no chunk list from a source", source=url, reason=error.message)
            if has_answer:
                return None
        raise Unreachable(f"{why}; tried repeatedly")

    async def _fetch_chunk_list(self, url: str, token: SourceToken, wanted: ExpectedBlob) -> ChunkList:
        is_refused = False
        for _ in range(CHUNK_LIST_TRIES):
            async with UrlRemote(self._session, url, await token.authorize(is_refused)).open({}) as response:
                if response.status == 503:  # a large list is made when it is first requested
                    await self._clock.sleep(CHUNK_LIST_WAIT_S)
                    continue
                if response.status == 401 and not is_refused:
                    is_refused = True
                    continue
                if response.status != 200:
                    raise NotFound(f"{url} answered {response.status}")
                return _read_chunk_list(await read_bounded(response, MAX_CHUNK_LIST_BYTES, url), wanted)
        raise Unreachable(f"{url} is not ready after {CHUNK_LIST_TRIES} requests")

    # In one piece

    async def _obtain_whole(
        self, store: BlobStore, wanted: ExpectedBlob, urls: Sequence[str], token: SourceToken, on_progress: OnProgress
    ) -> Blob:
        failure: CorralError | None = None
        for url in urls:
            try:
                return await self._obtain_from(store, wanted, url, token, on_progress)
            except (Unreachable, NotFound, Denied, Failed) as error:
                log.warning("a source does not send the blob", source=url, reason=error.message)
                failure = failure or error
        assert failure is not None
        raise failure

    async def _obtain_from(
        self, store: BlobStore, wanted: ExpectedBlob, url: str, token: SourceToken, on_progress: OnProgress
    ) -> Blob:
        counted = _CountedProgress(on_progress, self._on_received)
        try:
            remote = UrlRemote(self._session, url, await token.authorize(False))
            return await store.obtain(remote, wanted, counted)
        except Denied as error:
            # The order's token may have expired during a long transfer: the received bytes are kept, and a new token
            # opens the rest.
            try:
                headers = await token.authorize(True)
            except Denied:
                raise error from None
            return await store.obtain(UrlRemote(self._session, url, headers), wanted, counted)

    def _address(self, source: str) -> str:
        return source.replace(_HOST, self._host).rstrip("/")


class _CountedProgress:
    """Counts the bytes of a download in one piece, and names the controller as their source."""

    def __init__(self, on_progress: OnProgress, on_received: Callable[[SourceKind, int], None]) -> None:
        self._on_progress = on_progress
        self._on_received = on_received
        self._first: int | None = None
        self._last = 0

    def __call__(self, progress: Progress) -> None:
        if self._first is None:
            self._first = self._last = progress.current_bytes
        if progress.current_bytes > self._last:
            self._on_received(SourceKind.CONTROLLER, progress.current_bytes - self._last)
            self._last = progress.current_bytes
        self._on_progress(replace(progress, sources={CONTROLLER: self._last - self._first}))


def _read_chunk_list(content: bytes, wanted: ExpectedBlob) -> ChunkList:
    try:
        listed = check_chunks(decode(ChunkList, content))
    except Undecodable as error:
        raise Invalid(f"the chunk list cannot be read: {error}") from error
    if listed.size != wanted.size or listed.chunk_bytes != CHUNK_BYTES:
        raise Invalid(f"the chunk list is for {listed.size} bytes, not {wanted.size}")
    return listed


def _host_of(url: str) -> str:
    try:
        host = urlsplit(url).hostname or "127.0.0.1"
    except ValueError:
        host = "127.0.0.1"
    return f"[{host}]" if ":" in host else host
