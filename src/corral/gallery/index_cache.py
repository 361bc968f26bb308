"""Indexes on their shelves: read when first needed, remembered, and served from the last good copy when nobody answers.

What an index holds (backends, models) is for whoever reads it; where it is found is `fetching.py`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from corral.gallery.galleries import BUILT_IN, Gallery
from corral.gallery.index_fetcher import Stamp, stamp_of
from corral.gallery.yaml_items import Problem
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, Unavailable
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.single_flight import SingleFlight

log = get_log(__name__)


class AnyIndex(Protocol):
    @property
    def gallery(self) -> Gallery: ...

    @property
    def entries(self) -> Sequence[object]: ...

    @property
    def problems(self) -> Sequence[Problem]: ...


I = TypeVar("I", bound=AnyIndex)  # noqa: E741


class Fetch(Protocol):
    async def fetch(self, url: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class LibraryOptions:
    fresh_s: float = 3600.0  # how long an index is served without asking again
    skip_s: float = 600.0  # how long a candidate that failed is passed over, unless all have
    candidate_s: float = 120.0  # one candidate may take so long
    retry_s: float = 60.0  # after all have failed, nobody waits for them again before that


OPTIONS = LibraryOptions()
_NEVER = float("-inf")
_LONGEST_REASON = 160


@dataclass
class _Shelf(Generic[I]):
    index: I | None = None
    stamps: tuple[Stamp, ...] = ()  # of the candidates that are files, before they were read
    read_at: float = _NEVER  # a copy from the disk is not fresh, however recently the machine was started
    failed_at: dict[str, float] = field(default_factory=dict)  # candidate → when
    all_failed_at: float | None = None
    why: str = ""  # one sentence per candidate
    first_why: str = ""  # that of the first candidate alone


@dataclass(frozen=True, slots=True)
class GalleryState:
    """How the last attempt to read a gallery ended. `error` is empty where it was read, or not asked for yet."""

    gallery: Gallery
    entries: int = 0
    error: str = ""

    @property
    def notice(self) -> str:
        """One short sentence for people; empty where nothing is wrong."""
        if not self.error:
            return ""
        copy = "; its last good copy is used" if self.entries else ""
        return f"The gallery {self.gallery.name} cannot be read ({_shortened(self.error)}){copy}."


class Shelves(Generic[I]):
    def __init__(
        self,
        galleries: Sequence[Gallery],
        fetch: Fetch,
        read: Callable[[Gallery, bytes], I],
        *,
        clock: Clock,
        built_in: Callable[[], I] | None,
        cache_folder: Path | None = None,
        options: LibraryOptions = OPTIONS,
    ) -> None:
        """`built_in` None: without ours. `cache_folder`: where the last good copies are."""
        self.galleries = (BUILT_IN, *galleries) if built_in is not None else tuple(galleries)
        self._fetch = fetch
        self._read_index = read
        self._clock = clock
        self._cache_folder = cache_folder
        self._options = options
        self._built_in = built_in
        self._shelves = {gallery.name: _Shelf[I]() for gallery in self.galleries}
        self._reading: SingleFlight[str, None, I] = SingleFlight()

    async def read(self, wanted: Sequence[Gallery]) -> list[I | str]:
        """At once; for each its index, or why there is none."""
        async with asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(self._try(gallery)) for gallery in wanted]
        return [task.result() for task in reading]

    def forget(self) -> None:
        """The next to ask reads again, also from those that failed."""
        for shelf in self._shelves.values():
            shelf.read_at, shelf.all_failed_at = _NEVER, None
            shelf.failed_at.clear()

    def unread(self) -> dict[str, str]:
        """Galleries nobody could read the last time, and why; a copy of an earlier day may stand in for them."""
        return {name: shelf.why for name, shelf in self._shelves.items() if shelf.all_failed_at is not None}

    def states(self) -> list[GalleryState]:
        """Of every gallery but the built-in one, as far as they were read."""
        return [
            GalleryState(
                gallery,
                len(shelf.index.entries) if shelf.index is not None else 0,
                shelf.first_why if shelf.all_failed_at is not None else "",
            )
            for gallery in self.galleries
            if gallery != BUILT_IN and (shelf := self._shelves[gallery.name])
        ]

    async def check(self) -> list[GalleryState]:
        """The same, after those that are due were read."""
        await self.read(self.galleries)
        return self.states()

    async def _try(self, gallery: Gallery) -> I | str:
        try:
            return await self.index(gallery)
        except CorralError as error:
            return error.message

    async def index(self, gallery: Gallery) -> I:
        """Raises Unavailable when there is not even an old copy."""
        shelf = self._shelves[gallery.name]
        if await stamps_of(gallery.candidates) != shelf.stamps:  # a file was changed: that is seen at once
            return await self._reading.run(gallery.name, lambda _: self._read(gallery, shelf))
        now = self._clock.monotonic()
        if shelf.index is not None and now - shelf.read_at < self._options.fresh_s:
            return shelf.index
        if shelf.all_failed_at is not None and now - shelf.all_failed_at < self._options.retry_s:
            if shelf.index is None:
                raise Unavailable(shelf.why)
            return shelf.index
        return await self._reading.run(gallery.name, lambda _: self._read(gallery, shelf))

    async def _read(self, gallery: Gallery, shelf: _Shelf[I]) -> I:
        if gallery == BUILT_IN and self._built_in is not None:
            shelf.index = await asyncio.to_thread(self._built_in)
            shelf.read_at = float("inf")  # it does not change while we run
            return shelf.index
        why: list[str] = []
        # Taken before the files are read: one that changes meanwhile is read again by the next who asks.
        before, shelf.stamps = shelf.stamps, await stamps_of(gallery.candidates)
        if before != shelf.stamps:
            shelf.failed_at.clear()
        for url in usable_candidates(
            gallery.candidates, shelf.failed_at, self._clock.monotonic(), self._options.skip_s
        ):
            try:
                index, body = await self._read_candidate(gallery, url)
            except CorralError as error:
                shelf.failed_at[url] = self._clock.monotonic()
                why.append(error.message)
                continue
            self._accept(shelf, index)
            await asyncio.to_thread(self._keep, gallery, body)
            return index
        return await self._fall_back(gallery, shelf, why)

    async def _read_candidate(self, gallery: Gallery, url: str) -> tuple[I, bytes]:
        try:
            async with asyncio.timeout(self._options.candidate_s):
                body = await self._fetch.fetch(url)
        except TimeoutError as error:
            raise Failed(f"{url} took longer than {self._options.candidate_s:g} s") from error
        index = await asyncio.to_thread(self._read_index, gallery, body)
        if not index.entries:
            raise Failed(f"{url} lists nothing that can be used")
        return index, body

    def _accept(self, shelf: _Shelf[I], index: I) -> None:
        shelf.index, shelf.read_at, shelf.all_failed_at = index, self._clock.monotonic(), None
        log.info("gallery read", gallery=index.gallery.name, entries=len(index.entries), skipped=len(index.problems))
        for problem in index.problems[:20]:
            log.debug("gallery entry skipped", gallery=index.gallery.name, problem=str(problem))

    async def _fall_back(self, gallery: Gallery, shelf: _Shelf[I], reasons: Sequence[str]) -> I:
        why = "; ".join(reasons)
        shelf.all_failed_at, shelf.why, shelf.first_why = self._clock.monotonic(), why, reasons[0]
        if shelf.index is None:
            shelf.index = await asyncio.to_thread(self._last_good_copy, gallery)
        if shelf.index is None:
            log.warning("gallery cannot be read", gallery=gallery.name, error=why)
            raise Unavailable(why)
        log.warning("gallery cannot be read, the last good copy is used", gallery=gallery.name, error=why)
        return shelf.index

    def _keep(self, gallery: Gallery, body: bytes) -> None:
        path = self._copy_path(gallery)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, body)
        except OSError as error:
            log.warning("gallery could not be kept for later", gallery=gallery.name, error=str(error))

    def _last_good_copy(self, gallery: Gallery) -> I | None:
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
    """Of those that are files on this machine."""
    files = [url for url in urls if url.startswith("file://")]
    if not files:
        return ()
    return await asyncio.to_thread(lambda: tuple(stamp_of(url) for url in files))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 1]}…"


def usable_candidates(
    candidates: Sequence[str], failed_at: Mapping[str, float], now: float, skip_s: float
) -> tuple[str, ...]:
    """Those that did not fail lately; all of them when all did."""
    usable = tuple(url for url in candidates if now - failed_at.get(url, _NEVER) >= skip_s)
    return usable or tuple(candidates)
