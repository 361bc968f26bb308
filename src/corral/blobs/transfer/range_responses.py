"""Interprets a server's response to a GET with a `Range` header. Pure: the table of cases is in its test.

Servers differ: some ignore `Range`, some have another version of the file by now, some are only busy. This module
decides what to do; the fetcher does it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from corral.kit.errors import CorralError, Denied, Failed, NotFound

MAX_WAIT_S = 60.0  # upper bound for Retry-After
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})

# Python refuses to read a number of thousands of digits, and a server may send one.
_CONTENT_RANGE = re.compile(r"bytes\s+(\d{1,18})-(\d{1,18})/(\d{1,18}|\*)\Z")
_UNSATISFIED = re.compile(r"bytes\s+\*/(\d{1,18})\Z")


@dataclass(frozen=True, slots=True)
class Append:
    """The rest follows: append it. `total` 0: unknown."""

    total: int


@dataclass(frozen=True, slots=True)
class WholeBody:
    """The whole resource follows: discard the bytes received earlier."""

    total: int


@dataclass(frozen=True, slots=True)
class AlreadyComplete:
    """No byte is missing."""


@dataclass(frozen=True, slots=True)
class StartOver:
    """The bytes received earlier belong to another version; request all of it again."""


@dataclass(frozen=True, slots=True)
class ServerBusy:
    """Retry later. `after_s`: the server's Retry-After, or None."""

    why: str
    after_s: float | None = None


@dataclass(frozen=True, slots=True)
class ServerRefused:
    error: CorralError


RangeResponse = Append | WholeBody | AlreadyComplete | StartOver | ServerBusy | ServerRefused


def interpret_response(status: int, headers: Mapping[str, str], *, have_bytes: int, what: str) -> RangeResponse:
    """`headers`: names in lower case. `have_bytes`: the start of the requested range."""
    if status in TRANSIENT:
        return ServerBusy(f"{what} answered {status}", _retry_after(headers.get("retry-after", "")))
    match status:
        case 200:
            return WholeBody(_number(headers.get("content-length", "")))
        case 206:
            return _interpret_part(headers, have_bytes, what)
        case 416 if have_bytes:
            found = _UNSATISFIED.match(headers.get("content-range", ""))
            return AlreadyComplete() if found and int(found[1]) == have_bytes else StartOver()
        case 401 | 403:
            return ServerRefused(Denied(f"{what} answered {status}: credentials are missing or not accepted"))
        case 404 | 410:
            return ServerRefused(NotFound(f"{what} answered {status}: not found"))
    return ServerRefused(Failed(f"{what} answered {status}"))


def _interpret_part(headers: Mapping[str, str], have_bytes: int, what: str) -> RangeResponse:
    found = _CONTENT_RANGE.match(headers.get("content-range", ""))
    if found is None:
        return ServerRefused(Failed(f"{what} sent a partial response without Content-Range"))
    start, total = int(found[1]), 0 if found[3] == "*" else int(found[3])
    if start != have_bytes:
        return StartOver() if have_bytes else ServerRefused(Failed(f"{what} sent another range than requested"))
    return Append(total)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _retry_after(text: str) -> float | None:
    # HTTP allows dates as well; they are ignored, because clocks differ.
    return min(float(text), MAX_WAIT_S) if text.isdecimal() and len(text) < 10 else None
