"""Install, fetch aside, switch, roll back, delete, list, check: on a real disk, from a real registry."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest

from corral.blobs.contents import Contents
from corral.blobs.disk import remove_tree
from corral.blobs.errors import BadArchive, WrongDigest
from corral.blobs.progress import Progress
from corral.blobs.sources.context import SourceContext
from corral.contract.manifest import Manifest
from corral.contract.sources import Source, TextFile
from corral.kit.errors import Conflict, Denied, Invalid, NotFound, Unreachable
from corral.worker.installer import remove
from corral.worker.installer.installer import Installer
from corral.worker.installer.requests import InstallFolders, InstallRequest
from tests.support.blob_server import BlobServer
from tests.support.image_registry import (
    ImageRegistry,
    layer,
    make_image,
    push_image,
    registry,
    run_file,
)
from tests.support.installing import image, inline, names_in, open_installer, request
from tests.support.waiting import until

__all__ = ["registry"]  # a fixture


class Running:
    """What runs, as the supervisor would tell."""

    def __init__(self) -> None:
        self.folders: set[Path] = set()

    def __call__(self) -> Collection[Path]:
        return self.folders


@pytest.fixture
def running() -> Running:
    return Running()


@pytest.fixture
async def installed(tmp_path: Path, running: Running) -> AsyncIterator[tuple[Installer, SourceContext]]:
    async with open_installer(tmp_path, in_use=running) as both:
        yield both


@pytest.fixture
def installer(installed: tuple[Installer, SourceContext]) -> Installer:
    return installed[0]


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    return tmp_path / "backends"


def text_of(folder: Path) -> str:
    return (folder / "run.sh").read_text()


async def names(installer: Installer) -> list[str]:
    return [row.name for row in await installer.list_backends()]


# Installing


async def test_a_build_from_a_registry(
    registry: ImageRegistry, installed: tuple[Installer, SourceContext], backends: Path
) -> None:
    installer, means = installed
    made = make_image({"linux/amd64": [layer({"run.sh": run_file(), "lib/x": b"1"})]})
    push_image(registry.url, "side/one", "1", made)
    told: list[Progress] = []
    source = image(f"{registry.host}/side/one:1", digest=made.digest)
    build = await installer.install(
        request("cpu-x", source, requested_as="x", digest=made.digest, alias="x", version="1", gallery_url="g"),
        told.append,
    )
    assert build.digest == made.digest
    content = made.manifests["linux/amd64"][0].replace(":", "-")
    assert build.directory == (backends / "cpu-x" / "versions" / content).resolve()
    assert text_of(backends / "cpu-x" / "current") == run_file().decode()
    rows = {row.name: row for row in await installer.list_backends()}
    assert rows["cpu-x"].digest == made.digest
    assert rows["x"].meta_backend_for == "cpu-x"
    metadata = (build.directory / "metadata.json").read_text()
    assert json.loads(metadata) == {
        "name": "cpu-x",
        "alias": "x",
        "gallery_url": "g",
        "installed_at": rows["cpu-x"].installed_at,
        "version": "1",
        "uri": f"{registry.host}/side/one:1",
        "digest": made.digest,
    }
    assert metadata.startswith('{\n  "name"')  # two spaces, as the contract has it
    assert [path for path in means.store.folder.rglob("*") if path.is_file()] == []  # the layers are not kept twice
    assert list(dict.fromkeys(each.phase.value for each in told)) == [
        "resolving",
        "downloading",
        "verifying",
        "extracting",
        "starting",
    ]


async def test_what_is_there_touches_no_source(installer: Installer) -> None:
    await installer.install(request())
    nowhere = image("127.0.0.1:1/x:1")
    build = await installer.install(request("demo", nowhere))
    assert build.name == "demo"
    again = await installer.install(request("demo", nowhere, digest=build.digest))
    assert again == build
    with pytest.raises(Unreachable):
        await installer.install(request("demo", nowhere, digest="sha256:" + "0" * 64))


async def test_another_digest_is_another_version(installer: Installer) -> None:
    one = await installer.install(request("demo", inline("one")))
    two = await installer.install(request("demo", inline("two"), force=True))
    assert one.digest != two.digest
    assert two.previous == (one.digest,)
    assert "two" in text_of(two.directory)
    assert "one" in text_of(one.directory)  # still there, whole


async def test_force_fetches_again_into_a_folder_of_its_own(installer: Installer, running: Running) -> None:
    one = await installer.install(request())
    running.folders.add(one.directory)
    (one.directory / "run.sh").write_text("damaged")
    two = await installer.install(request("demo", force=True))
    assert two.digest == one.digest
    assert two.directory != one.directory
    assert "one" in text_of(two.directory)
    assert text_of(one.directory) == "damaged"  # files of a running process are never replaced
    assert (await installer.check("demo")).is_whole


async def test_the_second_source_when_the_first_fails(installer: Installer) -> None:
    build = await installer.install(request("demo", image("127.0.0.1:1/x:1"), inline()))
    assert build.metadata.uri == "inline"


async def test_all_sources_fail_with_what_may_pass(installer: Installer) -> None:
    with pytest.raises(Unreachable, match=r"cannot be reached.*there is no folder") as error:
        await installer.install(request("demo", image("127.0.0.1:1/x:1"), Source("directory", "/nowhere")))
    assert error.value.code == "unreachable"  # one of them may work later
    with pytest.raises(NotFound):
        await installer.install(request("demo", Source("directory", "/nowhere"), Source("file", "/neither")))


async def test_a_source_that_is_not_what_was_ordered(installer: Installer, backends: Path) -> None:
    with pytest.raises(WrongDigest):
        await installer.install(request("demo", inline(), digest="sha256:" + "0" * 64))
    assert names_in(backends) == [".sequence"]


async def test_a_build_nobody_can_start(installer: Installer, tmp_path: Path, backends: Path) -> None:
    (tmp_path / "empty").mkdir()
    source = Source("directory", str(tmp_path / "empty"))
    with pytest.raises(BadArchive, match=r"it has no run\.sh"):
        await installer.install(request("demo", source))
    manifest = Manifest(protocol="openai", command=("bin/serve", "--port", "{port}"))
    with pytest.raises(BadArchive, match="which it does not contain"):
        await installer.install(request("demo", source, manifest=manifest))
    assert names_in(backends) == [".sequence"]
    on_path = Manifest(protocol="openai", command=("python", "-m", "http.server"))
    assert (await installer.install(request("demo", source, manifest=on_path))).manifest == on_path


async def test_a_run_file_that_lost_its_bits(installer: Installer, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "source" / "run.sh").chmod(0o644)
    build = await installer.install(request("demo", Source("directory", str(tmp_path / "source"))))
    assert (build.directory / "run.sh").stat().st_mode & 0o111
    assert (await installer.check("demo")).is_whole


async def test_an_archive_with_one_folder_around_everything(installer: Installer) -> None:
    async with BlobServer() as server:
        data = layer({"demo-1.0/run.sh": run_file(), "demo-1.0/lib/x": b"1", "demo-1.0/demo-1.0": None})
        build = await installer.install(request("demo", Source("http", server.put("/x", data))))
        assert names_in(build.directory) == ["demo-1.0", "lib", "metadata.json", "run.sh"]
        sly = layer({"demo/run.sh": run_file(), "demo/out": "../demo/../demo/run.sh"})
        with pytest.raises(BadArchive, match="outside"):
            await installer.install(request("sly", Source("http", server.put("/y", sly))))


@pytest.mark.parametrize("name", ["../escape", "a/b", ".hidden", ""])
async def test_names_that_are_none(installer: Installer, tmp_path: Path, name: str) -> None:
    before = names_in(tmp_path)
    with pytest.raises(Invalid):
        await installer.install(request(name))
    with pytest.raises(Invalid):
        await installer.install(request("demo", requested_as="../escape"))
    assert names_in(tmp_path) == before


async def test_no_source_at_all(installer: Installer) -> None:
    with pytest.raises(Invalid, match="names no source"):
        await installer.install(InstallRequest(name="demo"))


async def test_a_stray_file_in_the_way(installer: Installer, backends: Path) -> None:
    (backends / "demo").touch()
    (backends / "meta").touch()
    await installer.install(request("demo", requested_as="meta"))
    assert await names(installer) == ["demo", "meta"]


async def test_a_flat_folder_that_appeared_since_the_start(installer: Installer, backends: Path) -> None:
    (backends / "demo").mkdir()
    (backends / "demo" / "run.sh").write_text("flat")
    build = await installer.install(request("demo", image("127.0.0.1:1/x:1")))
    assert text_of(build.directory) == "flat"  # present: nothing is fetched
    build = await installer.install(request("demo", force=True))
    assert "one" in text_of(build.directory)
    assert len(names_in(backends / "demo" / "versions")) == 6


async def test_a_system_backend_is_there(installer: Installer, tmp_path: Path) -> None:
    (tmp_path / "system" / "piper").mkdir(parents=True)
    (tmp_path / "system" / "piper" / "run.sh").touch()
    build = await installer.install(request("piper", image("127.0.0.1:1/x:1")))
    assert build.is_system
    with pytest.raises(Denied, match="came with the system"):
        await installer.delete("piper")
    own = await installer.install(request("piper", force=True))
    assert not own.is_system
    await installer.delete("piper")
    found = await installer.find("piper")
    assert found is not None
    assert found.is_system


async def test_the_same_files_under_another_digest_are_not_fetched_again(
    registry: ImageRegistry, installer: Installer
) -> None:
    layers = {"linux/amd64": [layer({"run.sh": run_file()})]}
    old, new = make_image(layers, note="old"), make_image(layers, note="new")
    assert old.digest != new.digest
    push_image(registry.url, "side/rebuilt", "1", old)
    push_image(registry.url, "side/rebuilt", "2", new)
    one = await installer.install(request("demo", image(f"{registry.host}/side/rebuilt:1"), digest=old.digest))
    told: list[Progress] = []
    two = await installer.install(
        request("demo", image(f"{registry.host}/side/rebuilt:2"), digest=new.digest, version="2"), told.append
    )
    assert two.directory == one.directory
    assert {each.phase.value for each in told} == {"resolving", "starting"}
    (row,) = await installer.list_backends()
    assert (row.digest, row.version) == (new.digest, "2")  # or the controller would order it for ever
    back = await installer.rollback("demo", old.digest)
    assert back.digest == old.digest


# Upgrading


async def test_an_upgrade_in_two_steps(installer: Installer, running: Running) -> None:
    one = await installer.install(request("cpu-x", inline("one"), requested_as="x", alias="x"))
    running.folders.add(one.directory)
    two = await installer.fetch_aside(request("cpu-x", inline("two"), requested_as="x", alias="x"))
    current = await installer.find("x")
    assert current is not None
    assert current.digest == one.digest  # nothing has changed yet
    assert (await installer.find("x", two.digest)) is not None  # but it can be run
    switched = await installer.switch("x", two.digest)
    assert switched.digest == two.digest
    assert switched.previous == (one.digest,)
    assert "one" in text_of(one.directory)
    assert (await installer.rollback("x")).digest == one.digest
    assert (await installer.rollback("x")).digest == two.digest


async def test_install_of_what_was_fetched_aside_only_switches(installer: Installer) -> None:
    await installer.install(request("demo", inline("one")))
    two = await installer.fetch_aside(request("demo", inline("two")))
    told: list[Progress] = []
    build = await installer.install(request("demo", image("127.0.0.1:1/x:1"), digest=two.digest), told.append)
    assert build.digest == two.digest
    assert {each.phase.value for each in told} == {"starting"}


async def test_fetching_aside_twice_fetches_once(installer: Installer) -> None:
    await installer.install(request("demo", inline("one")))
    two = await installer.fetch_aside(request("demo", inline("two")))
    again = await installer.fetch_aside(request("demo", image("127.0.0.1:1/x:1"), digest=two.digest))
    assert again.directory == two.directory


async def test_an_upgrade_that_is_not_wanted_any_more(installer: Installer, running: Running) -> None:
    one = await installer.install(request("demo", inline("one")))
    two = await installer.fetch_aside(request("demo", inline("two")))
    running.folders.add(two.directory)
    assert not await installer.discard("demo", two.digest)
    running.folders.clear()
    assert await installer.discard("demo", two.digest)
    assert not two.directory.exists()
    assert not await installer.discard("demo", two.digest)
    assert not await installer.discard("demo", one.digest)  # it is the current one
    with pytest.raises(NotFound, match="is not on this machine"):
        await installer.switch("demo", two.digest)


async def test_the_version_before_stays_and_older_ones_go(installer: Installer, running: Running) -> None:
    one = await installer.install(request("demo", inline("one")))
    running.folders.add(one.directory)
    two = await installer.install(request("demo", inline("two"), force=True))
    three = await installer.install(request("demo", inline("three"), force=True))
    assert three.previous == (two.digest, one.digest)  # one is still in use
    running.folders.clear()
    four = await installer.install(request("demo", inline("four"), force=True))
    assert four.previous == (three.digest,)
    assert not one.directory.exists()
    assert not two.directory.exists()


async def test_no_earlier_version(installer: Installer) -> None:
    with pytest.raises(NotFound, match="not installed here"):
        await installer.rollback("demo")
    await installer.install(request())
    with pytest.raises(NotFound, match="no earlier version"):
        await installer.rollback("demo")


# Deleting


async def test_delete_by_any_name(installer: Installer, backends: Path) -> None:
    for name in ("cpu-x", "x", "shared"):
        await installer.install(request("cpu-x", requested_as="x", alias="shared"))
        gone = await installer.delete(name)
        assert gone.names == ("x", "cpu-x")
        assert await names(installer) == []
        assert names_in(backends) == [".sequence"]


async def test_delete_what_is_not_there(installer: Installer) -> None:
    with pytest.raises(NotFound, match="backend not found: demo"):
        await installer.delete("demo")
    with pytest.raises(NotFound):
        await installer.delete("../..")


async def test_delete_while_something_runs_from_it(installer: Installer, running: Running) -> None:
    one = await installer.install(request("demo", inline("one"), requested_as="meta"))
    two = await installer.install(request("demo", inline("two"), requested_as="meta", force=True))
    running.folders.add(one.directory)  # an old version counts too
    with pytest.raises(Conflict, match="is in use"):
        await installer.delete("meta")
    assert "two" in text_of(two.directory)
    assert await names(installer) == ["demo", "meta"]
    running.folders.clear()
    await installer.delete("meta")


async def test_what_is_started_while_it_is_deleted_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs was looked at before a thread went to remove the files: a start in between lost its own."""
    started: set[Path] = set()
    build: list[Path] = []
    loop = asyncio.get_running_loop()

    def start() -> None:
        started.update(folder for folder in build if folder.exists())  # else it fails to start

    def in_use() -> Collection[Path]:
        found = set(started)
        loop.call_soon_threadsafe(start)  # as soon as anybody else has a turn
        return found

    def slowly(path: Path) -> None:
        time.sleep(0.05)
        remove_tree(path)

    monkeypatch.setattr(remove, "remove_tree", slowly)
    async with open_installer(tmp_path, in_use=in_use) as (installer, _):
        build.append((await installer.install(request("demo"))).directory)
        started.clear()
        with contextlib.suppress(Conflict):
            await installer.delete("demo")
    assert [folder for folder in started if not folder.exists()] == []


