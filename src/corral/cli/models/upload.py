"""Uploads files of this machine to the controller, with a progress bar. A second run continues the first."""

from __future__ import annotations

import asyncio
import hashlib
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from corral.cli.common.output import print_note
from corral.cli.common.transfer_bar import OnBytes, transfer_bar
from corral.contract.gguf import GgufHeader, read_header
from corral.contract.installs import LocalFile, UploadView
from corral.kit.backoff import Backoff
from corral.kit.errors import Conflict, CorralError, Failed, Invalid, OutcomeUnknown, Unavailable, Unreachable
from corral.kit.threads import run_in_thread

if TYPE_CHECKING:
    from corral.client import Client
    from corral.client.resources.models import Uploads
    from corral.kit.threads import StopToken

PIECE_BYTES = 8 << 20
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


async def upload_file(client: Client, path: Path, file: LocalFile) -> None:
    """Continues where an earlier run stopped. Raises what keeps the controller from taking it."""
    with transfer_bar(f"uploading {file.name}", file.size_bytes) as on_bytes:
        await send_file(client.uploads, path, file, on_bytes)


async def send_file(uploads: Uploads, path: Path, file: LocalFile, on_bytes: OnBytes, *, start: int = 0) -> None:
    """Send the file, which begins at `start` of `path`; continues where an earlier call stopped. Raises Failed."""
    at = await uploads.get(file.sha256)
    if at.received_bytes and not at.complete:
        print_note(f"Continuing at {at.received_bytes * 100 // file.size_bytes} %")
    backoff = Backoff(0.2, 5.0)
    while not at.complete:
        on_bytes(at.received_bytes)
        try:
            piece = await asyncio.to_thread(_read_piece, path, start + at.received_bytes, start + file.size_bytes)
            at = await uploads.append(file.sha256, at.received_bytes, file.size_bytes, piece)
            backoff.reset()
        except _PASSING as error:
            if backoff.failures >= MAX_TRIES:
                raise _interrupted(error, path) from error
            await asyncio.sleep(backoff.next_s())
            at = await _position(uploads, file, at)
    on_bytes(file.size_bytes)


async def _position(uploads: Uploads, file: LocalFile, before: UploadView) -> UploadView:
    try:
        return await uploads.get(file.sha256)
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


def _read_piece(path: Path, offset: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        piece = file.read(min(PIECE_BYTES, end - offset))
    if not piece and offset < end:
        raise Invalid(f"{path} is shorter than it was: run the command again")
    return piece
