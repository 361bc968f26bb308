"""Suggestions for a misspelt name. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

MAX_LENGTH = 255  # comparing takes quadratic time, and a name from a URL may be 60 kB long
_MIN_PART = 3  # shorter texts are part of too many names


def similar_names(name: str, known: Iterable[str], *, limit: int = 3, cutoff: float = 0.6) -> list[str]:
    """The known names that are spelt like `name`, the most similar first. Upper and lower case are the same."""
    if len(name) > MAX_LENGTH:
        return []
    by_lower = {each.lower(): each for each in known}
    return [by_lower[each] for each in get_close_matches(name.lower(), by_lower, n=limit, cutoff=cutoff)]


def suggest_names(name: str, known: Iterable[str], *, limit: int = 5) -> tuple[str, ...]:
    """The similar names, then the names that contain `name`."""
    known = tuple(known)
    part = name.lower()
    containing = [each for each in known if len(part) >= _MIN_PART and part in each.lower()]
    return tuple(dict.fromkeys((*similar_names(name, known, limit=limit), *containing)))[:limit]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message, with the similar names."""
    return format_suggestions(similar_names(name, known))


def format_suggestions(suggestions: Sequence[str]) -> str:
    """`; did you mean a, b?`, or nothing where there is no suggestion."""
    return f"; did you mean {', '.join(suggestions)}?" if suggestions else ""
