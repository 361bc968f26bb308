"""`multipart/form-data`, read as it comes (RFC 7578). Pure: bytes in, parts out; nothing is kept but what is unclear.

A file may be larger than memory, so its content is handed on in pieces. Fields are small, and bounded by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from corral.inference.api_errors import Refused
from corral.kit.header_values import read_parameters

MOST_HEAD = 16 * 1024
MOST_PARTS = 128
_BOUNDARY = re.compile(r"[0-9a-zA-Z'()+_,\-./:=? ]{0,69}[0-9a-zA-Z'()+_,\-./:=?]\Z")


@dataclass(frozen=True)
class Part:
    """The beginning of a part. What follows, up to the next one, is its content."""

    name: str
    filename: str | None


Event = Part | bytes


class _At(Enum):
    BEFORE = auto()  # what precedes the first boundary is nobody's
    AFTER_BOUNDARY = auto()
    HEAD = auto()
    CONTENT = auto()
    END = auto()


def boundary_of(content_type: bytes) -> bytes:
    try:
        kind, told = read_parameters(content_type.decode("latin-1"))
    except ValueError as error:
        raise _malformed("its content type cannot be read") from error
    found = told.get("boundary", "")
    if kind != "multipart/form-data" or not _BOUNDARY.match(found):
        raise Refused(415, "This takes multipart/form-data with a boundary.", code="unsupported_media_type")
    return found.encode("latin-1")


class FormReader:
    """`feed` until the body ends, then `close`."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b"\r\n"  # so that the first boundary looks like all others
        self._at = _At.BEFORE
        self._parts = 0

    def feed(self, data: bytes) -> Iterator[Event]:
        self._buffer += data
        while True:
            if self._at in (_At.BEFORE, _At.CONTENT):
                position = self._buffer.find(self._delimiter)
                content, found = self._cut(position)
                if content and self._at is _At.CONTENT:
                    yield content
                if not found:
                    return
                self._at = _At.AFTER_BOUNDARY
            elif self._at is _At.AFTER_BOUNDARY:
                if not self._after_boundary():
                    return
            elif self._at is _At.HEAD:
                part = self._head()
                if part is None:
                    return
                yield part
            else:
                self._buffer = b""  # what follows the last boundary is nobody's either
                return

    def close(self) -> None:
        if self._at is not _At.END:
            raise _malformed("it ends in the middle")

    def _cut(self, position: int) -> tuple[bytes, bool]:
        """What certainly precedes the next boundary; a boundary may be half here."""
        if position >= 0:
            content, self._buffer = self._buffer[:position], self._buffer[position + len(self._delimiter) :]
            return content, True
        keep = len(self._delimiter) - 1
        content, self._buffer = self._buffer[:-keep], self._buffer[-keep:]
        return content, False

    def _after_boundary(self) -> bool:
        """`--` ends the form; else the line ends, perhaps after spaces."""
        if self._buffer.startswith(b"--"):
            self._at = _At.END
            return True
        line, end, rest = self._buffer.partition(b"\r\n")
        if not end:
            if len(self._buffer) > MOST_HEAD:
                raise _malformed("a boundary is followed by something else")
            return False
        if line.strip(b" \t"):
            raise _malformed("a boundary is followed by something else")
        self._buffer = b"\r\n" + rest  # a head without any lines ends at once
        self._at = _At.HEAD
        return True

    def _head(self) -> Part | None:
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            if len(self._buffer) > MOST_HEAD:
                raise _malformed("the head of a part is too long")
            return None
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise _malformed(f"it has more than {MOST_PARTS} parts")
        self._buffer, self._at = rest, _At.CONTENT
        return _part(head)


def _part(head: bytes) -> Part:
    for line in head.split(b"\r\n"):
        key, colon, value = line.partition(b":")
        if colon and key.strip().lower() == b"content-disposition":
            try:
                kind, told = read_parameters(value.decode())
            except ValueError as error:  # also of what is no UTF-8
                raise _malformed("the head of a part cannot be read") from error
            if kind == "form-data" and "name" in told:
                return Part(told["name"], told.get("filename"))
    raise _malformed("a part has no name")


def _malformed(why: str) -> Refused:
    return Refused(400, f"The form is malformed: {why}.")
