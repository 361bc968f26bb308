"""Files that are uploaded in pieces, in order, under the digest that the whole must have.

The partial file is the whole state: after a restart the upload goes on where it stopped. `BlobStore.sweep` removes
partial files that nobody continued. HTTP is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.digests import BLOCK_BYTES, PREFIX, hex_of
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import TooLarge, from_os
from corral.blobs.store import BlobStore
from corral.kit.errors import Conflict, Invalid
from corral.kit.humanize import format_bytes
from corral.kit.log import get_log
from corral.kit.threads import run_uncancelled

log = get_log(__name__)

MAX_BYTES = 200 << 30
MAX_PARALLEL = 8
MAX_HASHES = 64


@dataclass(frozen=True)
class UploadStatus:
    digest: str
    received_bytes: int
    complete: bool


@dataclass
class _RunningHash:
    """The hash of the first `size_bytes` bytes: without it the whole file is read again at the end."""

    size_bytes: int
    hash: hashlib._Hash


class Uploads:
    def __init__(self, store: BlobStore, disk: DiskSpace | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self._store = store
        self._disk = disk or DiskSpace()
        self._max_bytes = max_bytes
        self._active: set[str] = set()
        self._hashes: dict[str, _RunningHash] = {}
        self.slots = asyncio.Semaphore(MAX_PARALLEL)  # for pieces that are kept in memory while they arrive

    async def status(self, digest: str) -> UploadStatus:
        return await asyncio.to_thread(self._status, digest)

    async def append(self, digest: str, offset: int, size_bytes: int, data: bytes) -> UploadStatus:
        """Add the bytes from `offset` on, of `size_bytes` in all; the last ones complete the blob. No bytes at its end
        complete an upload that was interrupted there.

        Raises Conflict if the upload stands elsewhere, Invalid if the whole has another hash, TooLarge and NoSpace."""
        if not 0 < size_bytes <= self._max_bytes:
            raise TooLarge(
                f"the file has {format_bytes(size_bytes)}; {format_bytes(self._max_bytes)} can be uploaded at most "
                "(--upload-limit-bytes of the controller)"
            )
        if offset < 0 or offset + len(data) > size_bytes:
            raise Invalid(f"{len(data)} bytes from {offset} on go beyond the file's {size_bytes}")
        if not data and offset < size_bytes:
            raise Invalid("the piece is empty")
        with self._alone(digest):
            return await run_uncancelled(self._append, digest, offset, size_bytes, data)

    async def cancel(self, digest: str) -> None:
        """Remove what was received; a complete blob stays."""
        with self._alone(digest):
            await run_uncancelled(self._remove, digest)

    @contextlib.contextmanager
    def _alone(self, digest: str) -> Iterator[None]:
        if digest in self._active:
            raise Conflict("another call is uploading this file at this moment: ask how far it is, then go on")
        self._active.add(digest)
        try:
            yield
        finally:
            self._active.discard(digest)

    def _status(self, digest: str) -> UploadStatus:
        if (blob := self._store.find(digest)) is not None:
            os.utime(blob.path)  # the caller is about to use it: it must not be swept before
            return UploadStatus(digest, blob.size, complete=True)
        return UploadStatus(digest, self._received(digest), complete=False)

    def _append(self, digest: str, offset: int, size_bytes: int, data: bytes) -> UploadStatus:
        known = self._status(digest)
        if known.complete:
            return known
        if offset != known.received_bytes:
            raise Conflict(f"the upload stands at {known.received_bytes} bytes, not {offset}: continue there")
        self._disk.require(self._store.folder, size_bytes - offset, "the uploaded file")
        path = self._path(digest)
        try:
            self._write(path, offset, data)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(path, offset)
            raise from_os(error, "writing the uploaded file") from error
        self._update_hash(digest, offset, data)
        if offset + len(data) < size_bytes:
            return UploadStatus(digest, offset + len(data), complete=False)
        return self._finish(digest, path, size_bytes)

    def _write(self, path: Path, offset: int, data: bytes) -> None:
        with open(path, "r+b" if offset else "wb") as file:
            os.chmod(path, 0o600)
            file.seek(offset)
            file.write(data)

    def _update_hash(self, digest: str, offset: int, data: bytes) -> None:
        known = self._hashes.get(digest) if offset else _RunningHash(0, hashlib.sha256())
        if known is None or known.size_bytes != offset:
            self._hashes.pop(digest, None)
            return
        known.hash.update(data)
        known.size_bytes += len(data)
        if len(self._hashes) >= MAX_HASHES:  # left behind by uploads that were given up
            self._hashes.clear()
        self._hashes[digest] = known

    def _finish(self, digest: str, path: Path, size_bytes: int) -> UploadStatus:
        known = self._hashes.pop(digest, None)
        if known is None or known.size_bytes != size_bytes:
            known = _RunningHash(size_bytes, _hash_file(path))
        found = PREFIX + known.hash.hexdigest()
        if found != digest:
            path.unlink(missing_ok=True)
            raise Invalid(
                f"the uploaded bytes have the hash {found}, not {digest}: the file changed while it was uploaded, "
                "or its bytes were damaged on the way; upload it again"
            )
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        blob = self._store.accept(path, digest, size_bytes)
        log.info("file uploaded", digest=digest, bytes=size_bytes)
        return UploadStatus(digest, blob.size, complete=True)

    def _received(self, digest: str) -> int:
        try:
            return self._path(digest).stat().st_size
        except FileNotFoundError:
            return 0

    def _remove(self, digest: str) -> None:
        self._hashes.pop(digest, None)
        self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._store.partial_path(f"upload-{hex_of(digest)}")


def _hash_file(path: Path) -> hashlib._Hash:
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            whole.update(block)
    return whole
