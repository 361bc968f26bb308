"""Subjects and patterns: `*` stands for one token, a final `>` for one or more. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def matches(pattern: str, subject: str) -> bool:
    """Does a subscription to `pattern` receive a message on `subject`?"""
    return _covers(pattern.split("."), subject.split("."))


def covers(wide: str, narrow: str) -> bool:
    """Does `wide` allow everything that `narrow`, itself perhaps a pattern, could ever match?"""
    return _covers(wide.split("."), narrow.split("."))


def _covers(wide: Sequence[str], narrow: Sequence[str]) -> bool:
    for place, token in enumerate(wide):
        if token == ">":
            return len(narrow) > place
        if place >= len(narrow) or narrow[place] == ">":
            return False
        if token != "*" and token != narrow[place]:
            return False
    return len(wide) == len(narrow)
