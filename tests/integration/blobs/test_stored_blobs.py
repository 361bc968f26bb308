"""Model files in an object storage (a real S3 server): uploaded when a worker looks for them, read with signed URLs,
deleted when no model needs them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest

from corral.blobs.object_store import ObjectStore, StoreLimits
from corral.blobs.storage_settings import StorageSettings
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.fetcher import Fetcher
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.controller.files.swarm import stored_blobs
from corral.controller.files.swarm.stored_blobs import StoredBlobs
from corral.kit.clock import SystemClock
from corral.kit.tasks import background
from corral.store.engine.transactions import Store
from corral.store.open import open_store
from corral.store.tables import model_files, models
from tests.integration.store.rows import a_file, a_model
from tests.support.object_storage import ObjectStorage, open_object_storage
from tests.support.sqlite import sqlite_url
from tests.support.swarm_fleet import open_swarm
from tests.support.waiting import until

CLOCK = SystemClock()
CONTENT = os.urandom(9_000_000)
LIMITS = StoreLimits(connect_s=1.0, call_s=5.0, stall_s=5.0, retries=0)


@pytest.fixture(scope="module")
def storage() -> Iterator[ObjectStorage]:
    with open_object_storage() as storage:
        yield storage


@dataclass
class Site:
    stored: StoredBlobs
    blobs: BlobStore
    store: Store

    async def add(self, content: bytes, model: str = "m") -> Blob:
        """A file of a model, or with `model` empty of none."""
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        blob = await self.blobs.write(digest, lambda: iter([content]), ExpectedBlob(digest), "w")
        if model:
            async with self.store.write() as tx:
                await models.put(tx, a_model(model))
                await model_files.put(tx, a_file(model, "w.gguf", digest=digest, size_bytes=len(content)))
        return blob


@contextlib.asynccontextmanager
async def open_site(folder: Path, settings: StorageSettings) -> AsyncIterator[Site]:
    async with open_store(sqlite_url(folder)) as store:
        blobs = BlobStore(folder / "blobs", Fetcher(clock=CLOCK))
        stored = StoredBlobs(ObjectStore(settings, LIMITS), blobs, store, CLOCK, fleet="f1")
        async with background(stored.run()):
            yield Site(stored, blobs, store)


@pytest.fixture
async def site(tmp_path: Path, storage: ObjectStorage) -> AsyncIterator[Site]:
    async with open_site(tmp_path, storage.settings) as opened:
        yield opened


async def test_a_file_is_uploaded_on_request_and_read_with_a_signed_url(site: Site, storage: ObjectStorage) -> None:
    blob = await site.add(CONTENT)
    assert site.stored.find_url(blob.digest) == ""
    await until(lambda: site.stored.find_url(blob.digest) != "", "the upload")
    url = site.stored.find_url(blob.digest)
    assert url.startswith(f"{storage.url}/localai/corral/f1/blobs/sha256-")
    assert "X-Amz-Expires=3600" in url
    assert "secret" not in url
    async with aiohttp.ClientSession() as session, session.get(url, headers={"Range": "bytes=5-9"}) as answer:
        assert (answer.status, await answer.read()) == (206, CONTENT[5:10])


async def test_what_no_model_needs_is_not_uploaded_and_leaves(
    site: Site, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, kept, gone = await site.add(b"layer", ""), await site.add(b"kept"), await site.add(b"gone", "n")
    for blob in (layer, kept, gone):
        site.stored.find_url(blob.digest)
    await until(lambda: all(map(site.stored.find_url, (kept.digest, gone.digest))), "both uploads")
    assert site.stored.find_url(layer.digest) == ""
    storage.put("corral/f2/blobs/sha256-aa", b"of another fleet")
    async with site.store.write() as tx:
        await model_files.delete(tx, "n", "w.gguf")
    await site.stored.sweep()
    assert key(gone) in storage.list_keys(), "a new file may be of a model that is being stored"
    monkeypatch.setattr(stored_blobs, "KEEP_UNNEEDED", timedelta(seconds=-5))
    await site.stored.sweep()
    keys = storage.list_keys()
    assert (key(kept) in keys, key(gone) in keys, "corral/f2/blobs/sha256-aa" in keys) == (True, False, True)


async def test_a_storage_that_cannot_be_reached_is_left_alone_for_a_while(tmp_path: Path) -> None:
    nowhere = StorageSettings(storage_url="http://127.0.0.1:9", storage_access_key="a", storage_secret_key="s")
    async with open_site(tmp_path, nowhere) as site:
        blob = await site.add(b"w")
        assert site.stored.find_url(blob.digest) == ""
        await until(lambda: not site.stored._pending, "the failure")
        assert site.stored.find_url(blob.digest) == ""
        assert not site.stored._pending, "not tried again at once"


@pytest.mark.parametrize("sends_wrong_bytes", [False, True])
async def test_a_worker_reads_from_the_storage_what_is_right(
    site: Site, storage: ObjectStorage, tmp_path: Path, sends_wrong_bytes: bool
) -> None:
    content = os.urandom(len(CONTENT))
    blob = await site.add(content)
    await until(lambda: site.stored.find_url(blob.digest) != "", "the upload")
    if sends_wrong_bytes:
        storage.put(key(blob), b"x" * len(content))
    (tmp_path / "swarm").mkdir()
    async with open_swarm(tmp_path / "swarm", find_stored=site.stored.find_url) as swarm:
        file = swarm.source.add("w", content)
        node = await swarm.join("a")
        await node.obtain(file)
        assert node.store.get(blob.digest).path.read_bytes() == content
        assert node.received["storage"] + node.received["controller"] == len(content)
        assert (node.received["storage"] == 0) == sends_wrong_bytes
        assert node.seen[-1].sources.get("object storage", 0) == node.received["storage"]
        assert node.seen[-1].banned == (("object storage",) if sends_wrong_bytes else ())


def key(blob: Blob) -> str:
    return f"corral/f1/blobs/{blob.digest.replace(':', '-')}"
