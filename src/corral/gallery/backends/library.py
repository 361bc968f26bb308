"""The galleries of backends in use, as one catalogue.

A gallery that cannot be read costs its own entries and nothing else: whoever asks gets a catalogue of the others, and
the reason. What is read is decided by `entries.py`; when, and what stands in for it, by `shelves.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from corral.gallery.backends.builtin import read_built_in
from corral.gallery.backends.catalogue import AliasGroup, Catalogue, Unknown, split_query
from corral.gallery.backends.compatibility import capability_chain
from corral.gallery.backends.entries import BackendEntry, Index, read_index
from corral.gallery.galleries import Gallery
from corral.gallery.index_cache import OPTIONS, Fetch, GalleryState, LibraryOptions, Shelves
from corral.kit.clock import Clock

__all__ = ["Library", "LibraryOptions"]


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
        self._shelves = Shelves(
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
        return self._shelves.galleries

    async def catalogue(self, *names: str) -> Catalogue:
        """Of these galleries, or of all. Never raises for one that cannot be read: it is in `unread`."""
        lowered = {name.lower() for name in names}
        wanted = [gallery for gallery in self.galleries if not names or gallery.name.lower() in lowered]
        results = await self._shelves.read(wanted)
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
        self._shelves.forget()

    def unread(self) -> dict[str, str]:
        """Galleries nobody could read the last time, and why; a copy of an earlier day may stand in for them."""
        return self._shelves.unread()

    def states(self) -> list[GalleryState]:
        return self._shelves.states()

    async def check(self) -> list[GalleryState]:
        """How reading each gallery went, after those that are due were read."""
        return await self._shelves.check()

    async def index(self, gallery: Gallery) -> Index:
        """Raises Unavailable when there is not even an old copy."""
        return await self._shelves.index(gallery)
