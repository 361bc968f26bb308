"""What a server's answer to "these bytes, from here on" means. Pure: the table of cases is in its test.

Servers differ: some ignore `Range`, some have another file by now, some are only busy. What to do is decided here;
doing it is the fetcher's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from corral.kit.errors import CorralError, Denied, Failed, NotFound

LONGEST_WAIT_S = 60.0  # what a server may ask us to wait; a registry that says "tomorrow" is tried again sooner
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})

_CONTENT_RANGE = re.compile(r"bytes\s+(\d+)-(\d+)/(\d+|\*)\Z")
_UNSATISFIED = re.compile(r"bytes\s+\*/(\d+)\Z")


@dataclass(frozen=True, slots=True)
class Append:
    """The rest follows: write it behind what is there. `total` 0: nobody says."""

    total: int


@dataclass(frozen=True, slots=True)
class Whole:
    """All of it follows: forget what is there."""

    total: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Nothing is missing: what is there is all there is."""


@dataclass(frozen=True, slots=True)
class StartOver:
    """What is there does not belong to what the server has; ask again from the beginning."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Not now. `after_s`: what the server asked for, or None."""

    why: str
    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    error: CorralError


Answer = Append | Whole | Complete | StartOver | Busy | Refused


def judge_answer(status: int, headers: Mapping[str, str], *, have_bytes: int, what: str) -> Answer:
    """`headers` with names in lower case; `have_bytes` is where we asked the server to go on."""
    if status in TRANSIENT:
        return Busy(f"{what} answered {status}", _retry_after(headers.get("retry-after", "")))
    match status:
        case 200:
            return Whole(_number(headers.get("content-length", "")))
        case 206:
            return _judge_part(headers, have_bytes, what)
        case 416 if have_bytes:
            found = _UNSATISFIED.match(headers.get("content-range", ""))
            return Complete() if found and int(found[1]) == have_bytes else StartOver()
        case 401 | 403:
            return Refused(Denied(f"{what} answered {status}: it wants credentials, or does not take ours"))
        case 404 | 410:
            return Refused(NotFound(f"{what} answered {status}: there is no such thing"))
    return Refused(Failed(f"{what} answered {status}"))


def _judge_part(headers: Mapping[str, str], have_bytes: int, what: str) -> Answer:
    found = _CONTENT_RANGE.match(headers.get("content-range", ""))
    if found is None:
        return Refused(Failed(f"{what} sent a part without saying which"))
    start, total = int(found[1]), 0 if found[3] == "*" else int(found[3])
    if start != have_bytes:
        return StartOver() if have_bytes else Refused(Failed(f"{what} sent another part than asked"))
    return Append(total)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _retry_after(text: str) -> float | None:
    # Dates are allowed too; a server whose clock differs from ours would make nonsense of them.
    return min(float(text), LONGEST_WAIT_S) if text.isdecimal() and len(text) < 10 else None
