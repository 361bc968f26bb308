"""An incremental parser of `multipart/form-data` (RFC 7578). Pure: bytes in, parts out.

A file may be larger than memory, so its content is passed on in pieces. The caller limits the size of fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from corral.inference.api_errors import ApiError
from corral.kit.header_values import read_parameters

MAX_HEAD_BYTES = 16 * 1024
MAX_PARTS = 128
_BOUNDARY = re.compile(r"[0-9a-zA-Z'()+_,\-./:=? ]{0,69}[0-9a-zA-Z'()+_,\-./:=?]\Z")


@dataclass(frozen=True)
class FormPart:
    """The start of a part. The following bytes, up to the next part, are its content."""

    name: str
    filename: str | None


Event = FormPart | bytes


class _State(Enum):
    BEFORE = auto()  # bytes before the first boundary are ignored
    AFTER_BOUNDARY = auto()
    HEAD = auto()
    CONTENT = auto()
    END = auto()


def boundary_of(content_type: bytes) -> bytes:
    try:
        kind, parameters = read_parameters(content_type.decode("latin-1"))
    except ValueError as error:
        raise _malformed("its content type cannot be read") from error
    found = parameters.get("boundary", "")
    if kind != "multipart/form-data" or not _BOUNDARY.match(found):
        raise ApiError(415, "The body must be multipart/form-data with a boundary.", code="unsupported_media_type")
    return found.encode("latin-1")


class FormReader:
    """`feed` until the body ends, then `close`."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b"\r\n"  # so that the first boundary looks like the others
        self._state = _State.BEFORE
        self._parts = 0

    def feed(self, data: bytes) -> Iterator[Event]:
        self._buffer += data
        while True:
            if self._state in (_State.BEFORE, _State.CONTENT):
                position = self._buffer.find(self._delimiter)
                content, found = self._cut(position)
                if content and self._state is _State.CONTENT:
                    yield content
                if not found:
                    return
                self._state = _State.AFTER_BOUNDARY
            elif self._state is _State.AFTER_BOUNDARY:
                if not self._after_boundary():
                    return
            elif self._state is _State.HEAD:
                part = self._head()
                if part is None:
                    return
                yield part
            else:
                self._buffer = b""  # bytes after the last boundary are ignored
                return

    def close(self) -> None:
        if self._state is not _State.END:
            raise _malformed("it is incomplete")

    def _cut(self, position: int) -> tuple[bytes, bool]:
        """The bytes that certainly precede the next boundary, which may have arrived only in part."""
        if position >= 0:
            content, self._buffer = self._buffer[:position], self._buffer[position + len(self._delimiter) :]
            return content, True
        keep = len(self._delimiter) - 1
        content, self._buffer = self._buffer[:-keep], self._buffer[-keep:]
        return content, False

    def _after_boundary(self) -> bool:
        """`--` ends the form; otherwise the line ends, perhaps after spaces."""
        if self._buffer.startswith(b"--"):
            self._state = _State.END
            return True
        line, end, rest = self._buffer.partition(b"\r\n")
        if not end:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise _malformed("a boundary is followed by something else")
            return False
        if line.strip(b" \t"):
            raise _malformed("a boundary is followed by something else")
        self._buffer = b"\r\n" + rest  # so that a head without lines ends at once
        self._state = _State.HEAD
        return True

    def _head(self) -> FormPart | None:
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise _malformed("the head of a part is too long")
            return None
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        self._buffer, self._state = rest, _State.CONTENT
        return _part(head)


def _part(head: bytes) -> FormPart:
    for line in head.split(b"\r\n"):
        key, colon, value = line.partition(b":")
        if colon and key.strip().lower() == b"content-disposition":
            try:
                kind, parameters = read_parameters(value.decode())
            except ValueError as error:  # also for bytes that are not UTF-8
                raise _malformed("the head of a part cannot be read") from error
            if kind == "form-data" and "name" in parameters:
                return FormPart(parameters["name"], parameters.get("filename"))
    raise _malformed("a part has no name")


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"The form is malformed: {why}.")
