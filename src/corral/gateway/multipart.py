"""Bodies with files in them (`multipart/form-data`): kept on disk while they come, read for the field `model` alone.

Nothing is decoded and nothing is kept in memory: the body goes on as it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import re
import tempfile
from collections.abc import AsyncIterator
from email.message import Message
from typing import IO

from corral.contract.http import BodyTooLarge
from corral.gateway.fields import LONGEST_MODEL, BadBody

_WRITE_BYTES = 1024 * 1024
_LONGEST_PART_HEAD = 8192
_MOST_PARTS = 1024
_LOOK_BYTES = 1024 * 1024  # at a time: others want to run, too
_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)


class Spooled:
    """A body on disk, in a file that has no name any more. Close it when the request is over."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self) -> memoryview:
        return memoryview(self._map)

    @property
    def data(self) -> mmap.mmap:
        return self._map

    def close(self) -> None:
        self._file.close()
        with contextlib.suppress(BufferError):  # a connection that was cut still holds it; it goes with that
            self._map.close()


async def spool(pieces: AsyncIterator[bytes], limit_bytes: int, folder: str | None) -> Spooled:
    """Raises `BodyTooLarge`, `BadBody` for an empty one, OSError where the disk does not take it."""
    file: IO[bytes] = await asyncio.to_thread(tempfile.TemporaryFile, "w+b", dir=folder, prefix="corral-body-")
    try:
        total, pending = 0, bytearray()
        async for piece in pieces:
            total += len(piece)
            if total > limit_bytes:
                raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
            pending += piece
            if len(pending) >= _WRITE_BYTES:
                whole, pending = pending, bytearray()
                await asyncio.to_thread(file.write, whole)
        if not total:
            raise BadBody("the body is empty")
        await asyncio.to_thread(_finish, file, bytes(pending))
        return Spooled(file)
    except BaseException:
        file.close()
        raise


def _finish(file: IO[bytes], rest: bytes) -> None:
    file.write(rest)
    file.flush()


def boundary_of(content_type: bytes) -> bytes:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise BadBody("a multipart body needs a boundary in its Content-Type")
    return found[1] or found[2]


def read_model(data: mmap.mmap | bytes, boundary: bytes) -> str:
    """The field `model`, wherever it stands. Two of them are refused, as in JSON. It may take a while: for a thread."""
    mark = b"--" + boundary
    found: str | None = None
    parts = 0
    at = _find(data, mark, 0)
    if at < 0:
        raise BadBody("the body does not have the boundary its Content-Type names")
    while at >= 0:
        start = at + len(mark)
        if data[start : start + 2] == b"--":
            break
        parts += 1
        if parts > _MOST_PARTS:
            raise BadBody(f"the body has more than {_MOST_PARTS} parts")
        head_end = data.find(b"\r\n\r\n", start, start + _LONGEST_PART_HEAD)
        if head_end < 0:
            raise BadBody("a part of the body has no end of its head")
        after = _find(data, b"\r\n" + mark, head_end + 2)
        if after < 0:
            raise BadBody("the body ends in the middle of a part")
        if _name_of(bytes(data[start:head_end])) == "model":
            if found is not None:
                raise BadBody("`model` is given twice", param="model")
            found = _text(bytes(data[head_end + 4 : min(after, head_end + 5 + LONGEST_MODEL)]))
        at = after + 2
    if not found:
        raise BadBody("you must provide a `model`", param="model")
    return found


def _find(data: mmap.mmap | bytes, what: bytes, start: int) -> int:
    """As `data.find`, which would keep everybody waiting for as long as it looks."""
    end = len(data)
    while start < end:
        at = data.find(what, start, start + _LOOK_BYTES + len(what) - 1)
        if at >= 0:
            return at
        start += _LOOK_BYTES
    return -1


def _name_of(head: bytes) -> str | None:
    """The name of a plain field; None for files."""
    for line in head.split(b"\r\n"):
        label, _, value = line.partition(b":")
        if label.strip().lower() == b"content-disposition":
            parsed = Message()
            parsed["content-disposition"] = value.strip().decode("latin-1")
            name = parsed.get_param("name", header="content-disposition")
            filename = parsed.get_filename()
            return str(name) if name is not None and filename is None else None
    return None


def _text(raw: bytes) -> str:
    if len(raw) > LONGEST_MODEL:
        raise BadBody("`model` is too long", param="model")
    try:
        return raw.decode().strip()
    except UnicodeDecodeError as error:
        raise BadBody("`model` must be a text", param="model") from error
