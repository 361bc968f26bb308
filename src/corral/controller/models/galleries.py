"""Serves the model galleries to the model service: variants are chosen for the present nodes of the fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp

from corral.contract.hardware import DEFAULT
from corral.contract.messages.nodes import NodeStatus
from corral.contract.models import Definition
from corral.controller.models.suggestions import UnknownModel, suggestions_for
from corral.gallery.backends.factory import GalleryOptions
from corral.gallery.models.entries import ModelEntry
from corral.gallery.models.library import ModelLibrary, NotInGalleries, make_model_library
from corral.gallery.models.variants import FleetMachine
from corral.kit.clock import Clock
from corral.store.engine.transactions import Store
from corral.store.tables import nodes


class BundledModels(Protocol):
    """Models of loaded bundles: they are found before any gallery is read."""

    def list_models(self) -> list[ModelEntry]: ...

    def find_model(self, query: str, /) -> ModelEntry | None: ...


class ModelGalleries:
    """The galleries of models, for the model service."""

    def __init__(self, store: Store, library: ModelLibrary, bundled: BundledModels | None = None) -> None:
        self._bundled = bundled
        self._store = store
        self._library = library

    async def available(self) -> Sequence[ModelEntry]:
        """All entries, those of bundles first, in the order of the galleries, without those of unreadable galleries."""
        bundled = self._bundled.list_models() if self._bundled is not None else []
        return [*bundled, *await self._library.entries()]

    async def find(self, query: str) -> ModelEntry:
        """By name or gallery@name. Raises NotFound with similar names, Unavailable when its gallery does not answer."""
        if self._bundled is not None and (bundled := self._bundled.find_model(query)) is not None:
            return bundled
        try:
            return await self._library.find(query)
        except NotInGalleries as error:
            known = [entry.name for entry in await self._library.entries()]
            next_step = suggestions_for(query, known) or "; `corral models available` lists the names"
            message = f"no gallery has a model {query!r}{next_step}"
            raise UnknownModel(message, known, error.unread) from error

    async def define(
        self, entry: ModelEntry, *, variant: str = "", name: str = "", overrides: Mapping[str, Any] | None = None
    ) -> Definition:
        """The definition. Raises NotFound for an unknown variant, Invalid for an unusable entry."""
        machines = await self._machines() if entry.variants and not variant else ()
        return await self._library.define(entry, machines, variant=variant, name=name, overrides=overrides)

    async def refresh(self) -> None:
        """Have the next call read the galleries again."""
        self._library.invalidate()

    @property
    def library(self) -> ModelLibrary:
        return self._library

    def unread(self) -> Mapping[str, str]:
        """Galleries that could not be read last time, and why."""
        return self._library.unread()

    async def _machines(self) -> tuple[FleetMachine, ...]:
        async with self._store.read() as tx:
            rows = await nodes.list_(tx)
        return tuple(
            FleetMachine(
                row.capability or DEFAULT, row.vram_budget_bytes or row.total_vram if row.total_vram else row.total_ram
            )
            for row in rows
            if row.approved and row.status != NodeStatus.OFFLINE
        )


@asynccontextmanager
async def open_model_galleries(
    store: Store, options: GalleryOptions, *, clock: Clock, bundled: BundledModels | None = None
) -> AsyncIterator[ModelGalleries]:
    """`options.galleries` are those of models."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=options.connect_s, sock_read=options.silence_s)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True, cookie_jar=aiohttp.DummyCookieJar()) as session:
        library = make_model_library(
            session,
            options.galleries,
            clock=clock,
            base_folder=options.base_folder,
            cache_folder=options.cache_folder,
            options=options.library,
        )
        yield ModelGalleries(store, library, bundled)
