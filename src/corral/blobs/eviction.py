"""Chooses blobs to remove when a store exceeds its limit: the one that was not requested for longest goes first. The
modification time of a blob is the time of its last request."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from corral.blobs.store import Blob, BlobStore

TOUCH_EVERY_S = 60.0


@dataclass(frozen=True)
class StoredBlob:
    digest: str
    size: int
    used_at: float
    links: int = 1  # names of the file; with more than one, its removal frees nothing


def choose_evicted(
    stored: Sequence[StoredBlob], keep: Collection[str], *, need_bytes: int, max_bytes: int, used_before: float
) -> tuple[str, ...]:
    """Digests to remove, least recently used first, until `need_bytes` more fit into `max_bytes`. Pure."""
    excess = sum(blob.size for blob in stored) + need_bytes - max_bytes
    chosen: list[str] = []
    for blob in sorted(stored, key=lambda blob: (blob.used_at, blob.digest)):
        if excess <= 0:
            break
        if blob.digest not in keep and blob.used_at < used_before:
            chosen.append(blob.digest)
            excess -= blob.size
    return tuple(chosen)


def list_stored(blobs: BlobStore) -> list[StoredBlob]:
    """All finished blobs with the times of their last requests. Blocking."""
    found = []
    for blob in blobs.list_():
        with contextlib.suppress(FileNotFoundError):
            status = blob.path.stat()
            found.append(StoredBlob(blob.digest, blob.size, status.st_mtime, status.st_nlink))
    return found


def note_request(blob: Blob) -> bool:
    """Record that the blob is requested now. False: it was removed meanwhile. May be called in any thread."""
    try:
        if time.time() - blob.path.stat().st_mtime > TOUCH_EVERY_S:
            os.utime(blob.path)
    except FileNotFoundError:
        return False
    return True
