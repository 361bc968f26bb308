"""Bodies with files in them (`multipart/form-data`): kept on disk while they come, read for the field `model` alone.

Nothing is decoded and nothing is kept in memory: the body goes on as it came. What all of them take of the disk is
bounded as it is for bodies in memory (`bodies.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import re
import tempfile
from typing import IO, NamedTuple

from corral.contract.http import Body, BodyTooLarge
from corral.gateway.bodies import Share
from corral.gateway.fields import LONGEST_MODEL, BadBody
from corral.kit.header_values import read_parameters

_WRITE_BYTES = 1024 * 1024
_LONGEST_PART_HEAD = 8192
_MOST_PARTS = 1024
_LOOK_BYTES = 1024 * 1024  # at a time: others want to run, too
_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)


class Named(NamedTuple):
    """The field `model`, and where its value stands in the body."""

    model: str
    start: int
    end: int


class Spooled:
    """A body on disk, in a file that has no name any more. Close it when the request is over."""

    def __init__(self, file: IO[bytes], share: Share, folder: str | None = None) -> None:
        self._file = file
        self._share = share  # of the disk; ours from here on
        self._folder = folder
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._renamed: dict[str, Spooled] = {}
        self.named: Named | None = None  # once somebody has read it

    def view(self) -> memoryview:
        return memoryview(self._map)

    @property
    def data(self) -> mmap.mmap:
        return self._map

    async def view_for(self, model: str) -> memoryview:
        """The body as that model is to see it: with its own name, whatever the client called it. `NoRoom` or OSError
        where there is no place for it."""
        named = self.named
        if named is None or named.model == model:
            return self.view()
        renamed = self._renamed.get(model)
        if renamed is None:
            # A second file rather than a body in pieces: it is read as often as the request is sent.
            share = self._share.another()
            share.take(len(self._map))
            file = None
            try:
                file = await _make_file(self._folder)
                await asyncio.to_thread(_rename, self._map, named, model, file)
                renamed = self._renamed[model] = Spooled(file, share)
            except BaseException:
                _give_up(file, share)
                raise
        return renamed.view()

    def close(self) -> None:
        for renamed in self._renamed.values():
            renamed.close()
        _give_up(self._file, self._share)
        with contextlib.suppress(BufferError):  # a connection that was cut still holds it; it goes with that
            self._map.close()


async def spool(body: Body, limit_bytes: int, share: Share, folder: str | None) -> Spooled:
    """Raises `BodyTooLarge` and `NoRoom` as `read_whole` does, `BadBody` for an empty one, OSError where the disk does
    not take it."""
    file = None
    try:
        if body.length is not None:
            if body.length > limit_bytes:
                raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
            share.take(body.length)
        file = await _make_file(folder)
        total, pending = 0, bytearray()
        async for piece in body.chunks():
            total += len(piece)
            if total > limit_bytes:
                raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
            if body.length is None:
                share.take(len(piece))
            pending += piece
            if len(pending) >= _WRITE_BYTES:
                whole, pending = pending, bytearray()
                await asyncio.to_thread(file.write, whole)
        if not total:
            raise BadBody("the body is empty")
        await asyncio.to_thread(_finish, file, bytes(pending))
        return Spooled(file, share, folder)
    except BaseException:
        _give_up(file, share)
        raise


def _give_up(file: IO[bytes] | None, share: Share) -> None:
    share.close()
    if file is not None:
        file.close()


async def _make_file(folder: str | None) -> IO[bytes]:
    return await asyncio.to_thread(tempfile.TemporaryFile, "w+b", dir=folder, prefix="corral-body-")


def _rename(data: mmap.mmap, named: Named, model: str, file: IO[bytes]) -> None:
    for start, end in ((0, named.start), (named.end, len(data))):
        if start:
            file.write(model.encode())
        for at in range(start, end, _WRITE_BYTES):
            file.write(data[at : min(end, at + _WRITE_BYTES)])
    file.flush()


def _finish(file: IO[bytes], rest: bytes) -> None:
    file.write(rest)
    file.flush()


def boundary_of(content_type: bytes) -> bytes:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise BadBody("a multipart body needs a boundary in its Content-Type")
    return found[1] or found[2]


def read_model(data: mmap.mmap | bytes, boundary: bytes) -> Named:
    """The field `model`, wherever it stands. Two of them are refused, as in JSON. It may take a while: for a thread."""
    mark = b"--" + boundary
    found: Named | None = None
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
            start = head_end + 4
            found = Named(_text(bytes(data[start : min(after, start + 1 + LONGEST_MODEL)])), start, after)
        at = after + 2
    if found is None or not found.model:
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
            try:
                _, told = read_parameters(value.decode("latin-1"))
            except ValueError:
                return None  # whoever gets the body may make something of it
            return told.get("name") if "filename" not in told else None
    return None


def _text(raw: bytes) -> str:
    if len(raw) > LONGEST_MODEL:
        raise BadBody("`model` is too long", param="model")
    try:
        return raw.decode().strip()
    except UnicodeDecodeError as error:
        raise BadBody("`model` must be a text", param="model") from error
