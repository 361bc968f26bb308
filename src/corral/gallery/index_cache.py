"""Caches the indexes of galleries: read on first use, refreshed, and replaced by the last good copy when no server
answers.

The caller's `read` parses the body (backends, models); `index_fetcher.py` downloads it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

from corral.gallery.galleries import BUILT_IN, Gallery
from corral.gallery.index import EntryT, Index
from corral.gallery.index_fetcher import Stamp, stamp_of
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, Unavailable
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.single_flight import SingleFlight

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class LibraryOptions:
    fresh_s: float = 3600.0  # an index is not read again before this
    skip_s: float = 600.0  # a failed candidate is skipped for so long, unless all have failed
    candidate_s: float = 120.0  # timeout of one candidate
    retry_s: float = 60.0  # after all candidates have failed, they are not tried again before this


OPTIONS = LibraryOptions()
Fetch = Callable[[str], Awaitable[bytes]]  # URL → body
_NEVER = float("-inf")
_MAX_REASON_CHARS = 160


@dataclass
class _CachedIndex(Generic[EntryT]):
    index: Index[EntryT] | None = None
    stamps: tuple[Stamp, ...] = ()  # of the candidates that are files, taken before they were read
    read_at: float = _NEVER  # a copy from the disk never counts as fresh
    failed_at: dict[str, float] = field(default_factory=dict)  # candidate → when
    all_failed_at: float | None = None
    why: str = ""  # why all candidates failed: one sentence for each
    first_why: str = ""  # the sentence of the first candidate


@dataclass(frozen=True, slots=True)
class GalleryState:
    """Result of the last attempt to read a gallery. `error` is empty if it was read, or not needed yet."""

    gallery: Gallery
    entries: int = 0
    error: str = ""

    @property
    def notice(self) -> str:
        """One short sentence for users; empty if there is no error."""
        if not self.error:
            return ""
        copy = "; its last good copy is used" if self.entries else ""
        return f"The gallery {self.gallery.name} cannot be read ({_shorten(self.error)}){copy}."


class IndexCache(Generic[EntryT]):
    def __init__(
        self,
        galleries: Sequence[Gallery],
        fetch: Fetch,
        read: Callable[[Gallery, bytes], Index[EntryT]],
        *,
        clock: Clock,
        built_in: Callable[[], Index[EntryT]] | None,
        cache_folder: Path | None = None,
        options: LibraryOptions = OPTIONS,
    ) -> None:
        """`built_in` None: without the built-in gallery. `cache_folder`: for the last good copies."""
        self.galleries = (BUILT_IN, *galleries) if built_in is not None else tuple(galleries)
        self._fetch = fetch
        self._read_index = read
        self._clock = clock
        self._cache_folder = cache_folder
        self._options = options
        self._built_in = built_in
        self._cached = {gallery.name: _CachedIndex[EntryT]() for gallery in self.galleries}
        self._reading: SingleFlight[str, None, Index[EntryT]] = SingleFlight()

    async def read(self, wanted: Sequence[Gallery]) -> list[Index[EntryT] | str]:
        """Read galleries concurrently; for each its index, or why there is none."""
        async with asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(self._read_or_reason(gallery)) for gallery in wanted]
        return [task.result() for task in reading]

    def invalidate(self) -> None:
        """The next call reads all galleries again, including those that failed."""
        for cached in self._cached.values():
            cached.read_at, cached.all_failed_at = _NEVER, None
            cached.failed_at.clear()

    def unread(self) -> dict[str, str]:
        """Galleries that could not be read the last time, and why; an old copy may be in use for them."""
        return {name: cached.why for name, cached in self._cached.items() if cached.all_failed_at is not None}

    def states(self) -> list[GalleryState]:
        """The state of every gallery except the built-in one."""
        return [
            GalleryState(
                gallery,
                len(cached.index.entries) if cached.index is not None else 0,
                cached.first_why if cached.all_failed_at is not None else "",
            )
            for gallery in self.galleries
            if gallery != BUILT_IN and (cached := self._cached[gallery.name])
        ]

    async def check(self) -> list[GalleryState]:
        """The states, after galleries that are due were read."""
        await self.read(self.galleries)
        return self.states()

    async def _read_or_reason(self, gallery: Gallery) -> Index[EntryT] | str:
        try:
            return await self.index(gallery)
        except CorralError as error:
            return error.message

    async def index(self, gallery: Gallery) -> Index[EntryT]:
        """Raises Unavailable if there is not even an old copy."""
        cached = self._cached[gallery.name]
        if await stamps_of(gallery.candidates) != cached.stamps:  # a file has changed: it is read at once
            return await self._reading.run(gallery.name, lambda _: self._read(gallery, cached))
        now = self._clock.monotonic()
        if cached.index is not None and now - cached.read_at < self._options.fresh_s:
            return cached.index
        if cached.all_failed_at is not None and now - cached.all_failed_at < self._options.retry_s:
            if cached.index is None:
                raise Unavailable(cached.why)
            return cached.index
        return await self._reading.run(gallery.name, lambda _: self._read(gallery, cached))

    async def _read(self, gallery: Gallery, cached: _CachedIndex[EntryT]) -> Index[EntryT]:
        if gallery == BUILT_IN and self._built_in is not None:
            cached.index = await asyncio.to_thread(self._built_in)
            cached.read_at = float("inf")  # it does not change while the process runs
            return cached.index
        why: list[str] = []
        # Taken before the files are read: a file that changes in the meantime is read again by the next call.
        before, cached.stamps = cached.stamps, await stamps_of(gallery.candidates)
        if before != cached.stamps:
            cached.failed_at.clear()
        for url in usable_candidates(
            gallery.candidates, cached.failed_at, self._clock.monotonic(), self._options.skip_s
        ):
            try:
                index, body = await self._read_candidate(gallery, url)
            except CorralError as error:
                cached.failed_at[url] = self._clock.monotonic()
                why.append(error.message)
                continue
            self._accept(cached, index)
            await asyncio.to_thread(self._store_copy, gallery, body)
            return index
        return await self._fall_back(gallery, cached, why)

    async def _read_candidate(self, gallery: Gallery, url: str) -> tuple[Index[EntryT], bytes]:
        try:
            async with asyncio.timeout(self._options.candidate_s):
                body = await self._fetch(url)
        except TimeoutError as error:
            raise Failed(f"{url} took longer than {self._options.candidate_s:g} s") from error
        index = await asyncio.to_thread(self._read_index, gallery, body)
        if not index.entries:
            raise Failed(f"{url} contains no usable entry")
        return index, body

    def _accept(self, cached: _CachedIndex[EntryT], index: Index[EntryT]) -> None:
        cached.index, cached.read_at, cached.all_failed_at = index, self._clock.monotonic(), None
        log.info("gallery read", gallery=index.gallery.name, entries=len(index.entries), skipped=len(index.problems))
        for problem in index.problems[:20]:
            log.debug("gallery entry skipped", gallery=index.gallery.name, problem=str(problem))

    async def _fall_back(self, gallery: Gallery, cached: _CachedIndex[EntryT], reasons: Sequence[str]) -> Index[EntryT]:
        why = "; ".join(reasons)
        cached.all_failed_at, cached.why, cached.first_why = self._clock.monotonic(), why, reasons[0]
        if cached.index is None:
            cached.index = await asyncio.to_thread(self._last_good_copy, gallery)
        if cached.index is None:
            log.warning("gallery cannot be read", gallery=gallery.name, error=why)
            raise Unavailable(why)
        log.warning("gallery cannot be read, the last good copy is used", gallery=gallery.name, error=why)
        return cached.index

    def _store_copy(self, gallery: Gallery, body: bytes) -> None:
        path = self._copy_path(gallery)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, body)
        except OSError as error:
            log.warning("copy of the gallery could not be stored", gallery=gallery.name, error=str(error))

    def _last_good_copy(self, gallery: Gallery) -> Index[EntryT] | None:
        path = self._copy_path(gallery)
        try:
            return self._read_index(gallery, path.read_bytes()) if path is not None else None
        except FileNotFoundError:
            return None
        except (OSError, CorralError) as error:
            log.warning("last good copy cannot be read", gallery=gallery.name, error=str(error))
            return None

    def _copy_path(self, gallery: Gallery) -> Path | None:
        if self._cache_folder is None:
            return None
        return self._cache_folder / "gallery" / f"{hashlib.sha256(gallery.url.encode()).hexdigest()}.yaml"


async def stamps_of(urls: Sequence[str]) -> tuple[Stamp, ...]:
    """Stamps of the URLs that are local files."""
    files = [url for url in urls if url.startswith("file://")]
    if not files:
        return ()
    return await asyncio.to_thread(lambda: tuple(stamp_of(url) for url in files))


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[: _MAX_REASON_CHARS - 1]}…"


def usable_candidates(
    candidates: Sequence[str], failed_at: Mapping[str, float], now: float, skip_s: float
) -> tuple[str, ...]:
    """Candidates that did not fail recently; all of them if all did."""
    usable = tuple(url for url in candidates if now - failed_at.get(url, _NEVER) >= skip_s)
    return usable or tuple(candidates)
