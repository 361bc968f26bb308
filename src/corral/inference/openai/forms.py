"""A client's form with files: fields are kept in memory, files are written to disk for the backend to read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

from corral.contract.http import Request
from corral.inference.api_errors import ApiError, invalid_field
from corral.inference.openai.json_body import JsonBody
from corral.inference.openai.multipart import FormPart, FormReader, boundary_of
from corral.inference.request_files import RequestFolder, extension_of

MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_FIELDS_BYTES = 1024 * 1024
MAX_FILES = 16
_WRITE_BYTES = 1024 * 1024


class FormBody(JsonBody):
    """The fields of a form, read like those of a JSON body: their values are texts. A repeated field is written `name`
    or, by OpenAI's clients, `name[]`; a mapping is written `name[key]`."""

    def __init__(self, fields: dict[str, list[str]], uploads: dict[str, list[Path]] | None = None) -> None:
        super().__init__({name: values[-1] for name, values in fields.items() if values and values[-1]})
        self._fields = fields
        self.uploads = uploads or {}  # the files of each field, in `RequestFolder.here`

    def texts(self, key: str) -> list[str]:
        return [text for name in (key, f"{key}[]") for text in self._fields.get(name, ()) if text]

    def flag(self, key: str) -> bool:
        said = self.text(key).strip().lower()
        if said in ("true", "1", "yes", "on"):
            return True
        if said in ("", "false", "0", "no", "off"):
            return False
        raise invalid_field(key, f"{key} must be true or false.")

    def number(self, key: str) -> float | None:
        said = self.text(key).strip()
        try:
            return JsonBody({key: float(said)}).number(key) if said else None
        except ValueError as error:
            raise invalid_field(key, f"{key} must be a number.") from error

    def whole(self, key: str) -> int | None:
        return JsonBody({key: self.number(key)}).whole(key)

    def numbers(self, key: str) -> list[float]:
        """Repeated, or separated by commas."""
        return [FormBody({key: [part]}).number(key) or 0.0 for text in self.texts(key) for part in text.split(",")]

    def mapping(self, key: str) -> dict[str, Any]:
        begin = f"{key}["
        return {
            name[len(begin) : -1]: values[-1]
            for name, values in self._fields.items()
            if name.startswith(begin) and name.endswith("]") and len(name) > len(begin) + 1
        }


async def read_form(
    request: Request, folder: RequestFolder, *, files: Collection[str] = ("file",), largest: int = MAX_FILE_BYTES
) -> FormBody:
    """Read the form and write the parts that are `files` into `folder`; other files are skipped. `largest`: all of them
    together. Raises ApiError."""
    reader = FormReader(boundary_of(request.header(b"content-type") or b""))
    with contextlib.ExitStack() as stack:
        writer = _FormWriter(folder.here, files, largest, stack)
        async for data in request.body.chunks():
            for event in reader.feed(data):
                writer.take(event)
            if writer.waiting >= _WRITE_BYTES:
                await asyncio.to_thread(writer.write)
        reader.close()
        await asyncio.to_thread(writer.write)
    return FormBody(writer.fields(), writer.uploads)


class _FormWriter:
    def __init__(self, folder: Path, files: Collection[str], largest: int, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._files = files
        self._largest = largest
        self._stack = stack
        self._fields: dict[str, list[bytearray]] = {}
        self._part: FormPart | None = None
        self._out: BinaryIO | None = None  # None: this part is skipped
        self._pieces: list[tuple[BinaryIO, bytes]] = []
        self._file_bytes = 0
        self._field_bytes = 0
        self.uploads: dict[str, list[Path]] = {}
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
        for out, data in self._pieces:
            out.write(data)
        self._pieces.clear()
        self.waiting = 0

    def fields(self) -> dict[str, list[str]]:
        fields = self._fields.items()
        return {name: [value.decode(errors="replace") for value in values] for name, values in fields}

    def _begin(self, part: FormPart) -> None:
        self._part, self._out = part, None
        name = part.name.removesuffix("[]")
        if part.filename is None:
            self._fields.setdefault(part.name, []).append(bytearray())
        elif name in self._files:
            count = sum(map(len, self.uploads.values()))
            if count >= MAX_FILES:
                raise invalid_field(name, f"The form has more than {MAX_FILES} files.")
            path = self._folder / f"{_stem(name, count)}{extension_of(part.filename)}"
            self._out = self._stack.enter_context(path.open("xb"))
            self.uploads.setdefault(name, []).append(path)

    def _take_file(self, data: bytes) -> None:
        self._file_bytes += len(data)
        if self._file_bytes > self._largest:
            raise ApiError(413, f"The form's files are larger than {self._largest} bytes.", code="request_too_large")
        if self._out is not None:
            self._pieces.append((self._out, data))
            self.waiting += len(data)


def _stem(name: str, count: int) -> str:
    """Never the client's own name for the file, which may be a path."""
    return "input" if name == "file" and not count else f"{name}-{count}"
