"""A client's form with a file: fields are kept in memory, the file is written to disk for the backend to read."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from corral.contract.http import Request
from corral.inference.api_errors import ApiError, invalid_field
from corral.inference.openai.json_body import JsonBody
from corral.inference.openai.multipart import FormPart, FormReader, boundary_of
from corral.inference.request_files import RequestFolder, extension_of

MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_FIELDS_BYTES = 1024 * 1024
_WRITE_BYTES = 1024 * 1024


@dataclass
class Form:
    file: str  # the path on the backend's machine
    fields: dict[str, list[str]] = field(default_factory=dict)

    def text(self, name: str, default: str = "") -> str:
        return self.fields[name][-1] if self.fields.get(name) else default

    def texts(self, name: str) -> list[str]:
        """The values of a repeated field; OpenAI's clients write `name[]`."""
        return [*self.fields.get(name, ()), *self.fields.get(f"{name}[]", ())]

    def flag(self, name: str) -> bool:
        said = self.text(name).strip().lower()
        if said in ("true", "1", "yes", "on"):
            return True
        if said in ("", "false", "0", "no", "off"):
            return False
        raise invalid_field(name, f"{name} must be true or false.")

    def number(self, name: str) -> float:
        said = self.text(name).strip()
        try:
            return JsonBody({name: float(said)}).number(name) or 0.0 if said else 0.0
        except ValueError as error:
            raise invalid_field(name, f"{name} must be a number.") from error

    def whole(self, name: str) -> int:
        return JsonBody({name: self.number(name)}).whole(name) or 0


async def read_form(request: Request, folder: RequestFolder, *, largest: int = MAX_FILE_BYTES) -> Form:
    """Read the form and write its part `file` into `folder`. Raises ApiError."""
    reader = FormReader(boundary_of(request.header(b"content-type") or b""))
    with contextlib.ExitStack() as stack:
        taking = _FormWriter(folder.here, largest, stack)
        async for data in request.body.chunks():
            for event in reader.feed(data):
                taking.take(event)
            if taking.waiting >= _WRITE_BYTES:
                await asyncio.to_thread(taking.write)
        reader.close()
        await asyncio.to_thread(taking.write)
    return Form(await folder.hand_over(taking.file), taking.fields())


class _FormWriter:
    def __init__(self, folder: Path, largest: int, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._largest = largest
        self._stack = stack
        self._fields: dict[str, list[bytearray]] = {}
        self._part: FormPart | None = None
        self._path: Path | None = None
        self._out: BinaryIO | None = None
        self._pieces: list[bytes] = []
        self._file_bytes = 0
        self._field_bytes = 0
        self.waiting = 0

    def take(self, event: FormPart | bytes) -> None:
        if isinstance(event, FormPart):
            self._begin(event)
        elif self._part is not None and self._part.filename is not None:
            self._take_file(event)
        elif self._part is not None:
            self._field_bytes += len(event)
            if self._field_bytes > MAX_FIELDS_BYTES:
                raise ApiError(413, f"The form's fields are larger than {MAX_FIELDS_BYTES} bytes.")
            self._fields[self._part.name][-1].extend(event)

    def write(self) -> None:
        if self._out is not None:
            self._out.writelines(self._pieces)
        self._pieces.clear()
        self.waiting = 0

    @property
    def file(self) -> Path:
        if self._path is None:
            raise invalid_field("file", "The form has no file.")
        return self._path

    def fields(self) -> dict[str, list[str]]:
        fields = self._fields.items()
        return {name: [value.decode(errors="replace") for value in values] for name, values in fields}

    def _begin(self, part: FormPart) -> None:
        self._part = part
        if part.filename is None:
            self._fields.setdefault(part.name, []).append(bytearray())
        elif part.name == "file":
            if self._path is not None:
                raise invalid_field("file", "The form has more than one file.")
            self._path = self._folder / f"input{extension_of(part.filename)}"
            self._out = self._stack.enter_context(self._path.open("xb"))

    def _take_file(self, data: bytes) -> None:
        self._file_bytes += len(data)
        if self._file_bytes > self._largest:
            raise ApiError(413, f"The file is larger than {self._largest} bytes.", code="request_too_large")
        if self._part is not None and self._part.name == "file":
            self._pieces.append(data)
            self.waiting += len(data)
