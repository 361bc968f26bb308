"""The state of each gallery: for `GET /api/galleries`, `corral doctor` and the web page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from corral.contract.admin import GalleryView
from corral.gallery.index_cache import GalleryState

BACKENDS, MODELS = "backends", "models"


class GalleryIndex(Protocol):
    """`gallery.library.Library` and `gallery.models.library.ModelLibrary`."""

    def states(self) -> list[GalleryState]: ...

    async def check(self) -> list[GalleryState]: ...


class GalleryStatus:
    def __init__(self, libraries: Mapping[str, GalleryIndex]) -> None:
        """`libraries` by the kind of their entries: `backends` and `models`."""
        self._libraries = dict(libraries)

    async def read(self) -> list[GalleryView]:
        """Every gallery except the built-in ones; reads those whose copy is too old."""
        return [_view(kind, state) for kind, library in self._libraries.items() for state in await library.check()]

    def notices(self, kind: str = "") -> Sequence[str]:
        """One sentence per gallery that this controller could not read the last time; equal sentences only once."""
        found = (
            state.notice
            for each, library in self._libraries.items()
            if kind in ("", each)
            for state in library.states()
        )
        return list(dict.fromkeys(notice for notice in found if notice))


def _view(kind: str, state: GalleryState) -> GalleryView:
    gallery = state.gallery
    return GalleryView(kind, gallery.name, gallery.url, gallery.mirrors, state.entries, state.error, state.notice)
