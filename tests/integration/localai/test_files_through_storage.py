"""Files to and from a worker through an object storage, and what becomes of them when the storage fails."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from corral.blobs.disk import DiskSpace
from corral.blobs.object_store import ObjectStore, StoreLimits
from corral.blobs.storage_settings import StorageSettings
from corral.bus.local import LocalHub
from corral.contract.messages.replicas import ReplicaFile
from corral.controller.localai.calls import PeerCalls, PeerTimes
from corral.controller.localai.cleanup import ObjectSweep
from corral.controller.localai.file_server import FileServerAddress, FileServers
from corral.controller.localai.object_files import ObjectFiles
from corral.controller.localai.staging import PeerStaging, StagingProgress
from corral.kit.clock import SystemClock
from corral.kit.errors import Failed, Unavailable, Unreachable
from corral.worker.localai.file_keys import FileFolders
from corral.worker.localai.file_orders import FileOrders
from tests.compat.localai_files import LocalAIFiles
from tests.support.object_storage import ObjectStorage, open_object_storage
from tests.support.processes import free_port
from tests.support.scripted_catalogue import no_galleries
from tests.support.waiting import until

LIMITS = StoreLimits(connect_s=2, call_s=5, stall_s=5, retries=0)
CONTENT = b"weights" * 10_000
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
FILE = ReplicaFile("m/0123456789ab/w 1.gguf", DIGEST, len(CONTENT))
KEY = f"models/{FILE.path}"


@pytest.fixture(scope="module")
def storage() -> Iterator[ObjectStorage]:
    with open_object_storage() as storage:
        yield storage


class KeptFiles:
    """What the controller has of its models."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, digest: str) -> Path | None:
        return self.path if digest == DIGEST else None


class Site:
    """A Corral worker's own handlers, on the bus beside the controller's client."""

    def __init__(self, root: Path, storage: ObjectStorage, calls: PeerCalls, http: FileServers) -> None:
        self.root, self.storage, self.calls, self.http = root, storage, calls, http
        self.file = root / "kept"
        self.file.write_bytes(CONTENT)
        self.where = FileServerAddress("w1", "")
        self.told: list[StagingProgress] = []

    def objects(self, settings: StorageSettings | None = None) -> ObjectFiles:
        return ObjectFiles(ObjectStore(settings or self.storage.settings, LIMITS), self.calls, fleet="f")

    async def bring(self, objects: ObjectFiles) -> str:
        kept: Any = KeptFiles(self.file)
        staging = PeerStaging(self.http, kept, objects)
        [staged] = await staging.bring("n", self.where, [FILE], self.told.append)
        return staged.there


@pytest.fixture
async def site(tmp_path: Path, storage: ObjectStorage) -> AsyncIterator[Site]:
    clock, hub = SystemClock(), LocalHub(SystemClock())
    (tmp_path / "models").mkdir()
    async with hub.join("c") as bus, hub.join("n") as node, FileServers("shared", clock) as http:
        worker = ObjectStore(storage.settings, LIMITS, space=DiskSpace(0))
        await FileOrders(worker, FileFolders.beside(tmp_path / "models")).subscribe(node, "n")
        calls = PeerCalls(bus, clock, PeerTimes(second_try_s=0.01), galleries_with=no_galleries)
        yield Site(tmp_path, storage, calls, http)
        for key in storage.list_keys():
            storage.call("DELETE", key)


@pytest.fixture
async def http(site: Site) -> AsyncIterator[LocalAIFiles]:
    files = LocalAIFiles(site.root / "http", "shared")
    await files.start()
    site.where = FileServerAddress("w1", f"http://127.0.0.1:{files.port}")
    yield files
    await files.close()


