"""Values as people read them: sizes, long texts on one line, YAML, suggestions for a misspelt name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

_BYTE_COUNT = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,9})?)\s*(?P<unit>|b|[kmgt]i?b?)(?:/s)?")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MAX_NAME = 255  # comparing takes quadratic time, and a name from a URL may be 60 kB long
_MIN_NAME_PART = 3  # shorter texts are part of too many names


def format_bytes(count: int) -> str:
    """Binary units with one decimal: `17 B`, `412.0 MiB`. The wire contract uses this form."""
    size, unit = float(count), "B"
    for unit in _UNITS:
        # 1023.96 KiB would be shown as 1024.0 KiB: it belongs to the next unit.
        if round(size, 1) < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def parse_byte_count(text: str) -> float:
    """The number in `20MB`, `512 KiB/s` or `1000`. Raises ValueError with a sentence."""
    found = _BYTE_COUNT.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a number of bytes; give one such as 20MB or 512KiB")
    unit = found["unit"]
    base = 1024 if "i" in unit else 1000
    power = " kmgt".index(unit[:1] if unit[:1] not in ("", "b") else " ")
    return float(found["number"]) * float(base**power)


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def first_and_last_line(text: str) -> str:
    """A text of several lines on one line: its first and its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " … ".join(lines if len(lines) < 2 else (lines[0], lines[-1]))


def to_yaml(document: Mapping[str, Any], *, first: str = "name") -> str:
    """The mapping as YAML, with the key `first` at the top and texts of several lines as blocks."""
    import yaml  # here: most importers of this module do not need it

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    ordered = {key: document[key] for key in sorted(document, key=lambda key: key != first)}
    return str(yaml.dump(ordered, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))


def similar_names(name: str, known: Iterable[str], *, limit: int = 3, cutoff: float = 0.6) -> list[str]:
    """The known names that are spelt like `name`, the most similar first. Upper and lower case are the same."""
    if len(name) > _MAX_NAME:
        return []
    by_lower = {each.lower(): each for each in known}
    return [by_lower[each] for each in get_close_matches(name.lower(), by_lower, n=limit, cutoff=cutoff)]


def suggest_names(name: str, known: Iterable[str], *, limit: int = 5) -> tuple[str, ...]:
    """The similar names, then the names that contain `name`."""
    known = tuple(known)
    part = name.lower()
    containing = [each for each in known if len(part) >= _MIN_NAME_PART and part in each.lower()]
    return tuple(dict.fromkeys((*similar_names(name, known, limit=limit), *containing)))[:limit]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message, with the similar names."""
    return format_suggestions(similar_names(name, known))


def format_suggestions(suggestions: Sequence[str]) -> str:
    """`; did you mean a, b?`, or nothing where there is no suggestion."""
    return f"; did you mean {', '.join(suggestions)}?" if suggestions else ""
