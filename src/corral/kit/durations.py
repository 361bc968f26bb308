"""Durations as people write them: `10s`, `15m`, `1h30m`, `250ms`, or bare seconds."""

from __future__ import annotations

import math
import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration_s(text: str) -> float:
    """Seconds. Raises ValueError with an example; negative durations are refused."""
    cleaned = text.strip().lower()
    if cleaned.startswith("-"):
        raise ValueError(f"{text!r} is negative; give a duration such as 10s, 15m or 1h30m")
    try:
        seconds = float(cleaned)
    except ValueError:
        seconds = _sum_of_parts(cleaned, text)
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a duration; give one such as 10s, 15m or 1h30m")
    return seconds


def _sum_of_parts(cleaned: str, original: str) -> float:
    parts = list(_PART.finditer(cleaned))
    if not parts or "".join(part.group(0) for part in parts) != cleaned:
        raise ValueError(f"{original!r} is not a duration; give one such as 10s, 15m or 1h30m")
    return sum(float(part.group(1)) * _UNITS[part.group(2)] for part in parts)


def format_duration(seconds: float) -> str:
    """The shortest form that `parse_duration_s` reads back to the millisecond: 90 → `1m30s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms" if seconds else "0s"
    rest_ms = round(seconds * 1000)
    words = []
    for unit, size_ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        count, rest_ms = divmod(rest_ms, size_ms)
        if count:
            words.append(f"{count}{unit}")
    if rest_ms or not words:
        words.append(f"{rest_ms / 1000:g}s")
    return "".join(words)
