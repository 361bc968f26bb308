"""Chunk lists: a file as chunks of 4 MiB, each with its own digest, so that chunks can be fetched and verified singly.

Equal chunk lists mean equal files, so the digest of the list identifies the content as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from corral.blobs.digests import PREFIX, digest_of, digest_of_parts
from corral.blobs.errors import WrongDigest
from corral.contract.codec import Message, always
from corral.kit.errors import Invalid
from corral.kit.threads import StopToken

CHUNK_BYTES = 4 << 20


class ChunkList(Message, frozen=True):
    size: int = always(int)
    chunk_bytes: int = CHUNK_BYTES
    chunks: tuple[str, ...] = always(tuple)  # digests, in order; the last chunk may be shorter

    @property
    def digest(self) -> str:
        return digest_of_parts(str(self.size), str(self.chunk_bytes), *self.chunks)

    def span(self, index: int) -> tuple[int, int]:
        """Offset and length of the chunk."""
        start = index * self.chunk_bytes
        return start, min(self.chunk_bytes, self.size - start)

    def is_chunk(self, index: int, data: bytes) -> bool:
        return digest_of(data) == self.chunks[index]


def check_chunks(listed: ChunkList) -> ChunkList:
    """Return the list, or raise Invalid if it cannot describe any file."""
    if listed.size < 0 or listed.chunk_bytes <= 0:
        raise Invalid("a chunk list has negative sizes")
    if len(listed.chunks) != -(-listed.size // listed.chunk_bytes):
        raise Invalid(f"a chunk list of {listed.size} bytes cannot have {len(listed.chunks)} chunks")
    return listed


def list_chunks(path: Path, digest: str = "", *, chunk_bytes: int = CHUNK_BYTES) -> ChunkList:
    """Read the file once and list its chunks. Raises WrongDigest if the file does not have the digest (empty: unknown):
    a list of damaged bytes would make every download of the file fail at its end."""
    whole, chunks, size = hashlib.sha256(), [], 0
    with path.open("rb") as file, ThreadPoolExecutor(1, thread_name_prefix="hash") as other:
        hashing: Future[None] | None = None
        while block := file.read(chunk_bytes):
            if hashing is not None:
                hashing.result()
            hashing = other.submit(whole.update, block)  # hashes the file while this thread hashes the chunk
            chunks.append(digest_of(block))
            size += len(block)
        if hashing is not None:
            hashing.result()
    if digest and (found := PREFIX + whole.hexdigest()) != digest:
        raise WrongDigest(f"{path.name} has the digest {found}, not {digest}")
    return ChunkList(size, chunk_bytes, tuple(chunks))


def missing_chunks(path: Path, listed: ChunkList, stop: StopToken | None = None) -> list[int]:
    """Indexes of the chunks that a short, sparse or damaged file lacks."""
    if not path.exists():
        return list(range(len(listed.chunks)))
    there = list(_digests(path, stop, listed.chunk_bytes))
    return [index for index, digest in enumerate(listed.chunks) if index >= len(there) or there[index] != digest]


def _digests(path: Path, stop: StopToken | None, chunk_bytes: int) -> Iterator[str]:
    with path.open("rb") as file:
        while block := file.read(chunk_bytes):
            if stop is not None:
                stop.check()
            yield PREFIX + hashlib.sha256(block).hexdigest()