async def test_an_object_is_uploaded_once_and_again_when_it_differs(site: Site, storage: ObjectStorage) -> None:
    async with site.objects() as objects:
        there = await asyncio.gather(site.bring(objects), site.bring(objects))
        here = site.root / "cache" / KEY
        assert set(there) == {str(here)}
        assert here.read_bytes() == CONTENT
        assert [each.current_bytes for each in site.told][-1] == len(CONTENT)
        before = storage.metadata(KEY)["created-at"], storage.call("HEAD", KEY)[1]["last-modified"]
        await site.bring(objects)
        assert (storage.metadata(KEY)["created-at"], storage.call("HEAD", KEY)[1]["last-modified"]) == before
        storage.put(KEY, b"other")
        await site.bring(objects)
        assert here.read_bytes() == CONTENT


async def test_a_result_comes_back_and_leaves_no_object(site: Site, storage: ObjectStorage) -> None:
    result = site.root / "cache/ephemeral/out.wav"
    result.parent.mkdir(parents=True)
    result.write_bytes(b"sound")
    async with site.objects() as objects:
        await objects.fetch("n", str(result), "ephemeral/r/out", site.root / "here", max_bytes=5)
        assert (site.root / "here").read_bytes() == b"sound"
        await until(lambda: storage.list_keys() == [], "deletion")
        with pytest.raises(Failed, match="larger than 4 bytes"):
            await objects.fetch("n", str(result), "ephemeral/r/out", site.root / "here", max_bytes=4)
        with pytest.raises(Failed, match="path outside allowed directories"):
            await objects.fetch("n", "/etc/hostname", "ephemeral/r/out", site.root / "here", max_bytes=4)
        await until(lambda: storage.list_keys() == [], "deletion")


async def test_without_the_storage_files_go_by_http(site: Site, http: LocalAIFiles) -> None:
    nowhere = replace(site.storage.settings, storage_url=f"http://127.0.0.1:{free_port()}")
    no_bucket = replace(site.storage.settings, storage_bucket="absent")
    for settings in (nowhere, no_bucket):
        async with site.objects(settings) as objects:
            here = http.models / FILE.path
            assert await site.bring(objects) == str(here)
            assert here.read_bytes() == CONTENT


async def test_without_either_the_error_says_what_is_wrong(site: Site) -> None:
    nowhere = replace(site.storage.settings, storage_url=f"http://127.0.0.1:{free_port()}")
    async with site.objects(nowhere) as objects:
        with pytest.raises(Unreachable, match=r"the object storage http://127.0.0.1:.*/localai cannot be reached"):
            await site.bring(objects)
    async with site.objects() as objects:
        site.file.unlink()
        with pytest.raises(Unavailable, match="reading models/m"):
            await site.bring(objects)


async def test_the_sweep_deletes_what_is_ours_and_unneeded(site: Site, storage: ObjectStorage) -> None:
    mine, others = {"sha256": "x", "corral-fleet": "f"}, {"sha256": "x", "corral-fleet": "g"}
    ours = ["kept/0123456789ab/w", "runs/0123456789ab/w", "gone/0123456789ab/w", "org/gone/0123456789ab/a b/w"]
    for name in ours:
        storage.put(f"models/{name}", b"x", **mine)
    storage.put("models/theirs/0123456789ab/w", b"x", **others)
    storage.put("models/localai/w.gguf", b"x")
    storage.put("ephemeral/requests/1/in.wav", b"x")

    class Later(SystemClock):
        late = timedelta()

        def now(self) -> datetime:
            return datetime.now(UTC) + self.late

    async def wanted() -> tuple[set[str], set[str]]:
        return {"kept/0123456789ab"}, {"runs"}

    clock, leads = Later(), [False]
    sweep = ObjectSweep(site.objects().store, clock, fleet="f", leads=lambda: leads[0], wanted=wanted)
    everything = sorted(storage.list_keys())
    clock.late = timedelta(hours=2)
    await sweep.run_once()
    assert sorted(storage.list_keys()) == everything, "another controller leads"
    leads[0], clock.late = True, timedelta(minutes=50)
    await sweep.run_once()
    assert sorted(storage.list_keys()) == everything, "seen once"
    clock.late = timedelta(hours=2)
    await sweep.run_once()
    left = ["kept/0123456789ab/w", "localai/w.gguf", "runs/0123456789ab/w", "theirs/0123456789ab/w"]
    assert sorted(storage.list_keys()) == [f"models/{name}" for name in left]
