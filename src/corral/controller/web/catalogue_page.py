"""`/fleet/backends/catalogue`: the backends of the galleries, and on which nodes each fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from litestar import get

from corral.controller.backends.catalogue import Catalogue
from corral.controller.backends.gallery_status import BACKENDS as BACKEND_GALLERIES
from corral.controller.backends.gallery_status import GalleryStatus
from corral.controller.operations.backend_views import BackendViews
from corral.controller.web.list_filter import ListFilter, window
from corral.controller.web.navigation import BACKENDS, CATALOGUE
from corral.controller.web.page_context import Page, PageContext, Shown
from corral.controller.web.words import counted

_ENTRIES = 50
_NODES_NAMED = 3
_LONGEST = 240  # of a description
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class CatalogueLine:
    name: str
    alias: str
    version: str
    gallery: str
    about: str
    fits_on: tuple[str, ...]  # nodes, some of them
    fits_more: int  # beside those
    fits_title: str
    installed: str
    usable: bool


@get(CATALOGUE)
async def catalogue_page(
    context: PageContext,
    installed: BackendViews,
    catalogue: Catalogue,
    gallery_status: GalleryStatus,
    filters: ListFilter,
) -> Page:
    async def fill() -> Shown:
        by_kind = await installed.nodes_by_kind()
        fits: dict[str, list[str]] = {}
        for kind, nodes in by_kind.items():
            for entry in await catalogue.available((kind,)):
                fits.setdefault(str(entry["name"]), []).extend(nodes)
        there = {str(each["Name"]): len(each["nodes"]) for each in await installed.everywhere()}
        lines = catalogue_lines(await catalogue.available(()), fits, there, filters)
        shown = window(filters, len(lines), len(lines), _ENTRIES, ("backend", "backends"))
        at = shown.filters.at
        notices = gallery_status.notices(BACKEND_GALLERIES)
        return {"lines": lines[at : at + _ENTRIES], "window": shown, "filters": filters, "notices": notices}

    return await context.page("catalogue.html", BACKENDS, "", fill)


def catalogue_lines(
    entries: Iterable[Entry], fits: Mapping[str, Sequence[str]], installed: Mapping[str, int], filters: ListFilter
) -> list[CatalogueLine]:
    """`fits`: nodes by the name of the backend; `installed`: how many nodes have it. What fits comes first."""
    words = filters.find.lower().split()
    found = {str(entry["name"]): entry for entry in reversed(list(entries))}  # the first gallery wins
    lines = [_line(entry, sorted(fits.get(name, ())), installed.get(name, 0)) for name, entry in found.items()]
    kept = [
        line
        for line in lines
        if all(word in _searched(found[line.name]) for word in words)
        and (filters.only != "fits" or line.usable)
        and (filters.only != "installed" or line.installed)
    ]
    return sorted(kept, key=lambda line: (not line.usable, line.name))


def _line(entry: Entry, nodes: Sequence[str], installed: int) -> CatalogueLine:
    return CatalogueLine(
        name=str(entry["name"]),
        alias=alias if (alias := str(entry.get("alias", ""))) != entry["name"] else "",
        version=str(entry.get("version", "")),
        gallery=str(entry.get("gallery", {}).get("name", "")),
        about=" ".join(str(entry.get("description", "")).split())[:_LONGEST],
        fits_on=tuple(nodes[:_NODES_NAMED]),
        fits_more=max(0, len(nodes) - _NODES_NAMED),
        fits_title=", ".join(nodes) if len(nodes) > _NODES_NAMED else "",
        installed=counted(installed, "node", "nodes") if installed else "",
        usable=bool(nodes),
    )


def _searched(entry: Entry) -> str:
    return " ".join(
        (str(entry["name"]), str(entry.get("alias", "")), str(entry.get("description", "")), *entry.get("tags", ()))
    ).lower()


PAGES = (catalogue_page,)
