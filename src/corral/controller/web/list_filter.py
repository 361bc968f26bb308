"""What a person wants to see of a long list, as it stands in the page's address: one kind, some words, from where on.
Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

from corral.controller.web.words import counted


@dataclass(frozen=True)
class ListFilter:
    """Those with this mark, those with these words in them, from this one on."""

    only: str = ""
    find: str = ""
    at: int = 0

    def query(self, **changes: object) -> str:
        wanted = {"only": self.only, "find": self.find, "at": self.at} | changes
        given = {key: value for key, value in wanted.items() if value}
        return f"?{urlencode(given)}" if given else ""


@dataclass(frozen=True)
class Chip:
    only: str
    words: str
    count: int
    query: str
    chosen: bool


@dataclass(frozen=True)
class Window:
    """The part of the list that is shown, in words, and how to come to the others."""

    filters: ListFilter
    range: str
    previous: str | None  # queries
    next: str | None


def window(filters: ListFilter, fitting: int, total: int, most: int, called: tuple[str, str]) -> Window:
    """`called`: what they are, one and many."""
    at = min(max(0, filters.at), max(0, fitting - 1)) // most * most
    filters = ListFilter(filters.only, filters.find, at)
    return Window(
        filters,
        _range(at, min(most, fitting - at), fitting, total, most, called),
        filters.query(at=at - most) if at else None,
        filters.query(at=at + most) if at + most < fitting else None,
    )


def _range(at: int, shown: int, fitting: int, total: int, most: int, called: tuple[str, str]) -> str:
    if fitting <= most:
        return "" if fitting == total else f"{fitting} of {counted(total, *called)}"
    many = called[1].capitalize()
    return f"{many} {at + 1}–{at + shown} of {fitting}" + (f" ({total} in all)" if fitting != total else "")
