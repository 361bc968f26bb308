"""The configured galleries of backends, as one catalogue.

A gallery that cannot be read costs only its own entries: the catalogue has the others, and the reason. `entries.py`
parses an index; `index_cache.py` decides when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from corral.gallery.backends.builtin import read_built_in
from corral.gallery.backends.catalogue import AliasGroup, BackendCatalogue, UnknownBackend, split_query
from corral.gallery.backends.compatibility import capability_chain
from corral.gallery.backends.entries import BackendEntry, BackendIndex, read_index
from corral.gallery.galleries import Gallery
from corral.gallery.index_cache import OPTIONS, Fetch, GalleryState, IndexCache, LibraryOptions
from corral.kit.clock import Clock

__all__ = ["BackendLibrary", "LibraryOptions"]


class BackendLibrary:
    def __init__(
        self,
        galleries: Sequence[Gallery],
        fetch: Fetch,
        *,
        clock: Clock,
        cache_folder: Path | None = None,
        options: LibraryOptions = OPTIONS,
        built_in: Callable[[], BackendIndex] | None = read_built_in,
    ) -> None:
        """`built_in` None: without the built-in gallery, for a worker of a LocalAI controller."""
        self._cache = IndexCache(
            galleries,
            fetch,
            read_index,
            clock=clock,
            built_in=built_in,
            cache_folder=cache_folder,
            options=options,
        )

    @property
    def galleries(self) -> tuple[Gallery, ...]:
        return self._cache.galleries

    async def catalogue(self, *names: str) -> BackendCatalogue:
        """The catalogue of these galleries, or of all. A gallery that cannot be read is in `unread`."""
        lowered = {name.lower() for name in names}
        wanted = [gallery for gallery in self.galleries if not names or gallery.name.lower() in lowered]
        results = await self._cache.read(wanted)
        unread = {gallery.name: why for gallery, why in zip(wanted, results, strict=True) if isinstance(why, str)}
        return BackendCatalogue([index for index in results if not isinstance(index, str)], unread)

    async def find(self, query: str) -> tuple[BackendEntry | AliasGroup | UnknownBackend, BackendCatalogue]:
        """The entry, and the catalogue that contains it.

        Galleries are read in their order and no further than needed: a built-in backend waits for no server.
        """
        wanted, _ = split_query(query)
        names = [gallery.name for gallery in self.galleries if wanted in ("", gallery.name.lower())]
        catalogue = BackendCatalogue(())
        for count in range(1, len(names) + 1):
            catalogue = await self.catalogue(*names[:count])
            if isinstance(found := catalogue.find(query), BackendEntry):
                return found, catalogue
        if not names:
            there = ", ".join(gallery.name for gallery in self.galleries)
            return UnknownBackend(query, why=f"no gallery is called {wanted!r}; there are {there}"), catalogue
        # An alias counts only if no gallery has the name: an entry of a later gallery wins over an alias of an earlier
        # one.
        return catalogue.find(query), catalogue

    async def with_builds(
        self, meta: BackendEntry, catalogue: BackendCatalogue, machines: Iterable[tuple[str, str]]
    ) -> BackendCatalogue:
        """The catalogue, extended by the galleries that contain the meta's builds for these (capability, platform)
        pairs."""
        keys = {key for capability, platform in machines for key in capability_chain(capability, platform)}
        named = {split_query(value)[0] for key, value in meta.capabilities.items() if key in keys} - {""}
        read = {index.gallery.name.lower() for index in catalogue.indexes} | {name.lower() for name in catalogue.unread}
        return catalogue if named <= read else await self.catalogue(*read, *named)

    def invalidate(self) -> None:
        """The next call reads all galleries again, including those that failed."""
        self._cache.invalidate()

    def unread(self) -> dict[str, str]:
        """Galleries that could not be read the last time, and why; an old copy may be in use for them."""
        return self._cache.unread()

    def states(self) -> list[GalleryState]:
        return self._cache.states()

    async def check(self) -> list[GalleryState]:
        """The state of each gallery, after those that are due were read."""
        return await self._cache.check()

    async def index(self, gallery: Gallery) -> BackendIndex:
        """Raises Unavailable if there is not even an old copy."""
        return await self._cache.index(gallery)
