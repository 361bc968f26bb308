"""The file that says which worker is ready, so that a trial of another version can see it from outside."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from corral import __version__
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.worker.status import WorkerStatus

log = get_log(__name__)
FILE = "ready.json"
_POLL_S = 0.1


class ReadyWorker(msgspec.Struct, frozen=True):
    pid: int
    program: str  # the environment that it runs from
    version: str


async def announce(status: WorkerStatus, data: Path) -> None:
    """Write the file once this worker is ready, and end."""
    while True:
        if status.not_ready_reason() is None:
            break
        await asyncio.sleep(_POLL_S)
    try:
        await asyncio.to_thread(_write, data)
    except OSError as error:
        log.warning("it cannot be announced that this worker is ready", reason=str(error))


def _write(data: Path) -> None:
    ready = ReadyWorker(os.getpid(), str(Path(sys.prefix).resolve()), __version__)
    write_atomically(data / FILE, msgspec.json.encode(ready))


def read(data: Path) -> ReadyWorker | None:
    """The worker that was ready last; it may have ended."""
    try:
        return msgspec.json.decode((data / FILE).read_bytes(), type=ReadyWorker)
    except (OSError, msgspec.DecodeError):
        return None
