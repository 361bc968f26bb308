"""Which galleries can be read: for `GET /api/galleries`, `corral doctor` and the page."""

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
        """`libraries` by what they list: `backends` and `models`."""
        self._libraries = dict(libraries)

    async def read(self) -> list[GalleryView]:
        """Every gallery but the built-in ones, read if that is due: another controller may have been asked before."""
        return [_view(kind, state) for kind, library in self._libraries.items() for state in await library.check()]

    def notices(self, kind: str = "") -> Sequence[str]:
        """One sentence per gallery that could not be read when this controller tried last. A gallery of the same name
        and trouble in both kinds is told once."""
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
