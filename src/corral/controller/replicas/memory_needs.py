"""What a process of a model needs, as far as this controller can say: from what its files turned out to be, and from
the heads of those that are here. Heads are read once, off the loop; a file that is not here counts by its size."""

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


class FilesHere(Protocol):
    def find(self, digest: str) -> Path | None:
        """The file itself, where it is here."""


class MemoryNeeds:
    def __init__(self, files: FilesHere) -> None:
        self._files = files
        self._headers: dict[str, GgufHeader | None] = {}  # by digest; None: it has none

    def of(
        self, definition: Definition, stored: Sequence[StoredFile], measured: Sequence[MeasuredUsage] = ()
    ) -> Memory:
        sizes = [file.size_bytes for file in stored]
        if len(stored) < len(definition.files):  # not all have been fetched: what was declared is all there is
            sizes = [file.size_bytes for file in definition.files]
        whole = sum(sizes) if sizes and all(sizes) else 0
        headers = [header for file in stored if (header := self._headers.get(file.digest)) is not None]
        return estimate_memory(definition, whole, header=headers[0] if headers else None, measured=measured)

    async def learn(self, files: Sequence[ReplicaFile]) -> None:
        """Read the heads of these, where they are here and not known yet."""
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
            return None  # no GGUF, or none to be believed: its size counts
        except OSError as error:
            log.warning("head of a model file cannot be read", digest=digest, error=str(error))
            return None
