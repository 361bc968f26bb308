"""Keeps the model files of this controller within `--cache-limit`: the file that was not requested for longest goes
first. A later load fetches it again from its source, with the same digest.

A file stays while it is fetched, and for a while after a node requested it; the limit may be exceeded meanwhile. Files
without another source stay for ever: a user uploaded them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace
from corral.blobs.eviction import StoredBlob, choose_evicted, list_stored, note_request
from corral.blobs.store import BlobStore
from corral.contract.installs import UPLOAD_SCHEME
from corral.controller.files.required_files import digest_of_file
from corral.controller.models.views import definition_of
from corral.kit.clock import Clock
from corral.kit.humanize import format_bytes
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.kit.threads import run_uncancelled
from corral.store.engine.transactions import Store
from corral.store.tables import model_files, models

log = get_log(__name__)


@dataclass(frozen=True)
class ModelCacheLimits:
    max_bytes: int = 0  # 0: as much as the disk holds
    in_use_s: float = 600.0  # after the last request, and after the fetch
    every_s: float = 60.0


class ModelCache:
    name = "model cache"

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        clock: Clock,
        limits: ModelCacheLimits | None = None,
        *,
        disk: DiskSpace | None = None,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock
        self._limits = limits or ModelCacheLimits()
        self._disk = disk or DiskSpace()

    def find(self, digest: str) -> Path | None:
        """The file of a blob that a node requests; notes the time. Called in the listener's threads."""
        blob = self._blobs.find(digest)
        return blob.path if blob is not None and note_request(blob) else None

    async def free_space(self, need_bytes: int, what: str) -> None:
        """Before so many bytes are fetched: remove files above the limit, and with a limit also what the disk needs.
        Raises NoSpace."""
        if self._limits.max_bytes:
            await self._evict(need_bytes, self._limits.max_bytes)
        try:
            self._disk.require(self._blobs.folder, need_bytes, what)
        except NoSpace:
            if not self._limits.max_bytes:
                raise
            await self._evict(need_bytes, None)
            self._disk.require(self._blobs.folder, need_bytes, what)

    async def run(self) -> None:
        await run_every(self.name, self._limits.every_s, self.run_once, clock=self._clock)

    async def run_once(self) -> None:
        if self._limits.max_bytes:
            await self._evict(0, self._limits.max_bytes)

    async def _evict(self, need_bytes: int, max_bytes: int | None) -> None:
        """`max_bytes`: None frees `need_bytes`, whatever the limit is."""
        stored = await run_uncancelled(self._list_counted)
        present_bytes = sum(blob.size for blob in stored)
        allowed = present_bytes if max_bytes is None else max_bytes
        if present_bytes + need_bytes <= allowed:
            return
        evicted = choose_evicted(
            stored,
            await self._without_source() | self._blobs.held(),
            need_bytes=need_bytes,
            max_bytes=allowed,
            used_before=time.time() - self._limits.in_use_s,
        )
        self._blobs.discard(*evicted)
        if evicted:
            freed = sum(blob.size for blob in stored if blob.digest in evicted)
            log.info("model files above the cache limit removed", count=len(evicted), freed=format_bytes(freed))

    def _list_counted(self) -> list[StoredBlob]:
        """A file with another name counts where that name is: the worker of this machine links files instead of
        copying them, and has a limit of its own."""
        return [blob for blob in list_stored(self._blobs) if blob.links == 1]

    async def _without_source(self) -> set[str]:
        async with self._store.read() as tx:
            rows = await model_files.list_(tx)
            defined = [definition_of(model) for model in await models.list_(tx)]
        declared = [file for definition in defined if definition for file in definition.files]
        uploaded = {digest_of_file(file) for file in declared if file.uri.startswith(UPLOAD_SCHEME)}
        return uploaded | {row.digest for row in rows if row.is_list or row.uri.startswith(UPLOAD_SCHEME)}
