"""A blob that arrives in chunks, in any order: a sparse file, and a bitmap of its verified chunks beside it. Blocking.

    <key>.sparse         the bytes
    <key>.sparse.have    which chunks are verified; written after their bytes

Killing the process at any moment loses the chunks that are not complete, and nothing else: the kernel keeps what was
written. After a restart of the machine the bitmap may be newer than the bytes, so every listed chunk is hashed again.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from corral.blobs.chunks import ChunkList
from corral.blobs.digests import PREFIX
from corral.blobs.swarm.chunk_set import ChunkSet, from_bytes
from corral.kit.errors import Invalid
from corral.kit.log import get_log
from corral.kit.threads import StopToken

log = get_log(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class BitmapHeader(msgspec.Struct, frozen=True):
    """The first line of the bitmap file."""

    chunks: str  # digest of the chunk list
    boot_id: str  # of the machine; empty: unknown


class ChunkFile:
    """Open it once, in a thread. `write` may be called from several threads."""

    def __init__(self, path: Path, listed: ChunkList, *, boot_id: Path = BOOT_ID) -> None:
        self.path = path
        self.listed = listed
        self.have = ChunkSet(len(listed.chunks))
        self._bitmap_path = bitmap_path(path)
        self._boot_id_path = boot_id
        self._descriptor = -1
        self._bitmap = -1
        self._bits_at = 0
        self._lock = threading.Lock()  # guards `have` and the bitmap file
        self._hash_lock = threading.Lock()  # guards the hash of the beginning
        self._hash = hashlib.sha256()
        self._hashed = 0  # chunks

    def open(self, stop: StopToken) -> None:
        """Continue with the chunks that an earlier process left."""
        found = self._read_bitmap()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        left = os.fstat(self._descriptor).st_size
        os.ftruncate(self._descriptor, self.listed.size)
        if found is None and left:
            found = self._verify_all(ChunkSet.complete(self.have.count), stop)
        self.have = found or ChunkSet(self.have.count)
        self._create_bitmap()

    @property
    def have_bytes(self) -> int:
        full = len(self.have) * self.listed.chunk_bytes
        last = self.have.count - 1
        return full - (self.listed.chunk_bytes - self.listed.span(last)[1] if last >= 0 and last in self.have else 0)

    def write(self, index: int, pieces: Sequence[bytes]) -> bool:
        """Store the chunk if it is right. False: its hash or its size is wrong, and nothing was stored."""
        start, length = self.listed.span(index)
        found = hashlib.sha256()
        for piece in pieces:
            found.update(piece)
        if sum(map(len, pieces)) != length or PREFIX + found.hexdigest() != self.listed.chunks[index]:
            return False
        _write_all(self._descriptor, pieces, start)
        with self._lock:
            self.have = self.have.add(index)
            place = index // 8
            os.pwrite(self._bitmap, self.have.to_bytes()[place : place + 1], self._bits_at + place)
        if self._hashed == index and self._hash_lock.acquire(blocking=False):
            try:
                if self._hashed == index:  # in order: no second read is needed
                    for piece in pieces:
                        self._hash.update(piece)
                    self._hashed += 1
            finally:
                self._hash_lock.release()
        return True

    def hash_beginning(self, stop: StopToken) -> None:
        """Hash the unbroken beginning of the file, so that little is left to hash at the end."""
        while self._hashed in self.have:
            stop.check()
            with self._hash_lock:
                if self._hashed in self.have:
                    self._hash.update(self._read(self._hashed))
                    self._hashed += 1

    def finish(self, stop: StopToken) -> str:
        """Sync the complete file. Returns the digest of all bytes."""
        self.hash_beginning(stop)
        os.fsync(self._descriptor)
        with self._hash_lock:
            return PREFIX + self._hash.hexdigest()

    def verify_again(self, stop: StopToken) -> int:
        """Hash every chunk again and forget the damaged ones. Returns their number."""
        before = self.have
        with self._hash_lock:
            self._hash, self._hashed = hashlib.sha256(), 0
        self.have = self._verify_all(before, stop)
        self._create_bitmap()
        return len(before) - len(self.have)

    def close(self) -> None:
        for descriptor in (self._descriptor, self._bitmap):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._bitmap = -1

    def _verify_all(self, candidates: ChunkSet, stop: StopToken) -> ChunkSet:
        good = []
        for index in candidates:
            stop.check()
            if self.listed.is_chunk(index, self._read(index)):
                good.append(index)
        return ChunkSet.of(self.have.count, good)

    def _read(self, index: int) -> bytes:
        start, length = self.listed.span(index)
        return os.pread(self._descriptor, length, start)

    def _read_bitmap(self) -> ChunkSet | None:
        """The verified chunks by the bitmap file; None: it cannot be trusted."""
        try:
            first, _, rest = self._bitmap_path.read_bytes().partition(b"\n")
            header = msgspec.json.decode(first, type=BitmapHeader)
            is_ours = header.chunks == self.listed.digest and self.path.stat().st_size == self.listed.size
            if not is_ours or not header.boot_id or header.boot_id != self._boot_id():
                return None
            return from_bytes(rest, self.have.count)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, Invalid) as error:
            log.warning("bitmap of a partial download cannot be read", file=self._bitmap_path.name, reason=str(error))
            return None

    def _create_bitmap(self) -> None:
        header = msgspec.json.encode(BitmapHeader(self.listed.digest, self._boot_id())) + b"\n"
        if self._bitmap >= 0:
            os.close(self._bitmap)
        self._bitmap = os.open(self._bitmap_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.pwrite(self._bitmap, header + self.have.to_bytes(), 0)
        self._bits_at = len(header)

    def _boot_id(self) -> str:
        try:
            return self._boot_id_path.read_text().strip()
        except OSError:
            return ""


def bitmap_path(path: Path) -> Path:
    return path.with_name(path.name + ".have")


def remove_chunk_file(path: Path) -> None:
    path.unlink(missing_ok=True)
    bitmap_path(path).unlink(missing_ok=True)


def _write_all(descriptor: int, pieces: Sequence[bytes], start: int) -> None:
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            written = os.pwrite(descriptor, view, start)
            view, start = view[written:], start + written
