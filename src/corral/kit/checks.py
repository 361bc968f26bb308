"""What a setting's value must be, where more than one process asks the same: each gives the fault in words, or None."""

from __future__ import annotations

_LEVELS = ("debug", "info", "warning", "error")


def positive(value: float) -> str | None:
    return None if value > 0 else "must be more than zero"


def at_least_one(value: int) -> str | None:
    return None if value >= 1 else f"{value} is less than 1"


def a_port(value: int) -> str | None:
    return None if 0 <= value <= 65535 else f"{value} is not a port; give 0 (any free one) to 65535"


def a_log_level(value: str) -> str | None:
    return None if value.lower() in _LEVELS else f"{value!r} is none of {', '.join(_LEVELS)}"
