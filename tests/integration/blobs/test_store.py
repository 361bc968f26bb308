"""Blobs by digest: whole or absent, fetched once, held while they are read, swept when nobody comes back."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral.blobs.progress import Progress
from corral.blobs.sources.context import SourceContext
from corral.blobs.store import BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import UrlRemote
from corral.contract.messages.backends import Phase
from corral.kit.errors import Invalid, NotFound, Unreachable
from tests.support.blob_server import BlobServer
from tests.support.installing import open_source_context
from tests.support.waiting import until

DATA = os.urandom(200_000)
DIGEST = "sha256:" + hashlib.sha256(DATA).hexdigest()
HEX = DIGEST.removeprefix("sha256:")


@pytest.fixture
async def server() -> AsyncIterator[BlobServer]:
    async with BlobServer() as server:
        yield server


@pytest.fixture
async def means(tmp_path: Path) -> AsyncIterator[SourceContext]:
    async with open_source_context(tmp_path) as means:
        yield means


def names(store: BlobStore) -> list[str]:
    return sorted(str(path.relative_to(store.folder)) for path in store.folder.rglob("*") if path.is_file())


async def test_a_blob_is_kept_under_its_digest(server: BlobServer, means: SourceContext) -> None:
    told: list[Progress] = []
    page = UrlRemote(means.session, server.put("/x", DATA))
    blob = await means.store.obtain(page, ExpectedBlob(DIGEST, len(DATA)), told.append)
    assert (blob.digest, blob.size, blob.path.read_bytes()) == (DIGEST, len(DATA), DATA)
    assert names(means.store) == [f"sha256/{HEX}"]
    assert told[-1] == Progress(Phase.DOWNLOADING, page.name, len(DATA), len(DATA))
    assert means.store.get(DIGEST) == blob


async def test_what_is_here_is_not_fetched(server: BlobServer, means: SourceContext) -> None:
    page = UrlRemote(means.session, server.put("/x", DATA))
    await means.store.obtain(page, ExpectedBlob(DIGEST))
    await means.store.obtain(UrlRemote(means.session, "http://127.0.0.1:1/"), ExpectedBlob(DIGEST))
    assert len(server.asked) == 1


async def test_without_a_digest_it_gets_the_one_it_has(server: BlobServer, means: SourceContext) -> None:
    blob = await means.store.obtain(UrlRemote(means.session, server.put("/x", DATA, etag='"1"')), ExpectedBlob())
    assert blob.digest == DIGEST
    assert names(means.store) == [f"sha256/{HEX}"]  # no note is left either


async def test_many_who_want_one_digest_share_one_transfer(server: BlobServer, means: SourceContext) -> None:
    page = UrlRemote(means.session, server.put("/x", DATA))
    blobs = await asyncio.gather(*(means.store.obtain(page, ExpectedBlob(DIGEST)) for _ in range(10)))
    assert {blob.digest for blob in blobs} == {DIGEST}
    assert len(server.asked) == 1


async def test_one_of_two_gives_up_and_the_other_gets_it(server: BlobServer, means: SourceContext) -> None:
    server.pause.clear()
    page = UrlRemote(means.session, server.put("/x", DATA))
    tasks = [asyncio.create_task(means.store.obtain(page, ExpectedBlob(DIGEST))) for _ in range(2)]
    await until(lambda: server.asked)
    tasks[0].cancel()
    server.pause.set()
    assert (await tasks[1]).digest == DIGEST
    assert len(server.asked) == 1


async def test_what_failed_is_gone_on_with(server: BlobServer, means: SourceContext) -> None:
    server.cut_after = [150_000, 0, 0, 0]
    page = UrlRemote(means.session, server.put("/x", DATA))
    with pytest.raises(Unreachable):
        await means.store.obtain(page, ExpectedBlob(DIGEST))
    assert names(means.store) == [f"incoming/{HEX}.part"]
    await means.store.obtain(page, ExpectedBlob(DIGEST))
    assert server.asked[-1].range == "bytes=150000-"
    assert names(means.store) == [f"sha256/{HEX}"]


async def test_a_held_blob_is_not_discarded(server: BlobServer, means: SourceContext) -> None:
    store = means.store
    await store.obtain(UrlRemote(means.session, server.put("/x", DATA)), ExpectedBlob(DIGEST))
    with store.hold(DIGEST), store.hold(DIGEST):
        store.discard(DIGEST)
        await store.sweep(older_than_s=-10)
        assert store.find(DIGEST)
    store.discard(DIGEST)
    assert store.find(DIGEST) is None
    with pytest.raises(NotFound):
        store.get(DIGEST)


async def test_sweeping_takes_what_nobody_came_back_for(server: BlobServer, means: SourceContext) -> None:
    store = means.store
    await store.obtain(UrlRemote(means.session, server.put("/x", DATA)), ExpectedBlob(DIGEST))
    old = store.folder / "incoming" / ("0" * 64 + ".part")
    old.write_bytes(b"1")
    assert await store.sweep() == 0
    day_ago = time.time() - 25 * 3600
    for path in (old, store.path(DIGEST)):
        os.utime(path, (day_ago, day_ago))
    assert await store.sweep() == 2
    assert names(store) == []


async def test_sweeping_leaves_a_transfer_alone(server: BlobServer, means: SourceContext) -> None:
    server.pause.clear()
    page = UrlRemote(means.session, server.put("/x", DATA))
    task = asyncio.create_task(means.store.obtain(page, ExpectedBlob(DIGEST)))
    await until(lambda: names(means.store))
    assert await means.store.sweep(older_than_s=-10) == 0
    server.pause.set()
    assert (await task).digest == DIGEST


async def test_forgetting_what_was_cancelled_on_purpose(server: BlobServer, means: SourceContext) -> None:
    store = means.store
    (store.folder / "incoming" / f"{HEX}.part").write_bytes(b"1")
    store.forget(DIGEST)
    assert names(store) == []
    (store.folder / "incoming" / f"{HEX}.part").write_bytes(b"1")
    store.leave()  # the process ends: the next one goes on from there
    store.forget(DIGEST)
    assert names(store) == [f"incoming/{HEX}.part"]


async def test_a_damaged_blob_is_noticed_and_removed(server: BlobServer, means: SourceContext) -> None:
    store = means.store
    await store.obtain(UrlRemote(means.session, server.put("/x", DATA)), ExpectedBlob(DIGEST))
    assert await store.verify(DIGEST)
    store.path(DIGEST).write_bytes(b"other")
    assert not await store.verify(DIGEST)
    assert store.find(DIGEST) is None


async def test_nothing_but_a_digest_names_a_blob(means: SourceContext) -> None:
    with pytest.raises(Invalid):
        means.store.path("sha256:../../etc/passwd")


async def test_others_cannot_read_it(means: SourceContext) -> None:
    assert means.store.path(DIGEST).parent.stat().st_mode & 0o077 == 0
