"""Texts of several lines, where there is room for one."""

from __future__ import annotations


def in_short(text: str) -> str:
    """The first line and the last: what happened, and what was said in the end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " … ".join(lines if len(lines) < 2 else (lines[0], lines[-1]))
