"""Estimates the memory of a model's processes from the sizes of its files and the GGUF headers of those that this
controller has. Headers are read once, in a thread; a file that is not here counts by its size."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition
from corral.controller.scheduler.gguf import GgufHeader, read_header
from corral.controller.scheduler.memory import MeasuredUsage, estimate_memory
from corral.controller.scheduler.world import Memory
from corral.kit.errors import Invalid
from corral.kit.log import get_log
from corral.store.tables.model_files import StoredFile

log = get_log(__name__)

MAX_HEADERS = 1000


class LocalFiles(Protocol):
    def find(self, digest: str) -> Path | None:
        """The path of the file, where this controller has it."""


class MemoryEstimator:
    def __init__(self, files: LocalFiles) -> None:
        self._files = files
        self._headers: dict[str, GgufHeader | None] = {}  # by digest; None: no GGUF header

    def estimate(
        self, definition: Definition, stored: Sequence[StoredFile], measured: Sequence[MeasuredUsage] = ()
    ) -> Memory:
        sizes = [file.size_bytes for file in stored]
        if len(stored) < len(definition.files):  # not all are fetched yet: the declared sizes are all there is
            sizes = [file.size_bytes for file in definition.files]
        total = sum(sizes) if sizes and all(sizes) else 0
        headers = [header for file in stored if (header := self._headers.get(file.digest)) is not None]
        return estimate_memory(definition, total, header=headers[0] if headers else None, measured=measured)

    async def read_headers(self, files: Sequence[ReplicaFile]) -> None:
        """Read the headers of the files that this controller has and has not read yet."""
        for file in files:
            if file.digest not in self._headers:
                if len(self._headers) >= MAX_HEADERS:
                    self._headers.clear()
                self._headers[file.digest] = await asyncio.to_thread(self._read, file.digest)

    def _read(self, digest: str) -> GgufHeader | None:
        path = self._files.find(digest)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                return read_header(file)
        except Invalid:
            return None  # not GGUF, or not plausible: its size counts
        except OSError as error:
            log.warning("header of a model file cannot be read", digest=digest, error=str(error))
            return None
