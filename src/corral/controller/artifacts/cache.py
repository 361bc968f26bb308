"""Keeps the artifacts of backends within a limit: the blob that was not requested for longest goes first.

A blob counts as in use while a node is interested in its source, and for a while after its last request. The limit may
be exceeded by blobs in use: a source larger than the limit still reaches the workers, and goes afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace
from corral.blobs.eviction import choose_evicted, list_stored, note_request
from corral.blobs.store import BlobStore
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.kit.threads import run_uncancelled

log = get_log(__name__)


@dataclass(frozen=True)
class CacheLimits:
    max_bytes: int = 20 << 30
    in_use_s: float = 600.0  # after its last request
    sweep_every_s: float = 60.0
    keep_partial_s: float = 86400.0


class ArtifactCache:
    name = "artifact cache"

    def __init__(
        self, blobs: BlobStore, clock: Clock, limits: CacheLimits | None = None, *, disk: DiskSpace | None = None
    ) -> None:
        self._blobs = blobs
        self._clock = clock
        self._limits = limits or CacheLimits()
        self._disk = disk or DiskSpace()
        self.wanted: Callable[[], Collection[str]] = frozenset  # digests that must stay

    def find(self, digest: str) -> Path | None:
        """The file of a blob that a worker requests; notes the time. Called in the listener's threads."""
        blob = self._blobs.find(digest)
        if blob is None:
            return None
        return blob.path if note_request(blob) else None

    async def free_space(self, need_bytes: int) -> None:
        """Before so many bytes are fetched: remove old blobs, to stay within the limit and to have the disk space.
        Raises NoSpace."""
        await self._evict(need_bytes, self._limits.max_bytes)
        try:
            self._disk.require(self._blobs.folder, need_bytes, "a backend's files")
        except NoSpace:
            await self._evict(0, 0)  # all that no node needs now
            self._disk.require(self._blobs.folder, need_bytes, "a backend's files")

    async def run(self) -> None:
        await run_every(self.name, self._limits.sweep_every_s, self.run_once, clock=self._clock)

    async def run_once(self) -> None:
        await self._evict(0, self._limits.max_bytes)
        kept = [blob.digest for blob in await run_uncancelled(self._blobs.list_)]
        await self._blobs.sweep(older_than_s=self._limits.keep_partial_s, keep=kept)

    async def _evict(self, need_bytes: int, max_bytes: int) -> None:
        stored = await run_uncancelled(list_stored, self._blobs)
        evicted = choose_evicted(
            stored,
            self.wanted(),
            need_bytes=need_bytes,
            max_bytes=max_bytes,
            used_before=time.time() - self._limits.in_use_s,
        )
        self._blobs.discard(*evicted)
        if evicted:
            log.info("artifacts of backends removed", count=len(evicted))
