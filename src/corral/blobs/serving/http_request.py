"""Parses requests to a blob listener, and chooses the bytes to send. Pure.

    GET /blobs/sha256:<64 hex>      HEAD likewise
    GET /blobs/sha256:<64 hex>/chunks
    Authorization: Bearer <token>   Range: bytes=<from>-[<to>]

A small part of HTTP, read without a framework: no bodies, no other paths, responses of known length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from corral.contract.sources import is_digest

PREFIX = "/blobs/"
CHUNKS = "/chunks"
END_OF_HEAD = b"\r\n\r\n"

_LINE = re.compile(r"([A-Z]{1,16}) (/[\x21-\x7e]{0,1000}) HTTP/1\.([01])\Z")
# White space around a value is stripped afterwards: a pattern that did it could take hours for one line (backtracking),
# and the sender has not shown a token yet.
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)\Z")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})\Z")


class MalformedRequest(Exception):
    """The request cannot be parsed."""


@dataclass(frozen=True)
class RequestHead:
    method: str
    path: str
    keep_alive: bool
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case

    @property
    def digest(self) -> str:
        """The digest in the path; empty if the path names no blob."""
        named = self.path.partition("?")[0].removeprefix(PREFIX).removesuffix(CHUNKS)
        return named if self.path.startswith(PREFIX) and is_digest(named) else ""

    @property
    def is_chunk_list(self) -> bool:
        """Whether the path names the chunk list of the blob."""
        return self.path.partition("?")[0].endswith(CHUNKS)


@dataclass(frozen=True)
class ByteRange:
    """`count` bytes from `start` of a blob of `size` bytes."""

    start: int
    count: int
    size: int
    whole: bool = True  # no range was requested: 200, not 206


@dataclass(frozen=True)
class RangeNotSatisfiable:
    """The range begins behind the end of the blob: 416."""

    size: int


def read_head(data: bytes) -> RequestHead:
    """Parse the head of a request, including the empty line at its end. Raises MalformedRequest."""
    lines = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    found = _LINE.match(lines[0])
    if found is None:
        raise MalformedRequest("the request line is not HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        field_ = _HEADER.match(line)
        if field_ is None:
            raise MalformedRequest("a header line cannot be parsed")
        name = field_[1].lower()
        if name in headers:
            # Some parsers take a repeated header as a list, others take the last one; none that is used here may be
            # repeated.
            raise MalformedRequest(f"the header {name} is repeated")
        headers[name] = field_[2].strip(" \t")
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        raise MalformedRequest("a request for a blob has no body")
    connection = headers.get("connection", "").lower()
    keep_alive = "close" not in connection if found[3] == "1" else False
    return RequestHead(found[1], found[2], keep_alive, headers)


def choose_range(
    range_header: str, size: int, *, condition: str = "", etag: str = ""
) -> ByteRange | RangeNotSatisfiable:
    """The bytes that a Range header selects in a blob of `size` bytes. HTTP says to ignore a range that cannot be
    parsed."""
    whole = ByteRange(0, size, size)
    found = _RANGE.match(range_header.strip())
    if found is None or (condition and condition != etag):
        return whole
    first, last = found[1], found[2]
    if not first:
        count = min(int(last or 0), size)
        return (
            ByteRange(size - count, count, size, whole=False)
            if last and count
            else whole
            if not last
            else RangeNotSatisfiable(size)
        )
    start = int(first)
    if last and int(last) < start:
        return whole
    if start >= size:
        return RangeNotSatisfiable(size)
    end = min(int(last), size - 1) if last else size - 1
    return ByteRange(start, end - start + 1, size, whole=False)
