"""Builds a resolver for a process: its HTTP session, its cache folder, the tools of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from corral.contract.sources import Registry
from corral.gallery.backends.builtin import read_built_in
from corral.gallery.backends.library import BackendLibrary, LibraryOptions
from corral.gallery.backends.locator import BuildLocator, LocatorOptions
from corral.gallery.backends.resolver import Resolver
from corral.gallery.galleries import Gallery
from corral.gallery.index_fetcher import HttpDownloader, IndexFetcher
from corral.gallery.pypi.find_locker import find_locker
from corral.gallery.pypi.lock import WheelLocker
from corral.gallery.pypi.pip import own_python
from corral.gallery.pypi.wheel_sizes import WheelSizes
from corral.gallery.pypi.wheel_tags import MinimumSystem
from corral.kit.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class GalleryOptions:
    galleries: Sequence[Gallery] = ()
    built_in: bool = True  # False for orders of a LocalAI controller: its names refer to its own builds
    base_folder: Path | None = None  # file:// galleries must be inside
    cache_folder: Path | None = None  # last good copies and uv's cache
    library: LibraryOptions = field(default_factory=LibraryOptions)
    locating: LocatorOptions = field(default_factory=LocatorOptions)
    minimum: MinimumSystem = field(default_factory=MinimumSystem)
    connect_s: float = 10.0
    silence_s: float = 60.0  # timeout without a received byte
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
    """For a caller that has a session already, or needs several resolvers."""
    fetcher = IndexFetcher(HttpDownloader(session), base_folder=options.base_folder)
    library = BackendLibrary(
        options.galleries,
        fetcher.fetch,
        clock=clock,
        cache_folder=options.cache_folder,
        options=options.library,
        built_in=read_built_in if options.built_in else None,
    )
    uv_cache = options.cache_folder / "uv" if options.cache_folder is not None else None
    locating = replace(options.locating, own_python=options.locating.own_python or own_python())
    locator = BuildLocator(
        registry,
        locker or find_locker(env, minimum=options.minimum, timeout_s=options.lock_s, cache_folder=uv_cache),
        clock=clock,
        fill_sizes=WheelSizes(session).fill,
        options=locating,
    )
    return Resolver(library, locator)
