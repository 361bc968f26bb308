"""Search over the names of nodes, models, backends and operations. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_OF_A_KIND = 6
MAX_ON_THE_PAGE = 50


@dataclass(frozen=True)
class Candidate:
    """Something that can be found: by its name, and by the words about it."""

    kind: str  # Node, Model, Backend, Operation
    name: str
    href: str
    words: str = ""
    state: str = ""
    more: str = ""  # searched, not shown


@dataclass(frozen=True)
class SearchGroup:
    kind: str
    hits: tuple[Candidate, ...]
    more: int


def search(candidates: Iterable[Candidate], query: str, most: int) -> tuple[SearchGroup, ...]:
    """By kind, in the order of the candidates; names that begin with the query first. Every word must be there."""
    words = query.lower().split()
    groups: dict[str, list[Candidate]] = {}
    for each in candidates:
        found = groups.setdefault(each.kind, [])
        if words and all(word in f"{each.name} {each.words} {each.more}".lower() for word in words):
            found.append(each)
    return tuple(
        SearchGroup(kind, tuple(_ranked(found, words)[:most]), max(0, len(found) - most))
        for kind, found in groups.items()
        if found
    )


def _ranked(found: Sequence[Candidate], words: Sequence[str]) -> list[Candidate]:
    def rank(each: Candidate) -> tuple[int, str]:
        name = each.name.lower()
        if name == words[0]:
            return 0, name
        return (1 if name.startswith(words[0]) else 2 if words[0] in name else 3), name

    return sorted(found, key=rank)
