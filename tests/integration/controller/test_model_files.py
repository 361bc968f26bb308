"""Files of models: found at their sources, fetched to the controller once, remembered, and offered to workers."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import socket
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace, WrongDigest
from corral.blobs.oci.registry import RegistryClient, RegistrySettings
from corral.blobs.progress import Progress
from corral.blobs.serving.server import ServingLimits
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher, FetchLimits
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import open_session
from corral.bus.api import Tokens
from corral.bus.local import LocalHub
from corral.contract.access import Scope
from corral.contract.codec import decode
from corral.contract.messages.replicas import START_REPLICA, ReplicaFile, ReplicaReply, StartReplica
from corral.contract.models import Definition, read_definition
from corral.contract.sources import Wheel
from corral.controller.access.active_nodes import ActiveNodes
from corral.controller.access.signing import IngressTokens, open_ingress_tokens
from corral.controller.files.blob_listener import ControllerBlobUrls, open_blob_listener
from corral.controller.files.file_resolver import FileResolver, ResolverSettings
from corral.controller.files.hubs.hub import HubSettings
from corral.controller.files.images import Images
from corral.controller.files.missing_blobs import MissingBlobs
from corral.controller.files.model_cache import ModelCache, ModelCacheLimits
from corral.controller.files.model_files import FileRetention, ModelFiles
from corral.controller.files.packages import Packages
from corral.controller.orders.observations import OrderAccepted
from corral.controller.orders.order import OrderId
from corral.controller.orders.replica_calls import ReplicaCalls
from corral.controller.settings.models import FileSettings
from corral.gallery.pypi.lock import Lock
from corral.kit.clock import SystemClock
from corral.kit.errors import Denied, Invalid, NotFound
from corral.kit.settings import BadSettings
from corral.kit.tasks import background
from corral.store import Store, open_store
from corral.store.tables import controllers, model_files, models, nodes
from corral.store.tables.models import StoredModel
from corral.worker.files.fleet_blobs import FleetBlobs
from corral.worker.files.model_files import WorkerFiles
from tests.integration.store.rows import a_node
from tests.support.blob_server import BlobServer
from tests.support.image_registry import ImageRegistry, layer, make_artifact, make_image, push_image, registry
from tests.support.processes import free_port
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until

__all__ = ["registry"]  # a fixture

WEIGHTS = os.urandom(1_500_000)
DIGEST = "sha256:" + hashlib.sha256(WEIGHTS).hexdigest()


QUICK = FetchLimits(tries=9, first_wait_s=0.01, cap_wait_s=0.1)
PATIENT = FetchLimits(tries=1000, first_wait_s=0.01, cap_wait_s=0.1)


class OneWheel:
    """An index of one package, whose wheel a server has."""

    def __init__(self) -> None:
        self.wheel: Wheel | None = None
        self.asked: list[str] = []

    async def lock(self, requirement: str, *, platform: str, python: str) -> Lock:
        self.asked.append(requirement)
        if self.wheel is None:
            raise NotFound(f"{requirement} cannot be had")
        pinned = f"{self.wheel.project}=={self.wheel.version}"
        return Lock(pinned, self.wheel.version, python, (self.wheel,))

    async def lock_pinned(self, requirements: str, *, platform: str, python: str) -> tuple[Wheel, ...]:
        return (await self.lock(requirements, platform=platform, python=python)).wheels

    async def fill(self, wheels: tuple[Wheel, ...]) -> tuple[Wheel, ...]:
        return wheels


@dataclass
class Site:
    folder: Path
    store: Store
    blobs: BlobStore
    server: BlobServer
    index: OneWheel
    tokens: IngressTokens
    session: aiohttp.ClientSession
    active: ActiveNodes
    free: int = 100 << 30
    told: list[Progress] = field(default_factory=list)
    hub: str = "http://hub.invalid"
    hub_token: str = ""
    blob_urls: ControllerBlobUrls | None = None
    cache: ModelCache = field(init=False)

    def __post_init__(self) -> None:
        self.measure: Callable[[], int] = lambda: self.free

    def files(self, folder: str = "blobs", *, limits: ModelCacheLimits | None = None) -> ModelFiles:
        """Another `folder` is another controller."""
        self.blobs = BlobStore(self.folder / folder, Fetcher(QUICK))
        blob_urls = self.blob_urls or ControllerBlobUrls(self.store, SystemClock(), own="", live_for_s=1.0, every_s=1.0)
        registry = RegistryClient(self.session, settings=RegistrySettings(tries=1))
        resolver = FileResolver(
            self.session,
            Packages(self.session, self.index, self.index, platform="linux/amd64", python="3.11"),
            Images(registry, platform="linux/amd64"),
            ResolverSettings(
                folders=(self.folder / "open", self.folder / "models"), hub=HubSettings(self.hub, self.hub_token)
            ),
        )
        disk = DiskSpace(reserve_bytes=0, measure=lambda _folder: self.measure())
        retention = FileRetention(folder=self.folder / "models", unused_s=100.0)
        self.cache = ModelCache(self.store, self.blobs, SystemClock(), limits, disk=disk)
        return ModelFiles(
            self.store,
            self.blobs,
            resolver,
            self.tokens,
            SystemClock(),
            blob_urls=blob_urls,
            credential_of=self.active.credential,
            disk=disk,
            retention=retention,
            cache=self.cache,
        )

    async def install(self, **words: Any) -> Definition:
        definition = read_definition({"name": "m", "backend": "tiny"} | words)
        async with self.store.write() as tx:
            now = await tx.now()
            await models.put(
                tx,
                StoredModel(
                    id=definition.name,
                    definition=definition.whole,
                    revision=definition.revision,
                    origin="person",
                    created_at=now,
                    updated_at=now,
                ),
            )
        return definition

    async def rows(self) -> dict[str, tuple[str, str]]:
        async with self.store.read() as tx:
            return {row.path: (row.resolved, row.digest) for row in await model_files.list_(tx)}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    for name in ("open", "models"):
        (tmp_path / name).mkdir()
    async with (
        open_store(sqlite_url(tmp_path)) as store,
        open_session(inside=True) as session,
        BlobServer() as server,
    ):
        tokens = await open_ingress_tokens(store, SystemClock())
        async with store.write() as tx:
            await nodes.insert(tx, a_node(id="node-1", name="barn", token_hash="ab" * 32, approved=True))
        active = ActiveNodes(store, SystemClock())
        await active.refresh()
        yield Site(tmp_path, store, BlobStore(tmp_path / "blobs"), server, OneWheel(), tokens, session, active)


def listed(*files: tuple[str, str], **more: str) -> dict[str, Any]:
    return {"download_files": [{"filename": path, "uri": uri} | more for path, uri in files]}


async def test_a_download_and_a_file_of_this_machine(site: Site) -> None:
    (site.folder / "open" / "tok.json").write_bytes(b"{}")
    local = (site.folder / "open" / "tok.json").as_uri()
    web_uri = site.server.put("/w.gguf", WEIGHTS, etag='"1"')
    definition = await site.install(parameters={"model": "w.gguf"}, **listed(("tok.json", local), ("w.gguf", web_uri)))
    files = site.files()
    assert await files.known(definition) is None
    got = await files.ensure(definition, site.told.append)
    which = got[0].path.split("/")[1]
    assert [(file.path, file.size_bytes) for file in got] == [
        (f"m/{which}/w.gguf", len(WEIGHTS)),
        (f"m/{which}/tok.json", 2),
    ]
    assert got[0].digest == DIGEST
    path = files.find(DIGEST)
    assert path is not None
    assert path.read_bytes() == WEIGHTS
    assert (site.told[-1].current_bytes, site.told[-1].total_bytes) == (len(WEIGHTS) + 2, len(WEIGHTS) + 2)
    assert files.status("m") is None
    assert await files.known(definition) == got
    asked = len(site.server.asked)
    assert await files.ensure(definition) == got
    assert len(site.server.asked) == asked


async def test_a_file_inside_a_wheel(site: Site) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo/__init__.py", "")
        archive.writestr("demo/w.gguf", WEIGHTS)
    content = packed.getvalue()
    url = site.server.put("/demo.whl", content)
    site.index.wheel = Wheel(
        "demo-1.2-py3-none-any.whl", url, hashlib.sha256(content).hexdigest(), len(content), "demo", "1.2"
    )
    definition = await site.install(**listed(("w.gguf", "pypi://demo/demo/w.gguf")))
    (file,) = await site.files().ensure(definition)
    assert (file.digest, file.size_bytes) == (DIGEST, len(WEIGHTS))
    assert await site.rows() == {"w.gguf": ("pypi://demo==1.2/demo/w.gguf", DIGEST)}
    assert os.listdir(site.folder / "blobs" / "sha256") == [DIGEST.removeprefix("sha256:")]
    # Another controller fetches the same version, whatever is the newest by now.
    assert await site.files("elsewhere").ensure(definition) == (file,)
    assert site.index.asked == ["demo", "demo==1.2"]
    absent = await site.install(**listed(("w.gguf", "pypi://demo/demo/other.gguf")))
    with pytest.raises(NotFound, match=r"demo/w\.gguf"):
        await site.files().ensure(absent)


async def test_the_hub_tells_what_is_there_and_sees_the_token_alone(site: Site) -> None:
    commit = "c" * 40
    cdn = site.server.put("/cdn/w.gguf", WEIGHTS)
    shown: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        shown.append(request.headers.get("Authorization", ""))
        if shown[-1] != "Bearer hf_secret":
            return web.Response(status=401)
        headers = {
            "Location": cdn,
            "X-Repo-Commit": commit,
            "X-Linked-ETag": f'"{DIGEST.removeprefix("sha256:")}"',
            "X-Linked-Size": str(len(WEIGHTS)),
        }
        return web.Response(status=302, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site.hub = f"http://127.0.0.1:{runner.addresses[0][1]}"
    definition = await site.install(parameters={"model": "huggingface://ann/demo/w.gguf"})
    with pytest.raises(Denied, match="--huggingface-token"):
        await site.files().ensure(definition)
    site.hub_token = "hf_secret"
    (file,) = await site.files().ensure(definition)
    assert file.path.endswith("/w.gguf")
    assert file.digest == DIGEST
    assert await site.rows() == {"w.gguf": (f"{site.hub}/ann/demo/resolve/{commit}/w.gguf", DIGEST)}
    assert {asked.authorization for asked in site.server.asked} == {""}
    await runner.cleanup()


async def test_files_of_artifacts_and_images(site: Site, registry: ImageRegistry) -> None:
    artifact = make_artifact({"model/w.gguf": WEIGHTS, "README.md": b"read me"})
    push_image(registry.url, "demo/artifact", "1", artifact)
    reference = f"oci://{registry.host}/demo/artifact:1"
    definition = await site.install(**listed(("model/w.gguf", reference), ("docs/README.md", reference)))
    files = site.files()
    weights, readme = await files.ensure(definition)
    assert (weights.digest, readme.size_bytes) == (DIGEST, 7)
    assert (await site.rows())["docs/README.md"][0] == f"oci://{registry.host}/demo/artifact@{artifact.digest}"
    absent = await site.install(**listed(("other.gguf", reference)))
    with pytest.raises(NotFound, match=r"model/w\.gguf, README\.md"):
        await files.ensure(absent)
    image = make_image({"linux/amd64": [layer({"models/w.gguf": WEIGHTS}), layer({"etc/x": b"1"})]})
    push_image(registry.url, "demo/image", "1", image)
    definition = await site.install(**listed(("models/w.gguf", f"oci://{registry.host}/demo/image:1")))
    files = site.files("elsewhere")
    (found,) = await files.ensure(definition)
    assert found.digest == DIGEST
    assert os.listdir(site.folder / "elsewhere" / "sha256") == [DIGEST.removeprefix("sha256:")]


async def test_only_opened_folders_are_read(site: Site) -> None:
    (site.folder / "secret").write_bytes(b"s")
    (site.folder / "open" / "link").symlink_to(site.folder / "secret")
    for name in ("secret", "open/../secret", "open/link"):
        definition = await site.install(**listed(("x", f"file://{site.folder}/{name}")))
        with pytest.raises(Denied, match="--file-folders"):
            await site.files().ensure(definition)
    definition = await site.install(**listed(("x", f"file://{site.folder}/open/none")))
    with pytest.raises(NotFound):
        await site.files().ensure(definition)
    for uri in ("file://elsewhere/x", "gopher://x/y", "pypi://demo", "pypi://demo/../x"):
        definition = await site.install(**listed(("x", uri)))
        with pytest.raises(Invalid):
            await site.files().ensure(definition)


async def test_files_beside_the_definitions(site: Site) -> None:
    (site.folder / "models" / "mine").mkdir()
    for name in ("a.safetensors", "config.json", "a.safetensors.sha256", ".hidden"):
        (site.folder / "models" / "mine" / name).write_bytes(name.encode())
    definition = await site.install(parameters={"model": "mine"})
    got = await site.files().ensure(definition)
    assert [file.path.split("/", 2)[2] for file in got] == ["mine/a.safetensors", "mine/config.json"]
    engine = await site.install(parameters={"model": "org/fetched-by-the-engine"})
    assert await site.files().ensure(engine) == ()


async def test_what_was_declared_is_insisted_on_and_what_was_not_may_change(site: Site) -> None:
    uri = site.server.put("/w", WEIGHTS, etag='"1"')
    declared = await site.install(**listed(("w", uri), sha256="0" * 64))
    with pytest.raises(WrongDigest):
        await site.files().ensure(declared)
    files = site.files()
    with pytest.raises(WrongDigest):
        await files.ensure(declared)
    assert "not sha256:000" in (status.error if (status := files.status("m")) else "")
    free = await site.install(**listed(("w", uri)))
    (before,) = await site.files().ensure(free)
    site.server.put("/w", WEIGHTS + b"more", etag='"2"')
    (same,) = await site.files().ensure(free)
    assert same == before
    (after,) = await site.files("elsewhere").ensure(free)
    assert after.size_bytes == len(WEIGHTS) + 4
    assert after.path != before.path


async def test_files_a_model_has_no_more_are_forgotten(site: Site) -> None:
    first, second = (site.server.put(f"/{name}", name.encode(), etag='"1"') for name in "ab")
    await site.files().ensure(await site.install(**listed(("a", first), ("b", second))))
    assert list(await site.rows()) == ["a", "b"]
    await site.files().ensure(await site.install(**listed(("b", second))))
    assert list(await site.rows()) == ["b"]


async def test_room_is_asked_for_before_the_first_byte(site: Site) -> None:
    uris = [(f"w{number}", site.server.put(f"/{number}", WEIGHTS, etag='"1"')) for number in range(3)]
    definition = await site.install(**listed(*uris))
    site.free = 2 * len(WEIGHTS)
    with pytest.raises(NoSpace, match="files of m"):
        await site.files().ensure(definition)
    assert os.listdir(site.folder / "blobs" / "incoming") == []


async def test_a_fetch_that_is_cancelled_goes_on_later(site: Site) -> None:
    uri = site.server.put("/w", WEIGHTS, etag='"1"')
    definition = await site.install(**listed(("w", uri)))
    site.server.pause.clear()
    files = site.files()
    asking = [asyncio.create_task(files.ensure(definition, site.told.append)) for _ in range(2)]
    await until(lambda: len(site.server.asked) >= 2)
    site.server.cut_after = [700_000]
    site.server.pause.set()
    await until(lambda: any(progress.current_bytes >= 100_000 for progress in site.told))
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    await site.files().ensure(definition)
    starts = [int(asked.range.removeprefix("bytes=").rstrip("-")) for asked in site.server.asked if asked.range]
    assert starts
    assert min(starts) >= 100_000


async def test_files_of_deleted_models_are_swept(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files()
    await files.ensure(definition)
    path = files.find(DIGEST)
    assert path is not None
    os.utime(path, (1, 1))
    await files.sweep()
    assert path.exists()
    async with site.store.write() as tx:
        await models.delete(tx, "m")
    await files.sweep()
    assert not path.exists()


async def test_a_cleanup_after_a_deletion_frees_the_space_at_once(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files()
    await files.ensure(definition)
    uploaded = await site.blobs.write("", lambda: iter([b"uploaded"]), ExpectedBlob(""), "a file without a model yet")
    assert await files.collect(dry_run=False) == []
    async with site.store.write() as tx:
        await models.delete(tx, "m")
    (dry,) = await files.collect(dry_run=True)
    assert (dry.files, dry.size_bytes) == (1, len(WEIGHTS))
    assert files.find(DIGEST) is not None
    assert await files.collect(dry_run=False) == [dry]
    assert files.find(DIGEST) is None
    assert uploaded.path.exists()


@asynccontextmanager
async def door(site: Site, files: ModelFiles) -> AsyncIterator[str]:
    missing = MissingBlobs(files.refetch)
    public = site.tokens.public_key
    limits = ServingLimits(busy_retry_s=0)
    async with (
        open_blob_listener(
            FileSettings(blob_port=0),
            site.blobs,
            public,
            SystemClock(),
            site.active,
            is_expected=missing.is_expected,
            limits=limits,
        ) as url,
        background(missing.run()),
    ):
        yield url


def age(path: Path, seconds: float) -> None:
    os.utime(path, (path.stat().st_mtime - seconds,) * 2)


async def test_above_the_limit_the_file_not_requested_for_longest_goes_and_comes_back(site: Site) -> None:
    contents = {name: os.urandom(1000) for name in ("a", "b", "c")}
    definitions = {}
    for name, content in contents.items():
        uri = site.server.put(f"/{name}", content, etag=f'"{name}"')
        definitions[name] = await site.install(name=name, **listed((name, uri)))
    files = site.files(limits=ModelCacheLimits(max_bytes=2500))
    digests = {name: "sha256:" + hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    for name in ("a", "b"):
        await files.ensure(definitions[name])
    age(site.blobs.path(digests["a"]), 2000.0)
    age(site.blobs.path(digests["b"]), 3000.0)
    assert site.cache.find(digests["b"]) is not None  # a node requests it: `a` is the older one from now on
    await files.ensure(definitions["c"])
    assert [name for name in contents if site.blobs.find(digests[name])] == ["b", "c"]
    (again,) = await files.ensure(definitions["a"])
    assert again.digest == digests["a"]
    assert [name for name in contents if site.blobs.find(digests[name])] == ["a", "b", "c"], "all are in use: above it"
    for name in contents:
        age(site.blobs.path(digests[name]), 700.0 + ord(name))
    with site.blobs.hold(digests["c"]):
        await site.cache.run_once()
    assert [name for name in contents if site.blobs.find(digests[name])] == ["a", "c"], "the oldest one is held"


async def test_with_a_limit_a_full_disk_takes_files_that_can_be_fetched_again(site: Site) -> None:
    first, second = os.urandom(1000), os.urandom(1000)
    a = await site.install(name="a", **listed(("a", site.server.put("/a", first, etag='"a"'))))
    b = await site.install(name="b", **listed(("b", site.server.put("/b", second, etag='"b"'))))
    uploaded = f"upload://{hashlib.sha256(WEIGHTS).hexdigest()}/u.gguf"
    sha256 = {"sha256": hashlib.sha256(WEIGHTS).hexdigest()}
    u = await site.install(name="u", **listed(("u.gguf", uploaded), **sha256))
    await site.files().ensure(a)
    await site.blobs.write("u", lambda: iter([WEIGHTS]), ExpectedBlob(DIGEST), "u.gguf")
    for path in (site.blobs.path("sha256:" + hashlib.sha256(first).hexdigest()), site.blobs.path(DIGEST)):
        age(path, 2000.0)
    site.free = 500
    with pytest.raises(NoSpace):  # nobody allowed to remove files of models
        await site.files().ensure(b)
    site.measure = lambda: 500 + 1000 * (2 - len(site.blobs.list_()))
    files = site.files(limits=ModelCacheLimits(max_bytes=1 << 40))
    await files.ensure(b)
    assert not await files.are_here(a)
    assert await files.are_here(u), "an uploaded file has no other source"


async def test_a_file_that_the_worker_of_this_machine_has_too_is_not_counted(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files(limits=ModelCacheLimits(max_bytes=10))
    await files.ensure(definition)
    path = site.blobs.path(DIGEST)
    age(path, 2000.0)
    os.link(path, site.folder / "worker")
    await site.cache.run_once()
    assert path.exists(), "its removal would free nothing"
    (site.folder / "worker").unlink()
    await site.cache.run_once()
    assert not path.exists()


async def test_a_file_that_was_lost_is_brought_back_when_it_is_asked_for(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files()
    (file,) = await files.ensure(definition)
    site.blobs.discard(DIGEST)
    (site.folder / "worker").mkdir()
    async with door(site, files) as url:
        worker = WorkerFiles(site.folder / "worker", FleetBlobs(site.session), SystemClock(), limits=PATIENT)
        _, token = files.sources_for("node-1")
        await worker.ensure([file], [url], token)
        assert (site.folder / "worker" / file.path).read_bytes() == WEIGHTS
        with pytest.raises(NotFound):
            await worker.ensure([ReplicaFile("x", "sha256:" + "0" * 64, 1)], [url], token)


async def test_nodes_are_sent_to_those_who_have_the_files(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files()
    async with site.store.write() as tx:
        for name, url in (("a", "http://own"), ("b", "http://b"), ("c", ""), ("d", "http://b")):
            await controllers.seen(tx, name, host="h", version="1", blob_url=url)
    blob_urls = ControllerBlobUrls(site.store, SystemClock(), own="http://own", live_for_s=60.0, every_s=1.0)
    await blob_urls.run_once()
    site.blob_urls = blob_urls
    files = site.files()
    absent = (ReplicaFile("w", DIGEST, len(WEIGHTS)),)
    assert files.sources_for("n", absent)[0] == ("http://b", "http://own")
    assert files.sources_for("n", await files.ensure(definition))[0] == ("http://own", "http://b")


async def test_a_worker_fetches_them_with_the_token_of_its_order(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files()
    got = await files.ensure(definition)
    async with door(site, files) as url:
        worker = WorkerFiles(site.folder / "worker", FleetBlobs(site.session), SystemClock())
        (site.folder / "worker").mkdir()
        _, token = files.sources_for("node-1")
        await worker.ensure(got, [url], token)
        assert (site.folder / "worker" / got[0].path).read_bytes() == WEIGHTS
        for shown in ("", "Bearer x", f"Bearer {token}x", f"Basic {token}"):
            async with site.session.get(f"{url}/blobs/{DIGEST}", headers={"Authorization": shown}) as answer:
                assert answer.status == 401
        other = site.tokens.sign("gateway", [Scope.REPLICAS])
        async with site.session.get(f"{url}/blobs/{DIGEST}", headers={"Authorization": f"Bearer {other}"}) as answer:
            assert answer.status == 403
        late = site.tokens.sign("node-1", [Scope.BLOBS], aud="controllers", life_s=-1)
        async with site.session.get(f"{url}/blobs/{DIGEST}", headers={"Authorization": f"Bearer {late}"}) as answer:
            assert answer.status == 401


async def test_an_order_with_thousands_of_files_fits_into_a_message(site: Site) -> None:
    files, clock = site.files(), SystemClock()
    many = tuple(ReplicaFile(f"m/1/{'x' * 100}/{number}", DIGEST, 1) for number in range(8000))
    hub = LocalHub(clock)
    controller, worker = hub.join("controller"), hub.join("worker")
    heard: list[StartReplica] = []

    async def start(order: StartReplica, _tokens: Tokens) -> ReplicaReply:
        heard.append(order)
        return ReplicaReply(success=True, accepted=True)

    await worker.serve(START_REPLICA, start, node="barn")
    calls = ReplicaCalls(controller, clock, keep_list=files.keep_list)
    for listed in (many, many[:3]):
        order = StartReplica(op_id="o", attempt=1, process_id="p", model="m", replica=0, backend="b", files=listed)
        assert await calls.start("barn", order) == OrderAccepted(OrderId("barn", "o", 1))
    long, short = heard
    assert (long.files, short.files, short.file_list) == ((), many[:3], "")
    found = files.find(long.file_list)
    assert found is not None
    assert decode(tuple[ReplicaFile, ...], found.read_bytes()) == many
    await controller.close()
    await worker.close()


async def test_a_port_that_somebody_else_was_quicker_to_take(site: Site) -> None:
    def door(*, moves: bool) -> AbstractAsyncContextManager[str]:
        told = FileSettings(blob_port=port, blob_url="http://{host}:{port}", blob_port_moves=moves)
        public = site.tokens.public_key
        return open_blob_listener(
            told, site.blobs, public, SystemClock(), site.active, is_expected=lambda _digest: False
        )

    port = free_port()  # nobody else's a moment later
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(BadSettings, match=f"--blob-port: 127.0.0.1:{port} cannot be used"):
            async with door(moves=False):
                pass
        async with door(moves=True) as url:
            assert url.startswith("http://{host}:")
            assert int(url.rpartition(":")[2]) not in (0, port)
    async with door(moves=True) as url:
        assert url == f"http://{{host}}:{port}"
