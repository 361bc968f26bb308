"""Names somebody may have meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST = 5
_SHORTEST = 3  # shorter words are inside everything


def nearest(name: str, known: Iterable[str], most: int = _MOST) -> tuple[str, ...]:
    """Those like it, then those with it inside; case does not matter."""
    name = name.lower()
    names = {each.lower(): each for each in known}
    like = [names[each] for each in difflib.get_close_matches(name, names, n=most, cutoff=0.6)]
    inside = [each for low, each in names.items() if len(name) >= _SHORTEST and name in low]
    return tuple(dict.fromkeys((*like, *sorted(inside))))[:most]


def unknown_model(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f"there is no model {name!r}" + (f"; near it: {', '.join(near)}" if near else "")
