"""Archives among a model's files: workers get what is inside, by digest like every other file."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import time
import zipfile
from collections.abc import Callable

import pytest

from corral.blobs.errors import BadArchive, NoSpace, TooLarge, UnsafeArchive
from corral.contract.messages.replicas import ReplicaFile
from corral.controller.files.model_files import ModelFiles
from corral.controller.files.required_files import current_files
from corral.controller.replicas.snapshot import files_known
from corral.kit.errors import Invalid
from corral.store.tables import model_files
from tests.support.model_file_site import Site, listed, site

__all__ = ["site"]  # a fixture

VOICE = os.urandom(300_000)
INSIDE = {"it-paola/model.onnx": VOICE, "it-paola/tokens.txt": b"a b c", "it-paola/empty": b"", "CARD": b"card"}


def tar(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return packed.getvalue()


def own_paths(got: tuple[ReplicaFile, ...]) -> list[str]:
    return [file.path.split("/", 2)[2] for file in got]


def content(files: ModelFiles, file: ReplicaFile) -> bytes:
    path = files.find(file.digest)
    assert path is not None
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("voice.tar.gz", tar(INSIDE)),
        ("voice.tgz", tar(INSIDE)),
        ("voice.tar.bz2", tar(INSIDE, "w:bz2")),
        ("voice.tar.xz", tar(INSIDE, "w:xz")),
        ("VOICE.TAR", tar(INSIDE, "w")),
        ("voice.zip", zipped(INSIDE)),
    ],
)
async def test_what_is_inside_lies_next_to_the_archive_the_weights_first(site: Site, name: str, packed: bytes) -> None:
    uri = site.server.put(f"/{name}", packed)
    other = site.server.put("/other.json", b"{}")
    words = {"parameters": {"model": "it-paola/model.onnx"}}
    definition = await site.install(**words, **listed(("other.json", other), (name, uri)))
    files = site.files()
    assert not await files.are_here(definition)
    assert await files.known(definition) is None
    got = await files.ensure(definition, site.told.append)
    assert own_paths(got) == ["it-paola/model.onnx", "other.json", "CARD", "it-paola/tokens.txt"]
    assert content(files, got[0]) == VOICE
    assert [file.size_bytes for file in got] == [len(VOICE), 2, 4, 5]
    assert "extracting" in {progress.phase for progress in site.told}
    assert await files.are_here(definition)
    assert await files.known(definition) == got
    asked = len(site.server.asked)
    assert await files.ensure(definition) == got, "unpacked once"
    assert len(site.server.asked) == asked
    assert list((site.folder / "blobs" / "unpacking").iterdir()) == []


@pytest.mark.parametrize("here", [False, True])
async def test_the_bar_moves_while_it_is_unpacked(site: Site, monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    """`here`: the archive lies on the controller already."""
    monkeypatch.setattr("corral.blobs.sources.context.REPORT_EVERY_S", 0.0)
    uri = site.server.put("/voice.tar", tar({"a.onnx": VOICE * 10}, "w"))
    definition = await site.install(parameters={"model": "voice.tar"}, **listed(("voice.tar", uri)))
    if here:
        (file,) = [each for each in await site.files().ensure(definition) if each.path.endswith("voice.tar")]
        async with site.store.write() as tx:
            await model_files.delete(tx, "m", "voice.tar/")
        assert site.blobs.find(file.digest) is not None
    site.told.clear()
    await site.files().ensure(definition, site.told.append)
    unpacking = [each for each in site.told if each.phase == "extracting"]
    shares = [each.share or 0.0 for each in site.told if each.total_bytes]
    assert shares == sorted(shares)
    assert (unpacking[0].current_bytes, unpacking[0].share) == (0, 0.65)
    assert len({each.current_bytes for each in unpacking}) > 10
    assert (unpacking[-1].current_bytes, unpacking[-1].share) == (unpacking[-1].total_bytes, 1.0)


async def test_below_a_folder_and_kept_whole_where_the_definition_names_it(site: Site) -> None:
    packed = zipped({"a.onnx": VOICE})
    uri = site.server.put("/pack.zip", packed)
    definition = await site.install(parameters={"model": "sub/pack.zip"}, **listed(("sub/pack.zip", uri)))
    files = site.files()
    got = await files.ensure(definition)
    assert own_paths(got) == ["sub/pack.zip", "sub/a.onnx"]
    assert content(files, got[0]) == packed
    assert await files.known(definition) == got


async def test_an_archive_that_an_earlier_release_fetched_whole_is_unpacked(site: Site) -> None:
    uri = site.server.put("/voice.tgz", tar(INSIDE))
    whole = await site.install(parameters={"model": "voice.bin"}, **listed(("voice.bin", uri)))
    await site.files().ensure(whole)
    async with site.store.write() as tx:
        [row] = await model_files.list_(tx)
        await model_files.delete(tx, "m", row.path)
        await model_files.put(
            tx,
            model_files.StoredFile(
                model="m", path="voice.tgz", uri=uri, resolved=uri, digest=row.digest, size_bytes=row.size_bytes
            ),
        )
    definition = await site.install(**listed(("voice.tgz", uri)))
    asked = len(site.server.asked)
    got = await site.files().ensure(definition)
    assert len(site.server.asked) == asked, "the archive was here"
    assert own_paths(got) == ["CARD", "it-paola/model.onnx", "it-paola/tokens.txt"]
    assert "voice.tgz" not in await site.rows()


async def test_members_stay_while_the_model_needs_them_and_go_with_it(site: Site) -> None:
    packed = tar(INSIDE)
    uri = site.server.put("/voice.tgz", packed)
    definition = await site.install(**listed(("voice.tgz", uri)))
    files = site.files()
    got = await files.ensure(definition)
    for blob in site.blobs.list_():
        os.utime(blob.path, (time.time() - 1000, time.time() - 1000))
    await files.sweep()
    assert await files.are_here(definition)
    assert files.find("sha256:" + hashlib.sha256(packed).hexdigest()) is None, "the archive itself is not kept"
    async with site.store.read() as tx:
        stored = await model_files.list_(tx)
    assert sum(row.size_bytes for row in current_files(definition, stored)) == sum(file.size_bytes for file in got)
    known = files_known(definition, current_files(definition, stored))
    assert known is not None
    assert {file.digest for file in known} == {file.digest for file in got}

    other = await site.install(**listed(("other.json", site.server.put("/other.json", b"{}"))))
    assert current_files(other, stored) == []
    await files.ensure(other)
    for blob in site.blobs.list_():
        os.utime(blob.path, (time.time() - 1000, time.time() - 1000))
    await files.sweep()
    assert [blob.digest for blob in site.blobs.list_()] == [row[1] for row in (await site.rows()).values()]


async def test_a_member_that_was_lost_and_another_controller(site: Site) -> None:
    uri = site.server.put("/voice.tgz", tar(INSIDE))
    definition = await site.install(**listed(("voice.tgz", uri)))
    files = site.files()
    got = await files.ensure(definition)
    for file in got:
        site.blobs.path(file.digest).unlink()
    assert await files.refetch(got[0].digest)
    assert all(files.find(file.digest) is not None for file in got), "the archive was fetched once for all of them"
    for file in got:
        site.blobs.path(file.digest).unlink()
    assert await files.ensure(definition) == got
    assert await site.files("others").ensure(definition) == got


def link(name: str, target: str, kind: bytes) -> Callable[[], bytes]:
    def make() -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            archive.addfile(entry)
        return packed.getvalue()

    return make


@pytest.mark.parametrize(
    ("name", "make", "error"),
    [
        ("a.tgz", lambda: tar({"../out": b"x"}), UnsafeArchive),
        ("a.tgz", lambda: tar({"/etc/out": b"x"}), UnsafeArchive),
        ("a.zip", lambda: zipped({"../../out": b"x"}), UnsafeArchive),
        ("a.tgz", link("inner", "somewhere", tarfile.SYMTYPE), UnsafeArchive),
        ("a.tgz", link("out", "/etc/passwd", tarfile.SYMTYPE), UnsafeArchive),
        ("a.tgz", link("same", "../../etc/passwd", tarfile.LNKTYPE), Invalid),
        ("a.tgz", lambda: tar({"zeros": bytes(300 << 20)}), TooLarge),
        ("a.tgz", lambda: b"no archive at all", BadArchive),
        ("a.tgz", lambda: tar({"empty": b""}), BadArchive),
    ],
)
async def test_archives_that_are_refused(
    site: Site, name: str, make: Callable[[], bytes], error: type[Exception]
) -> None:
    uri = site.server.put(f"/{name}", make())
    definition = await site.install(**listed((name, uri)))
    files = site.files()
    with pytest.raises(error):
        await files.ensure(definition)
    assert await site.rows() == {}
    assert not (site.folder / "out").exists()
    assert list((site.folder / "blobs" / "unpacking").iterdir()) == [], "nothing half unpacked stays"


async def test_room_for_what_is_inside_is_asked_for_before_the_first_byte(site: Site) -> None:
    packed = tar(INSIDE)
    uri = site.server.put("/voice.tgz", packed)
    definition = await site.install(**listed(("voice.tgz", uri)))
    site.free = len(packed) * 2
    with pytest.raises(NoSpace):
        await site.files().ensure(definition)


async def test_what_a_killed_controller_left_half_unpacked_goes(site: Site) -> None:
    left = site.folder / "blobs" / "unpacking" / "half"
    left.mkdir(parents=True)
    (left / "file").write_bytes(b"x")
    site.files()
    assert not left.exists()
