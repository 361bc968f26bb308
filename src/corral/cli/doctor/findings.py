"""What a check found: a level, what it is about, what was seen, and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from corral.cli.output import plain


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    level: Level
    about: str
    seen: str
    mend: str = ""

    def as_data(self) -> dict[str, str]:
        return {"level": self.level.value, "about": self.about, "seen": self.seen, "mend": self.mend}


def ok(about: str, seen: str) -> Finding:
    return Finding(Level.OK, about, seen)


def warn(about: str, seen: str, mend: str) -> Finding:
    return Finding(Level.WARN, about, seen, mend)


def fail(about: str, seen: str, mend: str) -> Finding:
    return Finding(Level.FAIL, about, seen, mend)


def rows(findings: Iterable[Finding]) -> list[tuple[str, str, str]]:
    """What to do comes right after what was seen: one line per finding."""
    return [
        (each.level.value, each.about, plain(each.seen) + (f" → {plain(each.mend)}" if each.mend else ""))
        for each in findings
    ]


def summary(findings: Iterable[Finding]) -> str:
    levels = [each.level for each in findings]
    failed, warned = levels.count(Level.FAIL), levels.count(Level.WARN)
    if not failed and not warned:
        return "everything is well"
    parts = [f"{failed} to mend"] if failed else []
    parts += [f"{warned} to look at"] if warned else []
    return ", ".join(parts)