async def test_a_build_another_meta_needs_stays(installer: Installer) -> None:
    await installer.install(request("cpu-x", requested_as="one"))
    await installer.install(request("cpu-x", requested_as="two"))
    assert (await installer.delete("one")).names == ("one",)
    assert await names(installer) == ["cpu-x", "two"]
    assert (await installer.delete("two")).names == ("two", "cpu-x")


async def test_a_build_somebody_asked_for_by_name_stays(installer: Installer) -> None:
    build = await installer.install(request("cpu-x", requested_as="x"))
    await installer.install(request("cpu-x", digest=build.digest))
    assert (await installer.delete("x")).names == ("x",)
    assert await names(installer) == ["cpu-x"]


# Checking


async def test_damage_is_found_and_named(installer: Installer) -> None:
    files = (TextFile("run.sh", "1", True), TextFile("lib/a", "1"), TextFile("lib/b", "1"))
    build = await installer.install(request("demo", Source("inline", "x", files=files)))
    (build.directory / "__pycache__").mkdir()
    assert (await installer.check("demo")).is_whole
    (build.directory / "lib" / "a").write_text("2")
    (build.directory / "lib" / "b").unlink()
    difference = await installer.check("demo")
    assert (difference.changed, difference.missing) == (("lib/a",), ("lib/b",))
    (build.directory.parent / f"{build.directory.name}.tree").unlink()
    assert not (await installer.check("demo")).is_whole
    with pytest.raises(NotFound):
        await installer.check("other")


