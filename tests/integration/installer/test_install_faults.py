"""What can go wrong while a backend is installed, each by its name. The version that was there stays whole."""

from __future__ import annotations

import asyncio
import gzip
import os
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from corral.blobs.archives.entries import Bounds
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoBuild, NoSpace, TooLarge, UnsafeArchive, WrongDigest, is_final
from corral.blobs.progress import Progress
from corral.blobs.sources.context import SourceContext
from corral.blobs.transfer.fetcher import FetchLimits
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source
from corral.kit.errors import CorralError, NotFound, Unreachable
from corral.worker.installer.installer import Installer
from tests.support.bad_line import Line
from tests.support.blob_server import BlobServer
from tests.support.image_registry import (
    ImageRegistry,
    MadeImage,
    digest_of,
    layer,
    line,
    make_image,
    push_image,
    registry,
    run_file,
)
from tests.support.installing import image, inline, names_in, open_installer, open_source_context, request
from tests.support.waiting import until

__all__ = ["line", "registry"]  # fixtures

MIB = 1 << 20


@pytest.fixture
async def installed(tmp_path: Path) -> AsyncIterator[tuple[Installer, SourceContext]]:
    async with open_installer(tmp_path) as both:
        await both[0].install(request("demo", inline("before")))
        yield both


@pytest.fixture
def installer(installed: tuple[Installer, SourceContext]) -> Installer:
    return installed[0]


def push(registry: ImageRegistry, name: str, *layers: bytes) -> MadeImage:
    made = make_image({"linux/amd64": list(layers), "linux/arm64": [layer({"run.sh": run_file("arm")})]})
    push_image(registry.url, name, "1", made)
    return made


async def refused(installer: Installer, source: Source, kind: type[CorralError], words: str) -> CorralError:
    """The install fails so, and what was there is untouched."""
    with pytest.raises(kind, match=words) as error:
        await installer.install(request("demo", source, force=True))
    await is_as_before(installer)
    return error.value


async def is_as_before(installer: Installer) -> None:
    build = await installer.find("demo")
    assert build is not None
    assert "before" in (build.directory / "run.sh").read_text()
    assert (await installer.check("demo")).is_whole
    assert len(names_in(build.directory.parent)) == 3  # the version, its record, its list: nothing half there


async def test_the_registry_is_down(installer: Installer, line: Line) -> None:
    await line.down()
    error = await refused(installer, image(f"{line.host}/x:1"), Unreachable, "cannot be reached")
    assert not is_final(error)


async def test_the_registry_goes_down_in_the_middle_and_comes_back(
    installed: tuple[Installer, SourceContext], registry: ImageRegistry, line: Line
) -> None:
    installer, means = installed
    made = push(registry, "faults/away", layer({"run.sh": run_file(), "data": os.urandom(MIB)}))
    line.cut_after = [300_000, *[10] * 50]  # after the first cut hardly a byte comes until we have taken it down
    task = asyncio.create_task(installer.install(request("demo", image(f"{line.host}/faults/away:1"), force=True)))
    await until(lambda: line.cuts)
    await line.down()
    with pytest.raises(Unreachable):
        await task
    line.cut_after.clear()
    await is_as_before(installer)
    partial = list((means.store.folder / "incoming").glob("*.part"))
    assert len(partial) == 1  # for the next try
    have = partial[0].stat().st_size
    assert have > 100_000
    await line.up()
    line.passed = 0
    build = await installer.install(request("demo", image(f"{line.host}/faults/away:1"), force=True))
    assert build.digest == made.digest
    assert line.passed < len(made.layers["linux/amd64"][0]) - have + 20_000  # only the rest


async def test_the_registry_is_slow(installer: Installer, registry: ImageRegistry, line: Line) -> None:
    made = push(registry, "faults/slow", layer({"run.sh": run_file(), "data": os.urandom(500_000)}))
    line.bytes_per_s = 200_000
    downloads: list[tuple[float, Progress]] = []

    def hear(progress: Progress) -> None:
        if progress.phase is Phase.DOWNLOADING:
            downloads.append((time.monotonic(), progress))

    build = await installer.install(request("demo", image(f"{line.host}/faults/slow:1"), digest=made.digest), hear)
    assert build.digest == made.digest
    assert len(downloads) > 5
    (began, _), (ended, last) = downloads[0], downloads[-1]
    assert last.rate < 400_000
    assert 0.5 < last.rate / (last.current_bytes / (ended - began)) < 2  # a busy machine is slower than its line


async def test_cut_in_the_middle_of_a_layer(installer: Installer, registry: ImageRegistry, line: Line) -> None:
    big = layer({"run.sh": run_file(), "data": os.urandom(MIB)})
    made = push(registry, "faults/cut", big)
    reference = image(f"{line.host}/faults/cut:1", digest=made.digest)
    line.cut_after = [400_000, 300_000]  # of everything that comes over one connection, the manifests included
    told: list[Progress] = []
    build = await installer.install(request("demo", reference, digest=made.digest), told.append)
    assert build.digest == made.digest
    assert line.cuts == 2
    assert line.passed < len(big) + 50_000  # resumed, not begun again
    done = [each.current_bytes for each in told if each.phase is Phase.DOWNLOADING]
    assert done == sorted(done)


