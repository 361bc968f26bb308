"""A model's files are fetched to the controller as an operation: watched, cancelled, retried, resumed, shared."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corral.blobs.archives.open import unpack_archive
from corral.blobs.disk import DiskSpace
from corral.blobs.progress import Progress
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher, FetchLimits
from corral.blobs.transfer.remote import open_session
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition, read_definition
from corral.controller.access.signing import open_ingress_tokens
from corral.controller.files.blob_listener import ControllerBlobUrls
from corral.controller.files.fetches import Fetches
from corral.controller.files.file_resolver import FileResolver, ResolverSettings
from corral.controller.files.model_files import FileRetention, ModelFiles
from corral.controller.settings.backends import BackendSettings
from corral.kit.clock import SystemClock
from corral.kit.errors import Failed, NotFound
from corral.kit.settings import Seconds
from corral.kit.tasks import run_every
from corral.store.tables import models, revisions
from corral.store.tables.models import StoredModel
from tests.support.backend_fleet import Controller, Fleet
from tests.support.blob_server import BlobServer
from tests.support.waiting import until

WEIGHTS = os.urandom(2_000_000)
LEASE = "replicas"
QUICK = BackendSettings(progress_interval_s=Seconds(0.01), retry_first_s=Seconds(0.2), retry_cap_s=Seconds(0.2))


@dataclass
class Site:
    fleet: Fleet
    server: BlobServer
    session: aiohttp.ClientSession
    folder: Path
    stack: AsyncExitStack
    running: list[asyncio.Task[None]] = field(default_factory=list)

    async def fetches(self, controller: Controller, *, settings: BackendSettings = QUICK) -> Fetches:
        """The part itself, on a controller with a disk of its own; it loads models if nobody else does."""
        store, clock = controller.store, SystemClock()
        files = ModelFiles(
            store,
            BlobStore(self.folder / controller.name, Fetcher(FetchLimits(tries=2, first_wait_s=0.01))),
            FileResolver(self.session, None, None, ResolverSettings()),  # type: ignore[arg-type]
            await open_ingress_tokens(store, clock),
            clock,
            blob_urls=ControllerBlobUrls(store, clock, own="", live_for_s=1.0, every_s=1.0),
            credential_of=lambda _node_id: "",
            disk=DiskSpace(reserve_bytes=0),
            retention=FileRetention(folder=self.folder / "models"),
        )
        fetches = Fetches(
            store,
            controller.bus,
            files,
            controller.backends.progress,
            controller.leadership,
            controller.feed,
            clock,
            settings,
            lease=LEASE,
            interval_s=0.05,
        )

        async def lead() -> None:
            await controller.leadership.lead(LEASE)

        controller.tasks.append(asyncio.create_task(run_every("lead", 0.05, lead, clock=clock)))
        await until(lambda: controller.leadership.epoch(LEASE) or len(self.fleet.controllers) > 1)
        controller.tasks.append(asyncio.create_task(fetches.run()))
        return fetches

    async def model(self, name: str = "m", **words: Any) -> Definition:
        known = {"download_files": [{"filename": "w.gguf", "uri": self.server.url("/w.gguf")}]}
        definition = read_definition({"name": name, "backend": "tiny"} | known | words)
        async with self.fleet.store.write() as tx:
            now = await tx.now()
            await models.put(
                tx,
                StoredModel(
                    id=name,
                    definition=definition.whole,
                    revision=definition.revision,
                    origin="person",
                    created_at=now,
                    updated_at=now,
                ),
            )
            await revisions.bump(tx, "models")
        return definition

    async def until_moving(self, operation: str, on: Controller | None = None) -> None:
        async def moving() -> bool:
            return (await self.fleet.view(operation, on)).current_bytes > 0

        await until(moving, "bytes")


@asynccontextmanager
async def open_site(fleet: Fleet, folder: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(BlobServer())
        session = await stack.enter_async_context(open_session(inside=True))
        server.put("/w.gguf", WEIGHTS, etag='"1"')
        yield Site(fleet, server, session, folder, stack)
        for controller in fleet.controllers:
            await controller.kill()


@pytest.fixture
async def site(fleet: Fleet, tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(fleet, tmp_path) as opened:
        yield opened


@pytest.fixture
async def local_site(local_fleet: Fleet, tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(local_fleet, tmp_path) as opened:
        yield opened


async def test_it_is_an_operation_that_every_controller_shows(site: Site) -> None:
    await site.model()
    second = await site.fleet.controller("c2")
    fetches = await site.fetches(site.fleet.first)
    site.server.pause.clear()
    operation = await fetches.request("m", by="boss")
    assert await fetches.request("m") == operation, "asking twice is one operation"
    site.server.pause.set()
    shown = await site.fleet.until(operation, "done")
    (row,) = shown.nodes
    assert (shown.kind, shown.backend, shown.scope, shown.is_backend) == ("fetch", "m", "controller", False)
    assert (shown.outcome, shown.created_by, shown.progress) == ("completed", "boss", 100)
    assert (row.node_name, row.status, row.current_bytes, row.total_bytes) == (
        "controller",
        "success",
        2_000_000,
        2_000_000,
    )
    assert await site.fleet.view(operation, second) == shown
    assert await fetches.request("m") == "", "it is all here"


async def test_progress_is_heard_everywhere(site: Site) -> None:
    await site.model()
    second = await site.fleet.controller("c2")
    fetches = await site.fetches(site.fleet.first)
    site.server.hold_after = 500_000
    operation = await fetches.request("m")
    await site.until_moving(operation, second)
    shown = await site.fleet.view(operation, second)
    row = shown.nodes[0]
    assert (row.status, row.phase, row.file_name, row.total_bytes) == (
        "downloading",
        "downloading",
        "w.gguf",
        2_000_000,
    )
    assert 0 < row.current_bytes < 2_000_000
    assert shown.message == "files are fetched to the controller"
    assert (shown.state, shown.settled, shown.cancellable) == ("under_way", False, True)
    site.server.pause.set()
    await site.fleet.until(operation, "done")


async def test_the_bar_moves_while_an_archive_is_unpacked(local_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site, go_on = local_site, threading.Event()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("w.gguf")
        entry.size = len(WEIGHTS)
        archive.addfile(entry, io.BytesIO(WEIGHTS))
    size = len(packed.getvalue())

    def stop_half_way(path: Path, *args: Any, on_bytes: Any, **more: Any) -> None:
        on_bytes(size // 2)
        assert go_on.wait(60)
        unpack_archive(path, *args, **more)

    monkeypatch.setattr("corral.controller.files.archives.unpack_archive", stop_half_way)
    uri = site.server.put("/w.tar", packed.getvalue())
    await site.model(download_files=[{"filename": "w.tar", "uri": uri}])
    operation = await (await site.fetches(site.fleet.first)).request("m")

    async def half_way() -> bool:
        row = (await site.fleet.view(operation)).nodes[0]
        return (row.phase, row.current_bytes, row.total_bytes, row.percentage) == (
            "extracting",
            size // 2,
            size,
            82.5,  # 65 % for what was fetched, and half of the rest
        )

    await until(half_way, "half of it unpacked")
    go_on.set()
    assert (await site.fleet.until(operation, "done")).progress == 100


async def test_cancelled_bytes_stop_and_loads_are_told_until_somebody_asks_again(local_site: Site) -> None:
    site = local_site
    definition = await site.model()
    fetches = await site.fetches(site.fleet.first)
    site.server.hold_after = 500_000
    told: list[Progress] = []
    load = asyncio.create_task(fetches.ensure(definition, told.append))
    (operation,) = await until(lambda: _open_ids(site.fleet))
    await until(lambda: told and told[-1].current_bytes)
    await site.fleet.operations.cancel(operation)
    with pytest.raises(Failed, match=f"corral ops retry {operation[:8]}"):
        await load
    site.server.pause.set()
    await until(lambda: site.server.broken_off, "the reader gone")
    asked = len(site.server.asked)
    with pytest.raises(Failed, match="was cancelled"):
        await fetches.ensure(definition)
    assert len(site.server.asked) == asked, "nobody fetches what a person has stopped"
    assert await _open_ids(site.fleet) == []
    assert (await site.fleet.view(operation)).outcome == "cancelled"
    again = (await site.fleet.operations.retry(operation, by="boss")).operation_id
    assert again != operation
    await site.fleet.until(again, "done")
    (file,) = await fetches.ensure(definition)
    assert file.size_bytes == len(WEIGHTS)


async def test_loads_share_what_is_under_way(local_site: Site) -> None:
    site = local_site
    definition = await site.model()
    fetches = await site.fetches(site.fleet.first)
    site.server.pause.clear()
    operation = await fetches.request("m", by="boss")
    told: list[Progress] = []
    loads = [asyncio.create_task(fetches.ensure(definition, told.append)) for _ in range(3)]
    loads[0].cancel()
    await asyncio.wait(loads[:1])
    site.server.pause.set()
    found: list[tuple[ReplicaFile, ...]] = [await load for load in loads[1:]]
    assert found[0] == found[1]
    assert site.server.bytes_sent == len(WEIGHTS)
    assert (await site.fleet.until(operation, "done")).created_by == "boss"
    assert await _open_ids(site.fleet) == []


async def test_failures_tell_their_cause_and_retry_works(local_site: Site) -> None:
    site = local_site
    definition = await site.model()
    fetches = await site.fetches(site.fleet.first)
    gone = site.server.files.pop("/w.gguf")
    with pytest.raises(NotFound, match=r"w\.gguf"):
        await fetches.ensure(definition)
    (operation,) = await _open_ids(site.fleet)
    shown = await site.fleet.until(operation, "failing")
    assert "w.gguf" in shown.error
    assert shown.nodes[0].next_retry_at == "", "what is not there does not come by itself"
    site.server.files["/w.gguf"] = gone
    await site.fleet.operations.retry(operation)
    assert (await site.fleet.until(operation, "done")).outcome == "completed"
    assert (await site.fleet.view(operation)).nodes[0].failures == 1


async def test_an_edit_mends_what_failed_and_a_deleted_model_ends_it(local_site: Site) -> None:
    site = local_site
    await site.model(download_files=[{"filename": "w.gguf", "uri": site.server.url("/nowhere")}])
    fetches = await site.fetches(site.fleet.first)
    operation = await fetches.request("m")
    await site.fleet.until(operation, "failing")
    await site.model()
    await site.fleet.until(operation, "done")
    await site.model("other", download_files=[{"filename": "w.gguf", "uri": site.server.url("/nowhere")}])
    operation = await fetches.request("other")
    await site.fleet.until(operation, "failing")
    async with site.fleet.store.write() as tx:
        await models.delete(tx, "other")
        await revisions.bump(tx, "models")
    shown = await site.fleet.until(operation, "done")
    assert shown.nodes[0].status == "withdrawn"
    assert shown.nodes[0].error == "the model was deleted"


async def test_the_next_controller_goes_on(site: Site) -> None:
    await site.model()
    first = site.fleet.first
    fetches = await site.fetches(first)
    site.server.hold_after = 1_000_000
    operation = await fetches.request("m")
    await site.until_moving(operation)
    second = await site.fleet.controller("c2")
    await first.kill()
    site.server.pause.set()
    await site.fetches(second)

    async def over() -> bool:
        return (await site.fleet.view(operation, second)).outcome == "completed"

    await until(over)
    assert [path.stat().st_size for path in (site.folder / "c2" / "sha256").iterdir()] == [len(WEIGHTS)]


async def test_what_came_before_a_restart_is_not_fetched_again(local_site: Site) -> None:
    site = local_site
    await site.model()
    first = site.fleet.first
    fetches = await site.fetches(first)
    site.server.hold_after = 1_000_000
    operation = await fetches.request("m")
    await site.until_moving(operation)
    await first.kill()
    site.server.pause.set()
    first.start()
    await site.fetches(first)
    await site.fleet.until(operation, "done")
    assert [each.range for each in site.server.asked if each.range], "it asked for the rest only"


async def _open_ids(fleet: Fleet) -> list[str]:
    return [view.job_id for view in await fleet.operations.list_views()]
