"""Layers, archives and wheels of backends through the controller: once from their origin, whoever needs them, and only
for sources of the asking node's own orders."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from corral.blobs.oci.credentials import FixedLogins, Login
from corral.blobs.sources.python_environment import WheelTools
from corral.contract.messages.artifacts import ArtifactRequest
from corral.contract.sources import Source, Wheel
from corral.controller.artifacts.cache import CacheLimits
from corral.controller.artifacts.fetches import ArtifactPace
from corral.kit.errors import CorralError, Denied, NotFound
from corral.store.tables import backend_intents, backend_rules
from tests.integration.blobs.test_python_environment import ENGINE, HELPER, WITH_UV
from tests.support.artifact_fleet import install_everywhere, open_site
from tests.support.bad_line import Line
from tests.support.blob_server import BlobServer
from tests.support.image_registry import (
    ImageRegistry,
    MadeImage,
    basic_auth,
    layer,
    login_header,
    make_image,
    push_image,
    registry,
    running_registry,
)
from tests.support.ordering import tarred
from tests.support.waiting import until

__all__ = ["registry"]

RUN = b"#!/bin/sh\n"
NOISE = os.urandom(5_000_000)  # more than a chunk
ARCHIVE = tarred({"run.sh": RUN, "noise": NOISE})
DIGEST = "sha256:" + hashlib.sha256(ARCHIVE).hexdigest()


@pytest.fixture
async def server() -> AsyncIterator[BlobServer]:
    async with BlobServer() as server:
        yield server


def archive(server: BlobServer, *, is_known: bool = True) -> Source:
    url = server.put("/demo.tar", ARCHIVE, etag='"1"')
    return Source("http", url, DIGEST, len(ARCHIVE)) if is_known else Source("http", url)


def an_image(text: bytes = RUN) -> MadeImage:
    layers = [layer({"run.sh": text}), layer({"noise": NOISE})]
    return make_image({"linux/amd64": layers, "linux/arm64": [layer({"run.sh": b"arm"})]})


def image_source(host: str, image: MadeImage) -> Source:
    return Source("oci", f"{host}/demo/image:1", image.digest, platform="linux/amd64")


async def test_three_workers_cost_the_registry_one_download(tmp_path: Path, registry: ImageRegistry) -> None:
    image = an_image()
    push_image(registry.url, "demo/image", "1", image)
    size = sum(map(len, image.layers["linux/amd64"]))
    async with Line(registry.port) as line, open_site(tmp_path) as site:
        await install_everywhere(site, image_source(line.host, image), "barn", "byre", "mill")
        assert size < line.passed <= size * 1.02
    for name in ("barn", "byre", "mill"):
        assert (tmp_path / name / "installed" / "noise").read_bytes() == NOISE


@pytest.mark.parametrize("is_known", [True, False])
async def test_three_workers_cost_the_server_of_an_archive_one_download(
    tmp_path: Path, server: BlobServer, is_known: bool
) -> None:
    source = archive(server, is_known=is_known)
    async with open_site(tmp_path) as site:
        await install_everywhere(site, source, "barn", "byre", "mill")
    assert [asked.path for asked in server.asked] == ["/demo.tar"]
    assert server.bytes_sent == len(ARCHIVE)
    assert (tmp_path / "mill" / "installed" / "noise").read_bytes() == NOISE


async def test_wheels_come_once_and_the_environment_runs(tmp_path: Path, server: BlobServer) -> None:
    names = {"engine-1.0-py3-none-any.whl": ENGINE, "helper-2.1+cpu-py3-none-any.whl": HELPER}
    wheels = [
        Wheel(name, server.put(f"/{name}", data), hashlib.sha256(data).hexdigest(), len(data))
        for name, data in names.items()
    ]
    source = Source("pypi", "engine==1.0", "sha256:" + "0" * 64, wheels=tuple(wheels))
    async with open_site(tmp_path) as site:
        for name in ("barn", "byre"):
            await site.order(name, source)
            async with site.worker(name) as worker:
                worker.context = replace(worker.context, wheel_tools=WheelTools(WITH_UV, timeout_s=55))
                await worker.install(source)
                assert (worker.folder / "installed" / "venv" / "bin" / "engine-serve").is_file()
    assert sorted(asked.path for asked in server.asked) == sorted(f"/{name}" for name in names)


async def test_bytes_reach_the_worker_while_the_controller_still_downloads(tmp_path: Path, server: BlobServer) -> None:
    source = archive(server)
    server.hold_after = 1_000_000
    async with open_site(tmp_path) as site, site.worker("barn") as worker:
        await site.order("barn", source)
        installing = asyncio.create_task(worker.install(source))
        await until(lambda: max((each.current_bytes for each in worker.told), default=0) > 500_000)
        assert site.opened.blobs.find(DIGEST) is None
        server.pause.set()
        assert await installing == DIGEST


async def test_a_worker_sees_what_the_controller_fetches_for_an_archive_without_a_digest(
    tmp_path: Path, server: BlobServer
) -> None:
    source = archive(server, is_known=False)
    server.hold_after = 1_000_000
    async with open_site(tmp_path) as site, site.worker("barn") as worker:
        await site.order("barn", source)
        installing = asyncio.create_task(worker.install(source))
        await until(lambda: any(each.file.startswith("the controller fetches http") for each in worker.told))
        assert any("of 4.8 MiB" in each.file for each in worker.told)
        server.pause.set()
        assert await installing == DIGEST


async def test_an_origin_that_is_gone_is_not_missed(tmp_path: Path, server: BlobServer) -> None:
    """Also after a restart of the controller, and for an archive whose digest nobody stated."""
    source = archive(server, is_known=False)
    async with open_site(tmp_path) as site:
        await install_everywhere(site, source, "barn")
        del server.files["/demo.tar"]
        await install_everywhere(site, source, "byre")
        await site.close()
        await site.open()
        await install_everywhere(site, source, "mill")
    assert len(server.asked) == 1


async def test_the_next_operation_reads_an_archive_without_a_digest_again(tmp_path: Path, server: BlobServer) -> None:
    source = archive(server, is_known=False)
    changed = tarred({"run.sh": b"changed"})
    async with open_site(tmp_path) as site, site.worker("barn") as worker:
        await site.order("barn", source, target="first")
        await worker.install(source)
        server.put("/demo.tar", changed, etag='"2"')
        await worker.install(source)  # the same operation: the same bytes
        assert worker.read("noise") == NOISE
        async with site.store.write() as tx:
            (before,) = await backend_intents.list_(tx, ["barn"])
            await backend_intents.put(tx, [msgspec.structs.replace(before, stage="idle")])
        await site.order("barn", source, target="second")
        await worker.install(source)
        assert worker.read("run.sh") == b"changed"


async def test_only_the_controller_has_the_login_of_a_private_registry(tmp_path: Path) -> None:
    image = an_image()
    with running_registry(tmp_path / "registry", auth=basic_auth(tmp_path / "registry")) as private:
        push_image(private.url, "demo/image", "1", image, login_header())
        source = image_source(private.host, image)
        logins = FixedLogins({private.host: Login("ann", "secret")})
        async with open_site(tmp_path, logins=logins) as site:
            await site.order("barn", source)
            async with site.worker("barn", is_old_controller=True) as alone:
                with pytest.raises(Denied):
                    await alone.install(source)
            async with site.worker("barn") as worker:
                assert await worker.install(source) == image.digest
                assert worker.read("noise") == NOISE
            told = b"".join(msgspec.json.encode(each) for each in (*site.sent, *(body for _, body in site.heard)))
    assert b"secret" not in told
    assert login_header()["Authorization"].encode() not in told


async def test_a_login_in_a_url_stays_on_the_controller(tmp_path: Path, server: BlobServer) -> None:
    source = archive(server)
    source = msgspec.structs.replace(source, uri=source.uri.replace("http://", "http://ann:secret@"))
    async with open_site(tmp_path) as site:
        await install_everywhere(site, source, "barn", "byre")
        told = b"".join(msgspec.json.encode(each) for each in (*site.sent, *(body for _, body in site.heard)))
    assert [asked.authorization for asked in server.asked] == [login_header()["Authorization"]]
    assert b"secret" not in told


async def test_wrong_bytes_count_nowhere_and_the_error_names_both_ways(tmp_path: Path, server: BlobServer) -> None:
    source = archive(server)
    server.put("/demo.tar", ARCHIVE[:-1] + b"x")
    async with open_site(tmp_path, pace=ArtifactPace()) as site, site.worker("barn") as worker:
        await site.order("barn", source)
        with pytest.raises(CorralError, match=r"is sha256:\w+, not sha256:.*through the controller: .*not sha256:"):
            await worker.install(source)
        assert site.opened.blobs.list_() == worker.context.store.list_() == []
        server.put("/demo.tar", ARCHIVE)
        await site.close()  # it would repeat its answer for a while
        await site.open()
        assert await worker.install(source) == DIGEST


async def test_a_controller_without_a_way_to_the_origin_does_not_stop_a_worker_that_has_one(
    tmp_path: Path, server: BlobServer
) -> None:
    source = archive(server)
    async with open_site(tmp_path) as site, site.worker("barn") as worker:
        await site.order("barn", source)
        server.statuses = [(404, {})]  # the controller asks first
        assert await worker.install(source) == DIGEST
    assert [asked.path for asked in server.asked] == ["/demo.tar"] * 2


async def test_a_controller_killed_in_the_middle_resumes(tmp_path: Path, server: BlobServer) -> None:
    source = archive(server)
    server.hold_after = 3_000_000
    async with open_site(tmp_path) as site, site.worker("barn") as worker:
        await site.order("barn", source)
        installing = asyncio.create_task(worker.install(source))
        part = tmp_path / "artifacts" / "incoming" / f"{DIGEST.removeprefix('sha256:')}.part"
        await until(lambda: part.is_file() and part.stat().st_size > 2_000_000)
        await site.close()
        server.pause.set()
        await site.open()
        assert await installing == DIGEST
    first, second = server.asked
    assert first.range == ""
    # By where it goes on, and not by what the server sent: how much of that is on its way is up to the kernel.
    assert int(second.range.removeprefix("bytes=").removesuffix("-")) > 2_000_000


async def test_a_download_stops_with_its_last_worker_and_is_resumed_for_the_next(
    tmp_path: Path, server: BlobServer
) -> None:
    source = archive(server)
    server.hold_after = 1_000_000
    async with open_site(tmp_path) as site, site.worker("barn") as barn, site.worker("byre") as byre:
        for node in ("barn", "byre"):
            await site.order(node, source)
        both = [asyncio.create_task(each.install(source)) for each in (barn, byre)]
        await until(lambda: not server.pause.is_set())
        await until(lambda: {node for node, _ in site.heard} == {"barn", "byre"})
        both[0].cancel()
        await asyncio.wait(both[:1])
        assert site.opened.fetches._tasks.running()  # byre needs it still
        async with site.store.write() as tx:  # cancelled: the order is withdrawn before the worker stops
            (rule,) = await backend_rules.list_live(tx)
            await backend_rules.withdraw(tx, rule.generation)
        both[1].cancel()
        await asyncio.wait(both)
        await until(lambda: not site.opened.fetches._tasks.running())
        assert barn.context.store.find_incoming(DIGEST) is None
        server.pause.set()
        await site.order("byre", source)
        assert await byre.install(source) == DIGEST
    assert server.asked[-1].range.startswith("bytes=")


async def test_a_silent_worker_is_forgotten(tmp_path: Path, server: BlobServer) -> None:
    source = archive(server)
    server.hold_after = 1_000_000
    pace = ArtifactPace(interest_s=0.3, check_every_s=0.05)
    async with open_site(tmp_path, pace=pace) as site:
        await site.order("barn", source)
        request = ArtifactRequest(source.kind, source.uri, source.digest)
        await site.opened.artifacts.offer("barn", request)  # and never again: it was killed
        await until(lambda: not server.pause.is_set())
        await until(lambda: not site.opened.fetches._tasks.running())
        server.pause.set()


async def test_no_other_source_is_fetched_than_those_of_the_nodes_orders(tmp_path: Path, server: BlobServer) -> None:
    source = archive(server)
    other = server.put("/metadata", b"not yours")
    async with open_site(tmp_path) as site:
        await site.order("barn", source)
        await site.order("byre", Source("oci", "x/y:z", DIGEST), target="another")
        for node, request in (
            ("barn", ArtifactRequest("http", other)),
            ("barn", ArtifactRequest("http", other, DIGEST)),
            ("barn", ArtifactRequest("http", source.uri, "sha256:" + "0" * 64)),
            ("barn", ArtifactRequest("file", "/etc/passwd")),
            ("byre", ArtifactRequest("http", source.uri, source.digest)),
            ("nobody", ArtifactRequest("http", source.uri, source.digest)),
        ):
            with pytest.raises(NotFound):
                await site.opened.artifacts.offer(node, request)
    assert server.asked == []


async def test_the_least_recently_used_goes_when_the_limit_is_reached(tmp_path: Path, server: BlobServer) -> None:
    archives = {name: tarred({"run.sh": name.encode(), "noise": os.urandom(500_000)}) for name in ("a", "b", "c")}
    digests = {name: "sha256:" + hashlib.sha256(data).hexdigest() for name, data in archives.items()}
    limits = CacheLimits(max_bytes=1_100_000, in_use_s=0.0)
    async with open_site(tmp_path, limits=limits) as site, site.worker("barn") as worker:
        for age, (name, data) in enumerate(archives.items()):
            source = Source("http", server.put(f"/{name}", data), digests[name], len(data))
            await site.order("barn", source, target=name)
            await worker.install(source)
            os.utime(site.opened.blobs.path(digests[name]), (age, age))
        kept = {blob.digest for blob in site.opened.blobs.list_()}
    assert kept == {digests["b"], digests["c"]}


async def test_a_worker_installs_by_itself_where_the_controller_is_older(tmp_path: Path, server: BlobServer) -> None:
    source = archive(server)
    async with open_site(tmp_path) as site, site.worker("barn") as worker:
        assert await worker.install(source) == DIGEST  # no order is known there: as if there were no such route
    assert [asked.path for asked in server.asked] == ["/demo.tar"]
