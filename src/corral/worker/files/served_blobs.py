"""The blobs that this worker may send to other workers: finished ones of its stores, and the verified chunks of those
that it is downloading. Never a path, never anything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.chunks import CHUNK_BYTES
from corral.blobs.store import BlobStore
from corral.blobs.swarm.chunk_set import ALL, ChunkSet
from corral.blobs.swarm.download import SwarmDownload

MAX_ANNOUNCED = 2000
UPLOAD_SLOTS = 6  # more uploads at a time are all slower, and what nobody has whole nobody can pass on


@dataclass(frozen=True)
class ServedBlob:
    path: Path
    size: int
    have: ChunkSet | None = None  # the verified chunks; None: all of it
    chunk_bytes: int = CHUNK_BYTES

    def covers(self, start: int, count: int) -> bool:
        """Whether these bytes are verified."""
        if self.have is None:
            return True
        last = max(start, start + count - 1)
        return all(index in self.have for index in range(start // self.chunk_bytes, last // self.chunk_bytes + 1))


class ServedBlobs:
    def __init__(self, *, slots: int = UPLOAD_SLOTS) -> None:
        """`slots`: uploads at a time."""
        self._slots = slots
        self._used = 0
        self._stores: list[BlobStore] = []
        self.downloads: dict[str, SwarmDownload] = {}  # by digest

    def add_store(self, store: BlobStore) -> None:
        if store not in self._stores:
            self._stores.append(store)

    @contextlib.contextmanager
    def downloading(self, download: SwarmDownload) -> Iterator[None]:
        """Offer the verified chunks of the download while the block runs."""
        self.downloads[download.digest] = download
        try:
            yield
        finally:
            if self.downloads.get(download.digest) is download:
                del self.downloads[download.digest]

    def find(self, digest: str) -> ServedBlob | None:
        """Blocking, briefly."""
        for store in self._stores:
            if (blob := store.find(digest)) is not None:
                return ServedBlob(blob.path, blob.size)
        if (download := self.downloads.get(digest)) is not None:
            listed = download.file.listed
            return ServedBlob(download.file.path, listed.size, download.have, listed.chunk_bytes)
        return None

    def finished(self) -> dict[str, str]:
        """All finished blobs of more than one chunk, as an announcement lists them. Blocking."""
        found = (blob for store in self._stores for blob in store.list_() if blob.size > CHUNK_BYTES)
        largest = sorted(found, key=lambda blob: -blob.size)[:MAX_ANNOUNCED]
        return {blob.digest: ALL for blob in largest}

    @property
    def free_slots(self) -> int:
        return max(0, self._slots - self._used)

    @contextlib.contextmanager
    def upload(self) -> Iterator[bool]:
        """Use a slot while the block runs. False: there is no free slot, and none is used."""
        is_free = self._used < self._slots
        self._used += is_free
        try:
            yield is_free
        finally:
            self._used -= is_free