# Together


async def test_equal_requests_share_one_run(installer: Installer) -> None:
    async with BlobServer() as server:
        server.pause.clear()
        source = Source("http", server.put("/x", layer({"run.sh": run_file()})))
        told: list[list[Progress]] = [[], []]
        tasks = [asyncio.create_task(installer.install(request("demo", source), each.append)) for each in told]
        await until(lambda: server.asked)
        server.pause.set()
        one, two = await asyncio.gather(*tasks)
        assert one == two
        assert len(server.asked) == 1
        assert told[0][-1] == told[1][-1]


async def test_one_backend_is_serial_and_others_go_on(installer: Installer) -> None:
    async with BlobServer() as server:
        server.pause.clear()
        slow = Source("http", server.put("/x", layer({"run.sh": run_file("slow")})))
        first = asyncio.create_task(installer.install(request("cpu-x", slow, alias="x")))
        await until(lambda: server.asked)
        by_alias = asyncio.create_task(installer.install(request("x", inline("two"))))
        await installer.install(request("other"))
        assert not by_alias.done()
        server.pause.set()
        await asyncio.gather(first, by_alias)


async def test_cancelled_while_it_is_fetched(installed: tuple[Installer, SourceContext], backends: Path) -> None:
    installer, means = installed
    await installer.install(request("demo", inline("one")))
    async with BlobServer() as server:
        source = Source("http", server.put("/x", bytes(40_000_000)))
        told: list[Progress] = []
        task = asyncio.create_task(installer.install(request("demo", source, force=True), told.append))
        await until(lambda: any(each.current_bytes for each in told))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.broken_off == 1)
    assert [path for path in means.store.folder.rglob("*") if path.is_file()] == []
    assert len(names_in(backends / "demo" / "versions")) == 3
    found = await installer.find("demo")
    assert found is not None
    assert "one" in text_of(found.directory)


