"""What somebody asks a blob listener for, and which bytes that means. Pure.

    GET /blobs/sha256:<64 hex>      HEAD likewise
    Authorization: Bearer <token>   Range: bytes=<from>-[<to>]

So little HTTP that a framework would be most of it: no bodies, no other paths, answers of known length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from corral.contract.sources import is_digest

PREFIX = "/blobs/"
END_OF_HEAD = b"\r\n\r\n"

_LINE = re.compile(r"([A-Z]{1,16}) (/[\x21-\x7e]{0,1000}) HTTP/1\.([01])\Z")
# What stands around a value is taken off afterwards: a pattern that did it could be kept busy for hours by one line,
# and whoever sends it has not shown a token yet.
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)\Z")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")


class BadRequest(Exception):
    """What came is no request we read."""


@dataclass(frozen=True)
class Head:
    method: str
    path: str
    keep_alive: bool
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case

    @property
    def digest(self) -> str:
        """Of the blob it is about; empty when it is about none."""
        named = self.path.partition("?")[0].removeprefix(PREFIX)
        return named if self.path.startswith(PREFIX) and is_digest(named) else ""


@dataclass(frozen=True)
class Part:
    """Bytes from `start` on, `count` of them, of a blob of `size`."""

    start: int
    count: int
    size: int
    whole: bool = True  # nobody asked for a part: 200, not 206


@dataclass(frozen=True)
class Beyond:
    """There is nothing where the range begins: 416."""

    size: int


def read_head(data: bytes) -> Head:
    """`data` up to and with the empty line. Raises BadRequest."""
    lines = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    found = _LINE.match(lines[0])
    if found is None:
        raise BadRequest("that is no request line of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        field_ = _HEADER.match(line)
        if field_ is None:
            raise BadRequest("that is no header line")
        name = field_[1].lower()
        if name in headers:
            # A list to some and the last one to others; of those we look at, none may come twice.
            raise BadRequest(f"{name} stands twice in the request")
        headers[name] = field_[2].strip(" \t")
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        raise BadRequest("a request for a blob has no body")
    connection = headers.get("connection", "").lower()
    keep_alive = "close" not in connection if found[3] == "1" else False
    return Head(found[1], found[2], keep_alive, headers)


def choose_part(asked: str, size: int, *, condition: str = "", etag: str = "") -> Part | Beyond:
    """What the Range header means for a blob of that size. One that cannot be read is ignored, as HTTP has it."""
    whole = Part(0, size, size)
    found = _RANGE.match(asked.strip())
    if found is None or (condition and condition != etag):
        return whole
    first, last = found[1], found[2]
    if not first:
        count = min(int(last or 0), size)
        return Part(size - count, count, size, whole=False) if last and count else whole if not last else Beyond(size)
    start = int(first)
    if last and int(last) < start:
        return whole
    if start >= size:
        return Beyond(size)
    end = min(int(last), size - 1) if last else size - 1
    return Part(start, end - start + 1, size, whole=False)
