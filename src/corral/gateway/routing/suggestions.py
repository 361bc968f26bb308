"""Suggests names of models that are similar to an unknown one. Pure.

A client that repeats a misspelt name must not slow down the others: a close comparison with a thousand names takes a
tenth of a second. So pairs of letters preselect a few names, and results are cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from itertools import pairwise

from corral.gateway.view.fleet import Client
from corral.kit.humanize import similar_names

MAX_SUGGESTIONS = 3
_MAX_COMPARED_CHARACTERS = 100
_PRESELECTED = 10
MAX_CACHED = 256


class ModelSuggestions:
    """Among the names of one view."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = tuple(names)
        self._pairs: dict[str, frozenset[str]] = {}  # by name; built at the first call
        self._found: dict[tuple[str, frozenset[str] | None], list[str]] = {}

    def find(self, unknown: str, client: Client) -> list[str]:
        """Similar names among those that this client may use, the most similar first."""
        unknown = unknown[:_MAX_COMPARED_CHARACTERS]
        key = unknown, client.models
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= MAX_CACHED:
                self._found.clear()
            found = self._found[key] = self._find(unknown, client)
        return found

    def _find(self, unknown: str, client: Client) -> list[str]:
        if not self._pairs:
            self._pairs = {name: _pairs(name) for name in self._names}
        pairs = _pairs(unknown)

        def likeness(name: str) -> float:
            other = self._pairs[name]
            return len(pairs & other) / (len(pairs) + len(other) or 1)

        likely = nlargest(_PRESELECTED, (name for name in self._names if client.may_use(name)), key=likeness)
        return similar_names(unknown, likely, limit=MAX_SUGGESTIONS)


def _pairs(name: str) -> frozenset[str]:
    return frozenset(map("".join, pairwise(name)))
