"""A gallery put together for a process: its own HTTP session, the cache folder, the tools this machine has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from corral.contract.sources import Registry
from corral.gallery.backends.builtin import read_built_in
from corral.gallery.backends.library import Library, LibraryOptions
from corral.gallery.backends.locator import LocatingOptions, Locator
from corral.gallery.backends.resolver import Resolver
from corral.gallery.galleries import Gallery
from corral.gallery.index_fetcher import HttpDownload, IndexFetcher
from corral.gallery.pypi.find_locker import find_locker
from corral.gallery.pypi.lock import WheelLocker
from corral.gallery.pypi.pip import own_python
from corral.gallery.pypi.sizes import WheelSizes
from corral.gallery.pypi.tags import Floor
from corral.kit.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class GalleryOptions:
    galleries: Sequence[Gallery] = ()
    built_in: bool = True  # False for orders of a LocalAI controller: its names mean its own builds
    base_folder: Path | None = None  # file:// galleries must be inside
    cache_folder: Path | None = None  # last good copies and uv's cache
    library: LibraryOptions = field(default_factory=LibraryOptions)
    locating: LocatingOptions = field(default_factory=LocatingOptions)
    floor: Floor = field(default_factory=Floor)
    connect_s: float = 10.0
    silence_s: float = 60.0  # without a byte
    lock_s: float = 300.0


@asynccontextmanager
async def open_resolver(
    options: GalleryOptions,
    registry: Registry,
    *,
    clock: Clock,
    env: Mapping[str, str],
    locker: WheelLocker | None = None,
) -> AsyncIterator[Resolver]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.connect_s, sock_read=options.silence_s)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True, cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield make_resolver(session, options, registry, clock=clock, env=env, locker=locker)


def make_resolver(
    session: aiohttp.ClientSession,
    options: GalleryOptions,
    registry: Registry,
    *,
    clock: Clock,
    env: Mapping[str, str],
    locker: WheelLocker | None = None,
) -> Resolver:
    """For whoever has a session already, or needs several resolvers."""
    fetcher = IndexFetcher(HttpDownload(session), base_folder=options.base_folder)
    library = Library(
        options.galleries,
        fetcher,
        clock=clock,
        cache_folder=options.cache_folder,
        options=options.library,
        built_in=read_built_in if options.built_in else None,
    )
    uv_cache = options.cache_folder / "uv" if options.cache_folder is not None else None
    locating = replace(options.locating, own_python=options.locating.own_python or own_python())
    locator = Locator(
        registry,
        locker or find_locker(env, floor=options.floor, timeout_s=options.lock_s, cache_folder=uv_cache),
        clock=clock,
        measure=WheelSizes(session),
        options=locating,
    )
    return Resolver(library, locator)
