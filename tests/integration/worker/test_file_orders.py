"""Files through an object storage, ordered over the bus: one run per key, paths that stay inside, failures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral.blobs.disk import DiskSpace
from corral.blobs.object_store import ObjectStore, StoreLimits
from corral.bus.api import Bus
from corral.bus.local import LocalHub
from corral.bus.permissions import Permissions, localai_node_permissions
from corral.contract.messages.files import (
    ENSURE_FILE,
    LIST_DIR,
    STAGE_FILE,
    TEMP_FILE,
    DirListing,
    EnsureFile,
    ListDir,
    LocalFile,
    MakeTempFile,
    StagedFile,
    StageFile,
)
from corral.kit.clock import SystemClock
from corral.worker.localai.file_keys import FileFolders
from corral.worker.localai.file_orders import FileOrders
from tests.support.object_storage import ObjectStorage, open_object_storage

LIMITS = StoreLimits(connect_s=2, call_s=10, stall_s=10, retries=0)


@pytest.fixture(scope="module")
def storage() -> Iterator[ObjectStorage]:
    with open_object_storage() as storage:
        yield storage


class Site:
    def __init__(self, root: Path, storage: ObjectStorage, bus: Bus) -> None:
        self.root, self.storage, self.bus = root, storage, bus
        self.folders = FileFolders.beside(root / "models")
        self.store = ObjectStore(storage.settings, LIMITS, space=DiskSpace(0))
        self.orders = FileOrders(self.store, self.folders)

    async def ensure(self, key: str) -> LocalFile:
        return await self.bus.call(ENSURE_FILE, EnsureFile(key=key), timeout_s=30, node="n")

    async def stage(self, path: str | Path, key: str = "ephemeral/k") -> StagedFile:
        return await self.bus.call(STAGE_FILE, StageFile(local_path=str(path), key=key), timeout_s=30, node="n")

    async def list_dir(self, prefix: str) -> DirListing:
        return await self.bus.call(LIST_DIR, ListDir(key_prefix=prefix), timeout_s=30, node="n")


@pytest.fixture
async def site(tmp_path: Path, storage: ObjectStorage) -> AsyncIterator[Site]:
    hub = LocalHub(SystemClock())
    permissions = localai_node_permissions("n", reply_ttl_s=60)
    async with hub.join("controller") as caller, hub.join("n", permissions=permissions) as node:
        (tmp_path / "models").mkdir()
        site = Site(tmp_path, storage, caller)
        await site.orders.subscribe(node, "n")
        yield site


async def test_a_file_is_brought_once_for_all_who_ask(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.storage.put("models/m/w.gguf", b"weights")
    downloads: list[str] = []
    get_file = ObjectStore.get_file

    async def count(self: ObjectStore, key: str, path: Path, *more: Any) -> Any:
        downloads.append(key)
        await asyncio.sleep(0)
        return await get_file(self, key, path, *more)

    monkeypatch.setattr(ObjectStore, "get_file", count)
    replies = await asyncio.gather(*(site.ensure("models/m/w.gguf") for _ in range(5)))
    path = site.root / "cache/models/m/w.gguf"
    assert {reply.local_path for reply in replies} == {str(path)}
    assert downloads == ["models/m/w.gguf"]
    assert path.read_bytes() == b"weights"
    await site.ensure("models/m/w.gguf")
    assert len(downloads) == 1, "it is compared, not fetched"
    site.storage.put("models/m/w.gguf", b"changed")
    await site.ensure("models/m/w.gguf")
    assert path.read_bytes() == b"changed"
    path.write_bytes(b"damaged")
    await site.ensure("models/m/w.gguf")
    assert path.read_bytes() == b"changed"
    assert (await site.list_dir("models/m")).error, "the models folder has none"
    assert (await site.list_dir("")).files == ("models/m/w.gguf",)


async def test_without_the_storage_a_file_that_is_here_serves(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.storage.put("models/m/kept", b"weights")
    await site.ensure("models/m/kept")
    gone = ObjectStore(replace(site.storage.settings, storage_url="http://127.0.0.1:9"), LIMITS)
    monkeypatch.setattr(site.orders, "_store", gone)
    assert (await site.ensure("models/m/kept")).local_path == str(tmp_path / "cache/models/m/kept")
    missing = await site.ensure("models/m/missing")
    assert missing.local_path == ""
    assert "cannot be reached" in missing.error
    (tmp_path / "models/x").write_text("x")
    assert "cannot be reached" in (await site.stage(tmp_path / "models/x")).error


@pytest.mark.parametrize("key", ["", "../x", "a/../../../x", "out/x", "/", ".", "a\0b", "a//b"])
async def test_a_key_that_leaves_the_cache(site: Site, key: str) -> None:
    site.folders.cache.mkdir()
    (site.folders.cache / "out").symlink_to("/tmp")
    reply = await site.ensure(key)
    assert reply.error
    assert reply.local_path == ""
    assert sorted(os.listdir(site.root)) in (["cache", "models"], ["cache", "data", "models"])


async def test_only_files_of_cache_and_models_are_staged(site: Site) -> None:
    folders, outside = site.folders, site.root / "outside"
    outside.mkdir()
    (site.root / "models-old").mkdir()
    for folder in (folders.cache, folders.data, folders.staging):
        folder.mkdir()
    for folder in (folders.cache, folders.models, folders.data, folders.staging, outside, site.root / "models-old"):
        (folder / "f").write_text(folder.name)
    (folders.models / "out").symlink_to(outside)
    (folders.models / "in").symlink_to(folders.cache)
    for allowed, content in (
        (folders.cache / "f", b"cache"),
        (folders.models / "f", b"models"),
        (folders.models / "in/f", b"cache"),
    ):
        assert await site.stage(allowed) == StagedFile(key="ephemeral/k")
        assert site.storage.read("ephemeral/k") == content
        assert "created-at" in site.storage.metadata("ephemeral/k")
    refused = (
        "/etc/hostname",
        "f",
        folders.models / "out/f",
        site.root / "models-old/f",
        folders.data / "f",
        folders.staging / "f",
        folders.models / "../outside/f",
        "",
    )
    for path in refused:
        assert await site.stage(path) == StagedFile(error="path outside allowed directories")
    assert "there is no file" in (await site.stage(folders.models / "none")).error
    assert "there is no file" in (await site.stage(folders.models)).error
    assert "cannot be the key" in (await site.stage(folders.models / "f", "a/../b")).error
    assert (await site.stage(folders.models / "f", "")).error == "key is required"


async def test_temporary_files(site: Site) -> None:
    replies = [await site.bus.call(TEMP_FILE, MakeTempFile(), timeout_s=10, node="n") for _ in range(2)]
    paths = [Path(reply.local_path) for reply in replies]
    assert len(set(paths)) == 2
    for path in paths:
        assert path.parent == site.root / "cache/staging-tmp"
        assert path.name.startswith("localai-staging-")
        assert path.read_bytes() == b""


async def test_lists(site: Site) -> None:
    for name in ("models/m/a", "models/m/b/c", "data/d", "cache/x/y"):
        (site.root / name).parent.mkdir(parents=True, exist_ok=True)
        (site.root / name).write_text("x")
    for prefix, files in (
        ("models/m", ("a", "b/c")),
        ("models/m/", ("a", "b/c")),
        ("models", ("m/a", "m/b/c")),
        ("data/", ("d",)),
        ("x", ("y",)),
    ):
        assert await site.list_dir(prefix) == DirListing(files=files)
    (site.folders.models / "out").symlink_to("/etc")
    for prefix in ("models/../..", "../", "models/out", "data/../../x", "a\0b"):
        reply = await site.list_dir(prefix)
        assert reply.files == ()
        assert reply.error.startswith("invalid key prefix")
    assert "there is no folder" in (await site.list_dir("none")).error


async def test_a_folder_with_too_many_names_for_one_message(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.worker.localai.file_orders.MAX_PAYLOAD_BYTES", 1000)
    for number in range(100):
        (site.folders.models / f"file-{number}").touch()
    assert "has 100 files, too many for one message" in (await site.list_dir("models")).error


async def test_a_subscription_that_is_refused_is_logged_and_ends_nothing(
    tmp_path: Path, storage: ObjectStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = LocalHub(SystemClock())
    async with hub.join("n", permissions=Permissions(publish=(), subscribe=("nodes.n.backend.>",))) as node:
        await Site(tmp_path, storage, node).orders.subscribe(node, "n")
    assert "files through the object storage are not served" in capsys.readouterr().out
