"""Downloads the blobs of sources that workers need, each once for all of them.

A source is fetched while at least one worker is interested in it. A worker renews its interest with every request and
withdraws it when its install ends; a worker that was killed is forgotten after a while. What was received stays on the
disk, so that the next attempt resumes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from corral.blobs.errors import WrongDigest
from corral.blobs.progress import Progress
from corral.blobs.store import BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.contract.sources import Source
from corral.controller.artifacts.cache import ArtifactCache
from corral.controller.artifacts.listings import ArtifactListing, ListedBlob, Listings, Origins
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks
from corral.kit.threads import run_uncancelled

log = get_log(__name__)

MAX_PARALLEL_BLOBS = 3  # of one source; a worker fetches as many at once


@dataclass(frozen=True)
class ArtifactPace:
    interest_s: float = 60.0  # a worker that has not asked for so long is forgotten
    retry_after_s: float = 15.0  # a failed download is tried again for a worker that asks later than this
    forget_after_s: float = 600.0  # what is known of a source that no worker asks for
    check_every_s: float = 1.0


@dataclass
class SourceState:
    """One source that workers asked for lately."""

    source: Source
    platform: str
    requested_at_s: float
    interested: dict[str, float] = field(default_factory=dict)  # by node id: until when
    listing: ArtifactListing | None = None
    error: str = ""  # why the listing is not known
    blob_errors: dict[str, str] = field(default_factory=dict)  # by digest
    failed_at_s: float = 0.0
    have_bytes: int = 0  # of an archive whose digest is not known yet
    size_bytes: int = 0
    listed: asyncio.Event = field(default_factory=asyncio.Event)  # the listing is known, or cannot be

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(blob.digest for blob in self.listing.blobs) if self.listing is not None else frozenset()

    @property
    def has_failed(self) -> bool:
        return bool(self.error or self.blob_errors)


class ArtifactFetches:
    name = "artifacts of backends"

    def __init__(
        self,
        blobs: BlobStore,
        listings: Listings,
        origins: Origins,
        cache: ArtifactCache,
        clock: Clock,
        pace: ArtifactPace | None = None,
        *,
        find_bundled: Callable[[Source, str], ArtifactListing | None] = lambda _source, _platform: None,
    ) -> None:
        """`find_bundled`: the listing of a source that a loaded bundle has, by source and platform."""
        self._find_bundled = find_bundled
        self._blobs = blobs
        self._listings = listings
        self._origins = origins
        self._cache = cache
        self._clock = clock
        self._pace = pace or ArtifactPace()
        self._states: dict[str, SourceState] = {}
        self._tasks: KeyedTasks[str] = KeyedTasks()

    def want(self, key: str, source: Source, platform: str, node_id: str) -> SourceState:
        """Renew the node's interest in the source, and start its download unless it is running or complete."""
        now = self._clock.monotonic()
        state = self._states.get(key)
        if state is None or self._is_due_again(key, state, now):
            interested = state.interested if state is not None else {}
            state = self._states[key] = SourceState(source, platform, now, interested)
        state.requested_at_s = now
        state.interested[node_id] = now + self._pace.interest_s
        if not state.has_failed and (state.listing is None or any(self._is_missing(each) for each in state.digests)):
            self._tasks.start(key, lambda: self._fetch(key, state), name=f"fetch {source.uri}"[:200])
        return state

    def release(self, node_id: str, is_meant: Callable[[Source], bool]) -> None:
        """The node needs these sources no more. A download without an interested node is stopped."""
        for key, state in self._states.items():
            if is_meant(state.source) and state.interested.pop(node_id, None) is not None:
                self._stop_unwanted(key, state)

    def is_expected(self, digest: str) -> bool:
        """Whether the blob is being fetched, or will be in its turn. Called in threads."""
        return any(
            digest in state.digests and digest not in state.blob_errors and state.interested
            for state in tuple(self._states.values())
        )

    def wanted_digests(self) -> frozenset[str]:
        """Blobs of sources that a node is interested in: they are not removed."""
        return frozenset().union(*(state.digests for state in self._states.values() if state.interested))

    async def run(self) -> None:
        async with self._tasks:
            while True:
                await self._clock.sleep(self._pace.check_every_s)
                self._forget_silent_nodes()

    def _forget_silent_nodes(self) -> None:
        now = self._clock.monotonic()
        for key, state in list(self._states.items()):
            state.interested = {node: until for node, until in state.interested.items() if until > now}
            self._stop_unwanted(key, state)
            if not state.interested and now - state.requested_at_s > self._pace.forget_after_s:
                del self._states[key]

    def _stop_unwanted(self, key: str, state: SourceState) -> None:
        if not state.interested and key in self._tasks.running():
            log.info("download stopped: no node needs it any more", uri=state.source.uri)
            self._tasks.cancel(key)

    def _is_due_again(self, key: str, state: SourceState, now: float) -> bool:
        is_old = now - state.failed_at_s >= self._pace.retry_after_s
        return state.has_failed and is_old and key not in self._tasks.running()

    def _is_missing(self, digest: str) -> bool:
        return self._blobs.find(digest) is None

    async def _fetch(self, key: str, state: SourceState) -> None:
        try:
            if state.listing is None:
                state.listing = await self._list(key, state)
            state.listed.set()
            await self._fetch_blobs(key, state, state.listing)
        except CorralError as error:
            state.error = error.message
            log.warning("a source of a backend cannot be fetched", uri=state.source.uri, reason=error.message)
        except Exception:
            state.error = "the controller failed; its log has the details"
            log.exception("a source of a backend cannot be fetched", uri=state.source.uri)
        finally:
            if state.has_failed:
                state.failed_at_s = self._clock.monotonic()
                state.listed.set()

    async def _list(self, key: str, state: SourceState) -> ArtifactListing:
        listing = self._find_bundled(state.source, state.platform) or await run_uncancelled(self._listings.find, key)
        if listing is None:

            def on_progress(progress: Progress) -> None:
                state.have_bytes, state.size_bytes = progress.current_bytes, progress.total_bytes

            await self._cache.free_space(state.source.size if not state.source.digest else 0)
            listing = await self._listings.make(state.source, state.platform, on_progress)
            await run_uncancelled(self._listings.store, key, listing)
        return listing

    async def _fetch_blobs(self, key: str, state: SourceState, listing: ArtifactListing) -> None:
        blobs = {blob.digest: blob for blob in listing.blobs}
        missing = [blob for blob in blobs.values() if self._is_missing(blob.digest)]
        await self._cache.free_space(sum(blob.size_bytes for blob in missing))
        turn = asyncio.Semaphore(MAX_PARALLEL_BLOBS)
        with self._blobs.hold(*blobs):
            async with asyncio.TaskGroup() as tasks:
                for blob in missing:
                    tasks.create_task(self._fetch_blob(key, state, blob, turn))
        if missing and not state.blob_errors:
            size = sum(blob.size_bytes for blob in missing)
            log.info("source of a backend fetched", uri=state.source.uri, blobs=len(missing), bytes=size)

    async def _fetch_blob(self, key: str, state: SourceState, blob: ListedBlob, turn: asyncio.Semaphore) -> None:
        """An error is noted for the worker: it may have a way to the origin that this controller lacks."""
        async with turn:
            try:
                remote = self._origins.remote(state.source, blob.digest)
                await self._blobs.obtain(remote, ExpectedBlob(blob.digest, blob.size_bytes))
            except CorralError as error:
                state.blob_errors[blob.digest] = error.message
                log.warning("a blob of a backend cannot be fetched", digest=blob.digest, reason=error.message)
                if isinstance(error, WrongDigest) and not state.source.digest:
                    # Another archive lies there since its digest was learned: the next attempt learns it again.
                    await run_uncancelled(self._listings.forget, key)
