"""The result of a check: a level, the subject, the observation, and how to fix a problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from corral.cli.common.output import printable


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    level: Level
    about: str
    seen: str
    fix: str = ""

    def as_data(self) -> dict[str, str]:
        # `mend` is the name of `fix` in earlier releases; scripts may read it.
        return {"level": self.level.value, "about": self.about, "seen": self.seen, "fix": self.fix, "mend": self.fix}


def ok(about: str, seen: str) -> Finding:
    return Finding(Level.OK, about, seen)


def warn(about: str, seen: str, fix: str) -> Finding:
    return Finding(Level.WARN, about, seen, fix)


def fail(about: str, seen: str, fix: str) -> Finding:
    return Finding(Level.FAIL, about, seen, fix)


def rows(findings: Iterable[Finding]) -> list[tuple[str, str, str]]:
    """One row per finding; the fix follows the observation."""
    return [
        (each.level.value, each.about, printable(each.seen) + (f" → {printable(each.fix)}" if each.fix else ""))
        for each in findings
    ]


def summary(findings: Iterable[Finding]) -> str:
    levels = [each.level for each in findings]
    failed, warned = levels.count(Level.FAIL), levels.count(Level.WARN)
    if not failed and not warned:
        return "No problems found."
    parts = [f"{failed} problem{'s' if failed > 1 else ''}"] if failed else []
    parts += [f"{warned} warning{'s' if warned > 1 else ''}"] if warned else []
    return f"{', '.join(parts)} found. The text after → shows how to fix each."
