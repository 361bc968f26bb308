"""What differs between two mappings, in lines people read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_LONGEST = 80


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """`parameters.temperature: 0.2 → 0.5`, `+ f16: true`, `- parallel: 2`, by key."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    lines = []
    for path in sorted(old.keys() | new.keys()):
        if path not in old:
            lines.append(f"+ {path}: {_shown(new[path])}")
        elif path not in new:
            lines.append(f"- {path}: {_shown(old[path])}")
        elif old[path] != new[path] or type(old[path]) is not type(new[path]):
            lines.append(f"{path}: {_shown(old[path])} → {_shown(new[path])}")
    return tuple(lines)


def _leaves(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            found += _leaves(inner, f"{path}.")
        else:
            found.append((path, inner))
    return found


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = " ".join(text.split()) if text else '""'
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