async def test_wrong_digest_twice(
    installed: tuple[Installer, SourceContext], registry: ImageRegistry, tmp_path_factory: pytest.TempPathFactory
) -> None:
    installer, means = installed
    data = layer({"run.sh": run_file(), "data": os.urandom(1000)})
    push(registry, "faults/wrong", data)
    stored = registry.process.log.parent / "data" / "docker" / "registry" / "v2" / "blobs" / "sha256"
    hexed = digest_of(data).removeprefix("sha256:")
    path = stored / hexed[:2] / hexed / "data"
    path.write_bytes(data[:-9] + bytes(9))  # as many bytes, but not these
    error = await refused(installer, image(f"{registry.host}/faults/wrong:1"), WrongDigest, "twice")
    assert is_final(error)
    assert [path for path in means.store.folder.rglob("*") if path.is_file()] == []
    path.write_bytes(data)
    assert (await installer.install(request("demo", image(f"{registry.host}/faults/wrong:1"), force=True))).digest


async def test_no_build_for_the_platform(tmp_path: Path, registry: ImageRegistry) -> None:
    push(registry, "faults/platform", layer({"run.sh": run_file()}))
    async with (
        open_source_context(tmp_path, platform="darwin/arm64") as means,
        open_installer(tmp_path, means=means) as (installer, _),
    ):
        await installer.install(request("demo", inline("before")))
        error = await refused(
            installer,
            image(f"{registry.host}/faults/platform:1"),
            NoBuild,
            "no darwin/arm64 build of .*; it is made for linux/amd64, linux/arm64",
        )
        assert is_final(error)


async def test_a_tag_that_does_not_exist(installer: Installer, registry: ImageRegistry) -> None:
    assert is_final(await refused(installer, image(f"{registry.host}/faults/none:1"), NotFound, "not found"))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"run.sh": b"1", "../escaped": b"x"}, "climbs out"),
        ({"run.sh": b"1", "/escaped": b"x"}, "absolute name"),
        ({"run.sh": b"1", "out": "/etc"}, "absolute path"),
        ({"run.sh": b"1", "out": "../.."}, "outside its folder"),
        ({"run.sh": b"1", "here": ".", "out": "here/../.."}, "outside"),
    ],
)
async def test_an_archive_that_reaches_outside(
    installer: Installer, tmp_path: Path, members: dict[str, bytes | str | None], words: str
) -> None:
    async with BlobServer() as server:
        url = server.put("/x.tar.gz", layer(members))
        assert is_final(await refused(installer, Source("http", url), UnsafeArchive, words))
    assert names_in(tmp_path) == ["backends", "blobs"]


async def test_a_layer_that_reaches_outside(installer: Installer, registry: ImageRegistry, tmp_path: Path) -> None:
    push(registry, "faults/outside", layer({"run.sh": b"1", "../../escaped": b"x"}))
    await refused(installer, image(f"{registry.host}/faults/outside:1"), UnsafeArchive, "climbs out")
    assert names_in(tmp_path) == ["backends", "blobs"]


def bomb() -> bytes:
    """10 GiB of zeros say its headers; what follows would be as long."""
    info = tarfile.TarInfo("bomb")
    info.size = 10 << 30
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(8 * MIB))


async def test_a_bomb_in_an_archive(installer: Installer) -> None:
    async with BlobServer() as server:
        error = await refused(
            installer, Source("http", server.put("/x", bomb())), TooLarge, "looks like a decompression bomb"
        )
        assert is_final(error)


async def test_a_bomb_in_a_layer(installer: Installer, registry: ImageRegistry) -> None:
    made = make_image({"linux/amd64": [layer({"run.sh": run_file()}), bomb()]})
    push_image(registry.url, "faults/bomb", "1", made)
    await refused(installer, image(f"{registry.host}/faults/bomb:1"), TooLarge, "looks like a decompression bomb")


async def test_a_download_larger_than_allowed(tmp_path: Path) -> None:
    limits = FetchLimits(tries=2, first_wait_s=0.01, max_bytes=1000)
    async with (
        open_source_context(tmp_path, limits=limits, bounds=Bounds()) as means,
        open_installer(tmp_path, means=means) as (installer, _),
        BlobServer() as server,
    ):
        await installer.install(request("demo", inline("before")))
        await refused(installer, Source("http", server.put("/x", os.urandom(2000))), TooLarge, "more than")


# A full disk


async def test_a_full_disk_is_seen_before_a_byte_is_fetched(
    tmp_path: Path, registry: ImageRegistry, line: Line
) -> None:
    push(registry, "faults/full", layer({"run.sh": run_file(), "data": os.urandom(MIB)}))
    free = 10 * MIB
    async with (
        open_source_context(tmp_path, room=DiskSpace(reserve_bytes=0, measure=lambda _folder: free)) as means,
        open_installer(tmp_path, means=means) as (installer, _),
    ):
        await installer.install(request("demo", inline("before")))
        free = MIB
        error = await refused(installer, image(f"{line.host}/faults/full:1"), NoSpace, "not enough disk")
        assert not is_final(error)  # somebody may make room
        assert line.passed < 10_000  # the manifests, no layer


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("packed", [5 * MIB, 2 * MIB])
async def test_a_disk_that_fills_up_on_the_way(small_disk: Path, packed: int) -> None:
    """Somebody else took the room after we looked: while it is fetched (5 MiB), or while it is unpacked (2 MiB)."""
    never_asked = DiskSpace(reserve_bytes=0, measure=lambda _folder: 1 << 40)
    async with (
        open_source_context(small_disk, room=never_asked) as means,
        open_installer(small_disk, means=means) as (installer, _),
        BlobServer() as server,
    ):
        await installer.install(request("demo", inline("before")))
        data = layer({"run.sh": run_file(), "data": os.urandom(packed), "zeros": bytes(packed)})
        error = await refused(installer, Source("http", server.put("/x", data)), NoSpace, "the disk is full")
        assert not is_final(error)
        await installer.install(request("other", inline("still works")))
