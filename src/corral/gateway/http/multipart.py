"""Multipart bodies (`multipart/form-data`): written to disk as they arrive, and read for the field `model` only.

The gateway decodes nothing, keeps nothing in memory and passes the body on unchanged. A budget limits the disk space of
all bodies together (`bodies.py`). ADR 23 compares this with the `multipart` library.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import re
import tempfile
from typing import IO, NamedTuple

from corral.contract.http import Body, BodyTooLarge
from corral.gateway.http.bodies import Reservation
from corral.gateway.http.model_field import MAX_MODEL_LENGTH, BadBody
from corral.kit.header_values import read_parameters

_WRITE_BYTES = 1024 * 1024
MAX_PART_HEAD_BYTES = 8192
MAX_PARTS = 1024
_SEARCH_BYTES = 1024 * 1024  # at a time: other threads run between two searches
_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)


class ModelField(NamedTuple):
    """The field `model`, and the position of its value in the body."""

    model: str
    start: int
    end: int


class SpooledBody:
    """A body on disk, in an unlinked file. Close it when the request is over."""

    def __init__(self, file: IO[bytes], reservation: Reservation, folder: str | None = None) -> None:
        self._file = file
        self._reservation = reservation  # of disk space; owned from here on
        self._folder = folder
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._renamed: dict[str, SpooledBody] = {}
        self.model_field: ModelField | None = None  # set after it was read

    def view(self) -> memoryview:
        return memoryview(self._map)

    @property
    def data(self) -> mmap.mmap:
        return self._map

    async def view_for(self, model: str) -> memoryview:
        """The body with `model` as the model's name, whatever name the client used. Raises `BudgetExceeded` or OSError
        where there is no space for the copy."""
        field = self.model_field
        if field is None or field.model == model:
            return self.view()
        renamed = self._renamed.get(model)
        if renamed is None:
            # A second file instead of a body in pieces: every attempt reads it.
            reservation = self._reservation.new_reservation()
            reservation.grow(len(self._map))
            file = None
            try:
                file = await _make_file(self._folder)
                await asyncio.to_thread(_rename, self._map, field, model, file)
                renamed = self._renamed[model] = SpooledBody(file, reservation)
            except BaseException:
                _release(file, reservation)
                raise
        return renamed.view()

    def close(self) -> None:
        for renamed in self._renamed.values():
            renamed.close()
        _release(self._file, self._reservation)
        with contextlib.suppress(BufferError):  # a connection that is being closed still uses it, and frees it
            self._map.close()


async def spool(body: Body, limit_bytes: int, reservation: Reservation, folder: str | None) -> SpooledBody:
    """Write `body` to disk. Raises `BodyTooLarge` and `BudgetExceeded` as `read_whole` does, `BadBody` for an empty
    body, OSError for errors of the disk."""
    file = None
    try:
        if body.length is not None:
            if body.length > limit_bytes:
                raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
            reservation.grow(body.length)
        file = await _make_file(folder)
        total, pending = 0, bytearray()
        async for piece in body.chunks():
            total += len(piece)
            if total > limit_bytes:
                raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
            if body.length is None:
                reservation.grow(len(piece))
            pending += piece
            if len(pending) >= _WRITE_BYTES:
                whole, pending = pending, bytearray()
                await asyncio.to_thread(file.write, whole)
        if not total:
            raise BadBody("the body is empty")
        await asyncio.to_thread(_finish, file, bytes(pending))
        return SpooledBody(file, reservation, folder)
    except BaseException:
        _release(file, reservation)
        raise


def _release(file: IO[bytes] | None, reservation: Reservation) -> None:
    reservation.close()
    if file is not None:
        file.close()


async def _make_file(folder: str | None) -> IO[bytes]:
    return await asyncio.to_thread(tempfile.TemporaryFile, "w+b", dir=folder, prefix="corral-body-")


def _rename(data: mmap.mmap, field: ModelField, model: str, file: IO[bytes]) -> None:
    for start, end in ((0, field.start), (field.end, len(data))):
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


def read_model(data: mmap.mmap | bytes, boundary: bytes) -> ModelField:
    """The field `model`, in any part. Two of them are refused, as in JSON. Call it in a thread: it may take long."""
    mark = b"--" + boundary
    found: ModelField | None = None
    parts = 0
    at = _find(data, mark, 0)
    if at < 0:
        raise BadBody("the body does not contain the boundary of its Content-Type")
    while at >= 0:
        start = at + len(mark)
        if data[start : start + 2] == b"--":
            break
        parts += 1
        if parts > MAX_PARTS:
            raise BadBody(f"the body has more than {MAX_PARTS} parts")
        head_end = data.find(b"\r\n\r\n", start, start + MAX_PART_HEAD_BYTES)
        if head_end < 0:
            raise BadBody("a part of the body has no complete head")
        after = _find(data, b"\r\n" + mark, head_end + 2)
        if after < 0:
            raise BadBody("the body ends in the middle of a part")
        if _name_of(bytes(data[start:head_end])) == "model":
            if found is not None:
                raise BadBody("`model` is given twice", param="model")
            start = head_end + 4
            found = ModelField(_decode(bytes(data[start : min(after, start + 1 + MAX_MODEL_LENGTH)])), start, after)
        at = after + 2
    if found is None or not found.model:
        raise BadBody("you must provide a `model`", param="model")
    return found


def _find(data: mmap.mmap | bytes, what: bytes, start: int) -> int:
    """As `data.find`, but it releases the interpreter lock now and then."""
    end = len(data)
    while start < end:
        at = data.find(what, start, start + _SEARCH_BYTES + len(what) - 1)
        if at >= 0:
            return at
        start += _SEARCH_BYTES
    return -1


def _name_of(head: bytes) -> str | None:
    """The name of a plain field; None for files."""
    for line in head.split(b"\r\n"):
        label, _, value = line.partition(b":")
        if label.strip().lower() == b"content-disposition":
            try:
                _, parameters = read_parameters(value.decode("latin-1"))
            except ValueError:
                return None  # the engine may still accept it
            return parameters.get("name") if "filename" not in parameters else None
    return None


def _decode(raw: bytes) -> str:
    if len(raw) > MAX_MODEL_LENGTH:
        raise BadBody("`model` is too long", param="model")
    try:
        return raw.decode().strip()
    except UnicodeDecodeError as error:
        raise BadBody("`model` must be text in UTF-8", param="model") from error
