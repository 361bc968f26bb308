"""A blob listener as a controller has one, with blobs made by the test; and worse ones.

async with blob_source(tmp_path) as source:
    file = source.add("m/abc/weights.gguf", b"...")
    await files.ensure([file], source.urls, source.token)
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.serving.server import BlobListener, Refusal
from corral.blobs.store import BlobStore
from corral.contract.messages.replicas import ReplicaFile

TOKEN = "a-token"


@dataclass
class BlobSource:
    store: BlobStore
    listener: BlobListener
    port: int
    token: str = TOKEN

    @property
    def urls(self) -> tuple[str, ...]:
        return (f"http://{{host}}:{self.port}",)

    def add(self, path: str, content: bytes) -> ReplicaFile:
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        self.store.path(digest).write_bytes(content)
        return ReplicaFile(path, digest, len(content))


@contextlib.asynccontextmanager
async def blob_source(folder: Path) -> AsyncIterator[BlobSource]:
    store = BlobStore(folder / "source")

    def find(digest: str) -> Path | None:
        blob = store.find(digest)
        return blob.path if blob is not None else None

    def check(authorization: str) -> Refusal | None:
        return None if authorization == f"Bearer {TOKEN}" else Refusal(401, "not that one")

    async with BlobListener(find, check, list_chunks=store.chunk_list) as listener:
        yield BlobSource(store, listener, await listener.listen("127.0.0.1", 0))
