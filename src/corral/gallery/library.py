"""The galleries in use: read when first needed, remembered, and served from the last good copy when nobody answers.

A gallery that cannot be read costs its own entries and nothing else: whoever asks gets a catalogue of the others, and
the reason. What is read is decided by `entries.py`, where it is found by `fetching.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from corral.gallery.builtin import read_built_in
from corral.gallery.catalogue import AliasGroup, Catalogue, Unknown, split_query
from corral.gallery.compatibility import capability_chain
from corral.gallery.entries import BackendEntry, Index, read_index
from corral.gallery.galleries import BUILT_IN, Gallery
from corral.gallery.sharing import SharedWork
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, Unavailable
from corral.kit.files import write_atomically
from corral.kit.log import get_log

log = get_log(__name__)


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


@dataclass
class _Shelf:
    index: Index | None = None
    read_at: float = _NEVER  # a copy from the disk is not fresh, however recently the machine was started
    failed_at: dict[str, float] = field(default_factory=dict)  # candidate → when
    all_failed_at: float | None = None
    why: str = ""


class Library:
    def __init__(
        self,
        galleries: Sequence[Gallery],
        fetch: Fetch,
        *,
        clock: Clock,
        cache_folder: Path | None = None,
        options: LibraryOptions = OPTIONS,
        built_in: Callable[[], Index] | None = read_built_in,
    ) -> None:
        """`built_in` None: without ours, as a worker of somebody else's controller must be."""
        self.galleries = (BUILT_IN, *galleries) if built_in is not None else tuple(galleries)
        self._fetch = fetch
        self._clock = clock
        self._cache_folder = cache_folder
        self._options = options
        self._built_in = built_in
        self._shelves = {gallery.name: _Shelf() for gallery in self.galleries}
        self._reading: SharedWork[str, Index] = SharedWork()

    async def catalogue(self, *names: str) -> Catalogue:
        """Of these galleries, or of all. Never raises for one that cannot be read: it is in `unread`."""
        lowered = {name.lower() for name in names}
        wanted = [gallery for gallery in self.galleries if not names or gallery.name.lower() in lowered]
        async with asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(self._try(gallery)) for gallery in wanted]
        results = [task.result() for task in reading]
        unread = {gallery.name: why for gallery, why in zip(wanted, results, strict=True) if isinstance(why, str)}
        return Catalogue([index for index in results if isinstance(index, Index)], unread)

    async def find(self, query: str) -> tuple[BackendEntry | AliasGroup | Unknown, Catalogue]:
        """The entry, and the catalogue it was found in.

        Galleries are read in their order and no further than needed: what is built in waits for nobody's server.
        """
        wanted, _ = split_query(query)
        names = [gallery.name for gallery in self.galleries if wanted in ("", gallery.name.lower())]
        catalogue = Catalogue(())
        for count in range(1, len(names) + 1):
            catalogue = await self.catalogue(*names[:count])
            if isinstance(found := catalogue.find(query), BackendEntry):
                return found, catalogue
        if not names:
            there = ", ".join(gallery.name for gallery in self.galleries)
            return Unknown(query, why=f"no gallery is called {wanted!r}; there are {there}"), catalogue
        # An alias only when no gallery has the name: a later gallery's entry beats an earlier one's alias.
        return catalogue.find(query), catalogue

    async def with_builds(
        self, meta: BackendEntry, catalogue: Catalogue, machines: Iterable[tuple[str, str]]
    ) -> Catalogue:
        """The catalogue with the galleries in which these machines' (capability, platform) builds of a meta are."""
        keys = {key for capability, platform in machines for key in capability_chain(capability, platform)}
        named = {split_query(value)[0] for key, value in meta.capabilities.items() if key in keys} - {""}
        read = {index.gallery.name.lower() for index in catalogue.indexes} | {name.lower() for name in catalogue.unread}
        return catalogue if named <= read else await self.catalogue(*read, *named)

    def forget(self) -> None:
        """The next to ask reads again, also from those that failed."""
        for shelf in self._shelves.values():
            shelf.read_at, shelf.all_failed_at = _NEVER, None
            shelf.failed_at.clear()

    def unread(self) -> dict[str, str]:
        """Galleries nobody could read the last time, and why; a copy of an earlier day may stand in for them."""
        return {name: shelf.why for name, shelf in self._shelves.items() if shelf.all_failed_at is not None}

    async def _try(self, gallery: Gallery) -> Index | str:
        try:
            return await self.index(gallery)
        except CorralError as error:
            return error.message

    async def index(self, gallery: Gallery) -> Index:
        """Raises Unavailable when there is not even an old copy."""
        shelf = self._shelves[gallery.name]
        now = self._clock.monotonic()
        if shelf.index is not None and now - shelf.read_at < self._options.fresh_s:
            return shelf.index
        if shelf.all_failed_at is not None and now - shelf.all_failed_at < self._options.retry_s:
            if shelf.index is None:
                raise Unavailable(shelf.why)
            return shelf.index
        return await self._reading.do(gallery.name, lambda: self._read(gallery, shelf))

    async def _read(self, gallery: Gallery, shelf: _Shelf) -> Index:
        if gallery == BUILT_IN and self._built_in is not None:
            shelf.index = await asyncio.to_thread(self._built_in)
            shelf.read_at = float("inf")  # it does not change while we run
            return shelf.index
        why: list[str] = []
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
        return await self._fall_back(gallery, shelf, "; ".join(why))

    async def _read_candidate(self, gallery: Gallery, url: str) -> tuple[Index, bytes]:
        try:
            async with asyncio.timeout(self._options.candidate_s):
                body = await self._fetch.fetch(url)
        except TimeoutError as error:
            raise Failed(f"{url} took longer than {self._options.candidate_s:g} s") from error
        index = await asyncio.to_thread(read_index, gallery, body)
        if not index.entries:
            raise Failed(f"{url} lists nothing that can be used")
        return index, body

    def _accept(self, shelf: _Shelf, index: Index) -> None:
        shelf.index, shelf.read_at, shelf.all_failed_at = index, self._clock.monotonic(), None
        log.info("gallery read", gallery=index.gallery.name, entries=len(index.entries), skipped=len(index.problems))
        for problem in index.problems[:20]:
            log.debug("gallery entry skipped", gallery=index.gallery.name, problem=str(problem))

    async def _fall_back(self, gallery: Gallery, shelf: _Shelf, why: str) -> Index:
        shelf.all_failed_at, shelf.why = self._clock.monotonic(), why
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

    def _last_good_copy(self, gallery: Gallery) -> Index | None:
        path = self._copy_path(gallery)
        try:
            return read_index(gallery, path.read_bytes()) if path is not None else None
        except FileNotFoundError:
            return None
        except (OSError, CorralError) as error:
            log.warning("last good copy cannot be read", gallery=gallery.name, error=str(error))
            return None

    def _copy_path(self, gallery: Gallery) -> Path | None:
        if self._cache_folder is None:
            return None
        return self._cache_folder / "gallery" / f"{hashlib.sha256(gallery.url.encode()).hexdigest()}.yaml"


def usable_candidates(
    candidates: Sequence[str], failed_at: Mapping[str, float], now: float, skip_s: float
) -> tuple[str, ...]:
    """Those that did not fail lately; all of them when all did."""
    usable = tuple(url for url in candidates if now - failed_at.get(url, _NEVER) >= skip_s)
    return usable or tuple(candidates)