async def test_cancelled_while_it_is_unpacked(installer: Installer, backends: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(300):
        (source / str(number)).mkdir(parents=True)
        (source / str(number) / "x").write_bytes(bytes(10_000))
    (source / "run.sh").touch()

    def give_up(progress: Progress) -> None:
        if progress.phase.value == "extracting":  # at once: a moment later all may be there
            task.cancel()

    task = asyncio.create_task(installer.install(request("demo", Source("directory", str(source))), give_up))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert names_in(backends) == [".sequence"]


async def test_the_inventory_has_a_number_that_only_rises(
    installed: tuple[Installer, SourceContext], tmp_path: Path
) -> None:
    installer, means = installed
    seen = [installer.sequence]
    one = await installer.install(request("demo", inline("one")))
    seen.append(installer.sequence)
    await installer.install(request("demo", inline("one")))
    assert installer.sequence == seen[-1]  # nothing has changed
    two = await installer.fetch_aside(request("demo", inline("two")))
    seen.append(installer.sequence)  # the list tells what is beside the current version, too
    await installer.switch("demo", two.digest)
    seen.append(installer.sequence)
    await installer.rollback("demo")
    seen.append(installer.sequence)
    await installer.delete("demo")
    seen.append(installer.sequence)
    again = Installer(Contents(means), InstallFolders(tmp_path / "backends"))
    await again.start()
    seen.append(again.sequence)
    assert seen == sorted(set(seen))
    assert one.digest


async def test_a_disk_that_cannot_be_written(installer: Installer, backends: Path) -> None:
    (backends / "demo").mkdir()
    (backends / "demo" / "versions").touch()  # something else is where our folder belongs
    with pytest.raises(Exception, match="changing backends in") as error:
        await installer.install(request())
    assert error.value.code == "unavailable"  # type: ignore[attr-defined]
