"""The configured galleries of models: entries by name, and the definition of an entry with its base document and
variant. URLs in untrusted indexes are kept out of private networks (docs/reference/wire/gallery.md#model-entry).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from corral.contract.models import Definition
from corral.contract.sources import github_url
from corral.gallery.galleries import Gallery
from corral.gallery.index_cache import OPTIONS, Fetch, GalleryState, IndexCache, LibraryOptions, stamps_of
from corral.gallery.index_fetcher import HttpDownloader, IndexFetcher, Stamp, display_url
from corral.gallery.models.definition import Base, make_definition, read_base
from corral.gallery.models.entries import ModelEntry, ModelIndex, read_built_in_models, read_model_index
from corral.gallery.models.variants import FleetMachine, choose_variant
from corral.kit.clock import Clock
from corral.kit.errors import Failed, Invalid, NotFound, Unavailable
from corral.kit.hosts import is_address

_MAX_BASES = 64


@dataclass(frozen=True, slots=True)
class Fetchers:
    """Three functions that fetch documents, by how far the source of the URL is trusted."""

    index: Fetch  # the URL of a gallery, which an administrator configured
    beside: Fetch  # a URL on the host, or in the folder, of the index itself
    elsewhere: Fetch  # any other URL, except in private networks


@dataclass(frozen=True, slots=True)
class _ReadBase:
    base: Base
    read_at: float
    stamps: tuple[Stamp, ...]


class ModelLibrary:
    def __init__(
        self,
        galleries: Sequence[Gallery],
        fetchers: Fetchers,
        *,
        clock: Clock,
        cache_folder: Path | None = None,
        options: LibraryOptions = OPTIONS,
        built_in: Callable[[], ModelIndex] = read_built_in_models,
    ) -> None:
        self._cache = IndexCache(
            galleries,
            fetchers.index,
            read_model_index,
            clock=clock,
            built_in=built_in,
            cache_folder=cache_folder,
            options=options,
        )
        self._fetchers = fetchers
        self._clock = clock
        self._options = options
        self._bases: OrderedDict[str, _ReadBase] = OrderedDict()  # by url

    @property
    def galleries(self) -> tuple[Gallery, ...]:
        return self._cache.galleries

    async def entries(self) -> list[ModelEntry]:
        """All entries that can be read, in the order of the galleries. Entries of the same name are all included."""
        read = await self._cache.read(self.galleries)
        return [entry for index in read if not isinstance(index, str) for entry in index.entries]

    async def find(self, query: str) -> ModelEntry:
        """Find an entry by name or gallery@name, without case; the first gallery wins. Galleries are read in their
        order and no further than needed: a built-in model waits for no server."""
        gallery, name = split_model_query(query)
        wanted = [each for each in self.galleries if gallery in ("", each.name.lower())]
        if not wanted:
            there = ", ".join(each.name for each in self.galleries)
            raise NotFound(f"no gallery of models is called {gallery!r}; there are {there}")
        unread: dict[str, str] = {}
        for each in wanted:
            [index] = await self._cache.read([each])
            if isinstance(index, str):
                unread[each.name] = index
            elif (entry := _named(index, name)) is not None:
                return entry
        message = f"no gallery has a model {query!r}"
        raise Unavailable(with_unread(message, unread)) if gallery and unread else NotInGalleries(message, unread)

    async def define(
        self,
        entry: ModelEntry,
        machines: Sequence[FleetMachine] = (),
        *,
        variant: str = "",
        name: str = "",
        overrides: Mapping[str, Any] | None = None,
    ) -> Definition:
        """A variant keeps the name of the requested entry: clients need not know which variant was chosen."""
        chosen = await self._variant(entry, machines, variant)
        try:
            base = await self._base(chosen) if chosen.url else None
            return make_definition(chosen, base, name=name or entry.name, overrides=overrides)
        except Invalid as error:
            raise Invalid(f"{chosen.id}: {error.message}") from error

    def invalidate(self) -> None:
        self._bases.clear()
        self._cache.invalidate()

    def unread(self) -> dict[str, str]:
        return self._cache.unread()

    def states(self) -> list[GalleryState]:
        return self._cache.states()

    async def check(self) -> list[GalleryState]:
        """The state of each gallery, after those that are due were read."""
        return await self._cache.check()

    async def _variant(self, entry: ModelEntry, machines: Sequence[FleetMachine], wanted: str) -> ModelEntry:
        if not entry.variants or wanted.lower() == entry.name.lower():
            if wanted and wanted.lower() != entry.name.lower():
                raise NotFound(f"{entry.id} has no variants")
            return entry
        index = await self._cache.index(entry.gallery)
        variants = [found for name in entry.variants if (found := _named(index, name.lower())) is not None]
        if not wanted:
            return choose_variant(entry, variants, machines)
        for found in variants:
            if found.name.lower() == wanted.lower():
                return found
        raise NotFound(f"{entry.id} has no variant {wanted!r}; there are {', '.join(entry.variants)}")

    async def _base(self, entry: ModelEntry) -> Base:
        now, stamps = self._clock.monotonic(), await stamps_of([entry.url])
        known = self._bases.get(entry.url)
        if known is not None and now - known.read_at < self._options.fresh_s and known.stamps == stamps:
            return known.base
        try:
            async with asyncio.timeout(self._options.candidate_s):
                body = await self._fetcher(entry)(entry.url)
        except TimeoutError as error:
            raise Failed(f"{entry.url} took longer than {self._options.candidate_s:g} s") from error
        try:
            base = read_base(body)
        except Invalid as error:
            raise Invalid(f"its base document {display_url(entry.url)}: {error.message}") from error
        self._bases[entry.url] = _ReadBase(base, now, stamps)
        while len(self._bases) > _MAX_BASES:
            self._bases.popitem(last=False)
        return base

    def _fetcher(self, entry: ModelEntry) -> Fetch:
        home = [_as_url(place) for place in entry.gallery.candidates]
        if entry.url.startswith("file://"):
            if not any(place.startswith("file://") for place in home):
                raise Invalid(
                    f"{entry.id} names a path on this machine; only a gallery that is a local file may do that"
                )
            return self._fetchers.beside
        at_home = any(same_host(_as_url(entry.url), place) for place in home)
        return self._fetchers.beside if at_home else self._fetchers.elsewhere


class NotInGalleries(NotFound):
    """`unread`: galleries that could not be read, and why. They may contain the model."""

    def __init__(self, message: str, unread: Mapping[str, str]) -> None:
        super().__init__(with_unread(message, unread))
        self.unread = dict(unread)


def with_unread(message: str, unread: Mapping[str, str]) -> str:
    """The message in the first line; each cause, which is long, in a line of its own."""
    return "\n".join((message, *(f"the gallery {name} could not be read: {why}" for name, why in unread.items())))


def make_model_library(
    session: aiohttp.ClientSession,
    galleries: Sequence[Gallery],
    *,
    clock: Clock,
    base_folder: Path | None = None,
    cache_folder: Path | None = None,
    options: LibraryOptions = OPTIONS,
) -> ModelLibrary:
    trusted = IndexFetcher(HttpDownloader(session), base_folder=base_folder)
    restricted = IndexFetcher(HttpDownloader(session, check=refuse_private))
    return ModelLibrary(
        galleries,
        Fetchers(trusted.fetch, trusted.fetch, restricted.fetch),
        clock=clock,
        cache_folder=cache_folder / "models" if cache_folder is not None else None,
        options=options,
    )


def split_model_query(query: str) -> tuple[str, str]:
    """Split `gallery@name`, in lower case, at the first @."""
    gallery, at, name = query.strip().partition("@")
    return (gallery.lower(), name.lower()) if at else ("", query.strip().lower())


def _named(index: ModelIndex, name: str) -> ModelEntry | None:
    # A name with a slash may be written as its file name.
    return next((each for each in index.entries if name in (low := each.name.lower(), low.replace("/", "__"))), None)


def _as_url(place: str) -> str:
    return github_url(place.removeprefix("github:").lstrip("/")) if place.startswith("github:") else place


async def refuse_private(url: str) -> None:
    """Raises Invalid for a host that is, or resolves to, an address that is not global.

    A name could resolve to another address a moment later; only the owner of a configured index could make use of that.
    A name that cannot be resolved here is accepted: a proxy may resolve it."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = [host] if is_address(host) else await _resolve(host)
    except OSError:
        return
    if any(not ipaddress.ip_address(address.partition("%")[0]).is_global for address in addresses):
        raise Invalid(f"{host} is in a private network: a gallery on another host must not refer to it")


def same_host(url: str, other: str) -> bool:
    """Whether both URLs have the same host: the host of an index may serve its documents."""
    return bool(urlsplit(url).hostname) and urlsplit(url).hostname == urlsplit(other).hostname


async def _resolve(host: str) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(place[4][0]) for place in found]
