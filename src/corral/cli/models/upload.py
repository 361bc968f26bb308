"""Uploads files of this machine to the controller, with a progress bar. A second run continues the first."""

from __future__ import annotations

import asyncio
import hashlib
import platform
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from corral.cli.common.output import OnBytes, print_note, transfer_bar
from corral.contract.gguf import GgufHeader, read_header
from corral.contract.installs import LocalFile, OpenUpload, UploadView
from corral.kit.errors import Conflict, CorralError, Failed, Invalid, NotFound, OutcomeUnknown, Unavailable, Unreachable
from corral.kit.retry import Backoff
from corral.kit.threads import run_in_thread

if TYPE_CHECKING:
    from corral.client import Client
    from corral.client.resources.models import Uploads
    from corral.kit.threads import StopToken

FIRST_PIECE_BYTES = 1 << 20
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 256 << 10, 8 << 20
_PIECE_S = 1.0
MAX_TRIES = 8  # without a new byte in between
_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)\Z", re.IGNORECASE)
_PASSING = (Unreachable, Unavailable, OutcomeUnknown, Conflict)


def is_local_path(text: str) -> bool:
    """Whether it names a file of this machine, not a model of a gallery."""
    return "://" not in text and (text.lower().endswith(".gguf") or text.startswith(("/", "./", "../", "~")))


def local_path(text: str) -> Path:
    return Path(text).expanduser()


def find_parts(path: Path) -> list[Path]:
    """The file, or all parts of it in order. Raises Invalid for a missing one."""
    found = _PART.search(path.name)
    if found is None:
        return [_checked(path)]
    count = int(found[2])
    if not 0 < count <= 1000:
        raise Invalid(f"{path} would have {count} parts")
    names = [f"{path.name[: found.start()]}-{number:05d}-of-{found[2]}{found[3]}" for number in range(1, count + 1)]
    return [_checked(path.with_name(name)) for name in names]


def read_local_header(path: Path) -> GgufHeader:
    """Raises Invalid for a file that is not GGUF."""
    try:
        with path.open("rb") as file:
            return read_header(file, whole=True)
    except Invalid as error:
        raise Invalid(f"{path}: {error.message}") from error
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror}") from error


async def describe_files(paths: list[Path]) -> list[LocalFile]:
    """Name, size and hash of each file; hashing takes a second per gigabyte or more."""
    found = []
    for path in paths:
        size = path.stat().st_size
        with transfer_bar(f"hashing {path.name}", size) as on_bytes:
            digest = await run_in_thread(partial(_hash, path, on_bytes))
        found.append(LocalFile(path.name, size, digest))
    return found


class UploadSession:
    """The operation of an upload, as its sender sees it. It is opened again when the controller does not know it."""

    def __init__(self, uploads: Uploads, request: OpenUpload) -> None:
        self.uploads = uploads
        self.id = ""
        self._request = request
        self._is_known = True  # what came before operations of uploads knows no such thing

    async def open(self) -> None:
        """Raises Gone if the operation was cancelled."""
        if not self._is_known:
            return
        try:
            opened = await self.uploads.open(replace(self._request, continues=self.id))
        except (NotFound, Invalid) as error:
            if self.id or not _is_older_controller(error):
                raise
            self._is_known = False
            return
        if opened.operation_id and opened.operation_id != self.id:
            short = opened.operation_id[:8]
            print_note(f"Operation {short}: follow it with `corral ops watch {short}`")
        self.id = opened.operation_id


def _is_older_controller(error: CorralError) -> bool:
    return isinstance(error, NotFound) or "method" in error.message.lower()


async def upload_files(client: Client, files: Sequence[tuple[Path, LocalFile]], command: str) -> None:
    """Continues where an earlier run stopped. Raises what keeps the controller from taking them."""
    sent = tuple(file for _, file in files)
    upload = UploadSession(client.uploads, OpenUpload(sent[0].name, sent, command=command, host=platform.node()))
    await open_upload(upload, files[0][0])
    for path, file in files:
        with transfer_bar(f"uploading {file.name}", file.size_bytes) as on_bytes:
            await send_file(upload, path, file, on_bytes)


async def open_upload(upload: UploadSession, path: Path) -> None:
    backoff = Backoff(0.2, 5.0)
    while True:
        try:
            return await upload.open()
        except _PASSING as error:
            if backoff.failures >= MAX_TRIES:
                raise _interrupted(error, path) from error
            await asyncio.sleep(backoff.next_s())


async def send_file(upload: UploadSession, path: Path, file: LocalFile, on_bytes: OnBytes, *, start: int = 0) -> None:
    """Send the file, which begins at `start` of `path`; continues where an earlier call stopped. Raises Failed."""
    uploads = upload.uploads
    at = await uploads.get(file.sha256)
    if at.received_bytes and not at.complete:
        print_note(f"Continuing at {at.received_bytes * 100 // file.size_bytes} %")
    backoff, piece_bytes = Backoff(0.2, 5.0), FIRST_PIECE_BYTES
    while not at.complete:
        on_bytes(at.received_bytes)
        try:
            offset, began = start + at.received_bytes, time.monotonic()
            piece = await asyncio.to_thread(_read_piece, path, offset, start + file.size_bytes, piece_bytes)
            at = await uploads.append(file.sha256, at.received_bytes, file.size_bytes, piece, operation=upload.id)
            piece_bytes = next_piece_bytes(piece_bytes, time.monotonic() - began)
            backoff.reset()
        except _PASSING as error:
            if backoff.failures >= MAX_TRIES:
                raise _interrupted(error, path) from error
            await asyncio.sleep(backoff.next_s())
            at = await _position(upload, file, at)
    on_bytes(file.size_bytes)


def next_piece_bytes(size_bytes: int, took_s: float) -> int:
    """About a second each: a cancel is noticed between two pieces, and progress is counted by them. Pure."""
    wanted = size_bytes / max(took_s, 0.001) * _PIECE_S
    return int(min(MAX_PIECE_BYTES, 2 * size_bytes, max(MIN_PIECE_BYTES, wanted)))


async def _position(upload: UploadSession, file: LocalFile, before: UploadView) -> UploadView:
    """The controller may be another one by now, or the same after a restart. Raises Gone."""
    try:
        await upload.open()
        return await upload.uploads.get(file.sha256)
    except _PASSING:
        return before


def _interrupted(error: CorralError, path: Path) -> CorralError:
    return Failed(f"{error.message}\nthe upload of {path.name} is not complete: run the same command again to continue")


def _checked(path: Path) -> Path:
    if not path.is_file():
        raise Invalid(f"there is no file {path} on this machine")
    if path.stat().st_size == 0:
        raise Invalid(f"{path} is empty")
    return path


def _hash(path: Path, on_bytes: OnBytes, stop: StopToken) -> str:
    whole, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            stop.check()
            whole.update(block)
            size += len(block)
            on_bytes(size)
    return whole.hexdigest()


def _read_piece(path: Path, offset: int, end: int, size_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        piece = file.read(min(size_bytes, end - offset))
    if not piece and offset < end:
        raise Invalid(f"{path} is shorter than it was: run the command again")
    return piece
