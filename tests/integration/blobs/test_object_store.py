"""Files in an S3 server: resumed, verified, cancelled cleanly, and errors that say what to do."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from corral.blobs import object_store
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace, WrongDigest
from corral.blobs.object_store import ObjectStore, StoreLimits
from corral.blobs.storage_settings import StorageSettings
from corral.kit.errors import Denied, Invalid, NotFound, Unreachable
from tests.support.object_storage import ObjectStorage, open_object_storage

LIMITS = StoreLimits(connect_s=2, call_s=10, stall_s=5, retries=1)
BIG = os.urandom(object_store.PART_BYTES + 12_345)


@pytest.fixture(scope="module")
def storage() -> Iterator[ObjectStorage]:
    with open_object_storage() as storage:
        yield storage


@pytest.fixture
def store(storage: ObjectStorage) -> ObjectStore:
    return ObjectStore(storage.settings, LIMITS, space=DiskSpace(0))


def settings_for(url: str) -> StorageSettings:
    return StorageSettings(storage_url=url, storage_access_key="a", storage_secret_key="s")


@pytest.fixture
async def denying() -> AsyncIterator[str]:
    async def deny(_request: web.Request) -> web.Response:
        return web.Response(status=403, text="<Error><Code>AccessDenied</Code></Error>", content_type="text/xml")

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", deny)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("content", [b"", b"small", BIG], ids=["empty", "small", "in parts"])
async def test_a_file_goes_up_and_comes_back(
    store: ObjectStore, storage: ObjectStorage, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "up").write_bytes(content)
    seen: list[tuple[int, int]] = []
    key = f"models/m/{len(content)}.gguf"
    assert await store.put_file(tmp_path / "up", key, on_bytes=lambda have, total: seen.append((have, total))) == len(
        content
    )
    assert storage.read(key) == content
    assert seen[-1] == (len(content), len(content))
    seen.clear()
    found = await store.get_file(key, tmp_path / "deep" / "down", lambda have, total: seen.append((have, total)))
    assert (tmp_path / "deep" / "down").read_bytes() == content
    assert (found.size, seen[-1]) == (len(content), (len(content), len(content)))
    assert os.listdir(tmp_path / "deep") == ["down"]
    assert storage.unfinished_uploads() == []


async def test_the_time_of_the_upload_is_kept_as_metadata(
    store: ObjectStore, storage: ObjectStorage, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"x")
    before = datetime.now(UTC).replace(microsecond=0)
    await store.put_file(tmp_path / "x", "ephemeral/x", metadata={"sha256": "12"})
    assert set(storage.metadata("ephemeral/x")) == {"created-at", "sha256"}
    found = await store.get("ephemeral/x")
    assert before <= found.created_at <= datetime.now(UTC)
    assert found.metadata["sha256"] == "12"
    storage.put("ephemeral/old", b"y", created_at="2020-01-02T03:04:05Z")
    assert (await store.get("ephemeral/old")).created_at == datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
    storage.put("ephemeral/plain", b"y")
    assert (await store.get("ephemeral/plain")).created_at >= before


@pytest.mark.parametrize("key", ["models/a b/ü#1?x%20~[y].bin", "models/50%/f+g&h=1,2;'z", "x%zz"])
async def test_a_key_is_the_same_for_every_client(
    store: ObjectStore, storage: ObjectStorage, tmp_path: Path, key: str
) -> None:
    storage.put(key, b"theirs")
    await store.get_file(key, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"theirs"
    (tmp_path / "g").write_bytes(b"ours")
    await store.put_file(tmp_path / "g", key)
    assert storage.read(key) == b"ours"


async def test_listing_and_deletion(store: ObjectStore, storage: ObjectStorage) -> None:
    for key in ("list/a", "list/b/c", "listing"):
        storage.put(key, b"12")
    assert sorted([found.key async for found in store.list_("list")]) == ["list/a", "list/b/c"]
    await store.delete("list/a")
    await store.delete("list/a")
    assert [found.key async for found in store.list_("list")] == ["list/b/c"]
    assert await store.find("list/a") is None
    await store.check()


async def test_a_broken_download_is_resumed(
    store: ObjectStore, storage: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("models/resumed", BIG)
    started: list[int] = []

    def stop_in_the_middle(have: int, _total: int) -> None:
        started.append(have)
        if have > 2 << 20:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        await store.get_file("models/resumed", tmp_path / "f", stop_in_the_middle)
    assert not (tmp_path / "f").exists()
    begun: list[int] = []
    await store.get_file("models/resumed", tmp_path / "f", lambda have, _total: begun.append(have))
    assert begun[0] == started[-1] > 2 << 20
    assert (tmp_path / "f").read_bytes() == BIG
    assert os.listdir(tmp_path) == ["f"]


async def test_a_changed_object_is_not_mixed_with_the_old_one(
    store: ObjectStore, storage: ObjectStorage, tmp_path: Path
) -> None:
    storage.put("models/changed", BIG)

    def stop_in_the_middle(have: int, _total: int) -> None:
        if have > 2 << 20:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        await store.get_file("models/changed", tmp_path / "f", stop_in_the_middle)
    storage.put("models/changed", BIG[::-1])
    await store.get_file("models/changed", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == BIG[::-1]


async def test_a_hash_that_the_uploader_stored_is_verified(
    store: ObjectStore, storage: ObjectStorage, tmp_path: Path
) -> None:
    storage.put("models/right", b"abc", sha256=hashlib.sha256(b"abc").hexdigest())
    await store.get_file("models/right", tmp_path / "right")
    storage.put("models/wrong", b"abd", sha256=hashlib.sha256(b"abc").hexdigest())
    with pytest.raises(WrongDigest):
        await store.get_file("models/wrong", tmp_path / "wrong")
    assert os.listdir(tmp_path) == ["right"]


async def test_a_cancelled_upload_leaves_no_parts(store: ObjectStore, storage: ObjectStorage, tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(200 << 20)
    begun = asyncio.Event()

    def on_bytes(have: int, _total: int) -> None:
        if have > 2 * object_store.PART_BYTES:
            begun.set()

    upload = asyncio.create_task(store.put_file(tmp_path / "huge", "models/huge", on_bytes=on_bytes))
    async with asyncio.timeout(20):
        await begun.wait()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert storage.unfinished_uploads() == []
    assert "models/huge" not in storage.list_keys()


async def test_errors_say_what_is_wrong(
    storage: ObjectStorage, store: ObjectStore, denying: str, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"x")
    with pytest.raises(NotFound, match="models/none is not in the object storage"):
        await store.get_file("models/none", tmp_path / "y")
    with pytest.raises(Invalid, match="cannot be the key"):
        await store.get("models/../etc")
    no_bucket = ObjectStore(replace(storage.settings, storage_bucket="none"), LIMITS)
    with pytest.raises(NotFound, match=r"no bucket .*--storage-bucket"):
        await no_bucket.put_file(tmp_path / "x", "k")
    with pytest.raises(NotFound, match="no bucket"):
        await no_bucket.check()
    denied = ObjectStore(settings_for(denying), LIMITS)
    for call in (denied.get("k"), denied.put_file(tmp_path / "x", "k"), denied.delete("k")):
        with pytest.raises(Denied, match="denies access to k: check its keys"):
            await call
    with pytest.raises(Denied, match="denies access"):
        await denied.check()
    assert os.listdir(tmp_path) == ["x"]


async def test_a_machine_without_credentials(denying: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", denying)
    with pytest.raises(Denied, match=r"no credentials .*: give --storage-access-key and --storage-secret-key"):
        await ObjectStore(StorageSettings(storage_url=denying), LIMITS).get("k")


async def test_an_unreachable_storage(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = ObjectStore(settings_for(f"http://127.0.0.1:{closed.getsockname()[1]}"), LIMITS)
        with pytest.raises(Unreachable, match="cannot be reached"):
            await nobody.get("k")
        with pytest.raises(Unreachable):
            await nobody.put_file(tmp_path / "x", "k")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hangs = ObjectStore(settings_for(f"http://127.0.0.1:{silent.getsockname()[1]}"), StoreLimits(call_s=0.3))
        with pytest.raises(Unreachable, match="does not respond"):
            await hangs.get("k")


async def test_calls_can_be_cancelled(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hangs = ObjectStore(settings_for(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await hangs.get_file("k", tmp_path / "f")
        connection, _ = silent.accept()
        with connection:
            connection.settimeout(10)
            while connection.recv(4096):  # the client has closed its side
                pass
    assert os.listdir(tmp_path) == []


async def test_a_full_disk_leaves_nothing_behind(
    storage: ObjectStorage, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("models/full", BIG)
    with pytest.raises(NoSpace):
        await ObjectStore(storage.settings, LIMITS, space=DiskSpace(1 << 60)).get_file("models/full", tmp_path / "f")

    def fail(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(object_store._Partial, "write", fail)
    with pytest.raises(NoSpace, match="the disk is full"):
        await store.get_file("models/full", tmp_path / "f")
    assert os.listdir(tmp_path) == []
