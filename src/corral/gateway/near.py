"""Names that look like one nobody knows. Pure.

A client that goes on asking for a misspelt model must not keep others waiting: comparing it closely with a thousand
names takes a tenth of a second. So pairs of letters choose a few names first, and what was found is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from itertools import pairwise

from corral.gateway.view import Client
from corral.kit.suggest import similar_names

_NEAR = 3
_LOOKED_AT = 100  # characters of what was asked for
_COMPARED = 10
_REMEMBERED = 256


class NearNames:
    """Among those of one view."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = tuple(names)
        self._pairs: dict[str, frozenset[str]] = {}  # by name; made when somebody asks
        self._found: dict[tuple[str, frozenset[str] | None], list[str]] = {}

    def find(self, asked: str, client: Client) -> list[str]:
        """Of those this client may use, the nearest first."""
        asked = asked[:_LOOKED_AT]
        key = asked, client.models
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            found = self._found[key] = self._find(asked, client)
        return found

    def _find(self, asked: str, client: Client) -> list[str]:
        if not self._pairs:
            self._pairs = {name: _pairs(name) for name in self._names}
        own = _pairs(asked)

        def likeness(name: str) -> float:
            other = self._pairs[name]
            return len(own & other) / (len(own) + len(other) or 1)

        likely = nlargest(_COMPARED, (name for name in self._names if client.may_use(name)), key=likeness)
        return similar_names(asked, likely, limit=_NEAR)


def _pairs(name: str) -> frozenset[str]:
    return frozenset(map("".join, pairwise(name)))
