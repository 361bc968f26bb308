"""What comes out of an archive, and what is refused before it does any harm."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from corral.blobs.archives.entries import Bounds, Entry, EntryKind, UnpackCounter
from corral.blobs.archives.open import unpack_archive
from corral.blobs.archives.unpack import Unpacker
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import BadArchive, NoSpace, TooLarge, UnsafeArchive
from corral.kit.threads import Stopped, StopToken

MIB = 1 << 20
ROOM = DiskSpace(reserve_bytes=0)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def packed(tmp_path: Path, *members: tuple[str, bytes | str | None], mode: str = "w:gz", bits: int = 0o644) -> Path:
    """bytes: a file; text: a link there; None: a folder."""
    path = tmp_path / "packed"
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.mode, info.mtime = bits, 1_600_000_000
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return path


def unpack(path: Path, target: Path, bounds: Bounds | None = None) -> None:
    unpack_archive(path, target, bounds or Bounds(), space=ROOM)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_tar_however_it_is_packed(tmp_path: Path, target: Path, mode: str) -> None:
    path = packed(tmp_path, ("run.sh", b"#!/bin/sh\n"), ("lib", None), ("lib/x", b"1"), ("lib/y", "x"), mode=mode)
    unpack(path, target)
    assert (target / "run.sh").read_bytes() == b"#!/bin/sh\n"
    assert (target / "lib" / "y").read_bytes() == b"1"
    assert (target / "run.sh").stat().st_mtime == 1_600_000_000  # Python trusts bytecode by its source's time


def test_zip_with_links_and_modes(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        run = zipfile.ZipInfo("bin/run.sh")
        run.create_system, run.external_attr = 3, 0o100755 << 16
        archive.writestr(run, "#!/bin/sh\n")
        link = zipfile.ZipInfo("run.sh")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        archive.writestr(link, "bin/run.sh")
        archive.writestr("readme", "plain")
    unpack(path, target)
    assert os.access(target / "run.sh", os.X_OK)
    assert os.readlink(target / "run.sh") == "bin/run.sh"
    assert not os.access(target / "readme", os.X_OK) or os.geteuid() == 0


@pytest.mark.parametrize(
    ("bits", "kept"),
    [(0o4755, 0o755), (0o2777, 0o755), (0o000, 0o644), (0o666, 0o644), (0o100, 0o755), (0o1777, 0o755)],
)
def test_permissions_are_sane(tmp_path: Path, target: Path, bits: int, kept: int) -> None:
    before = os.umask(0o022)
    try:
        unpack(packed(tmp_path, ("f", b""), bits=bits), target)
    finally:
        os.umask(before)
    assert (target / "f").stat().st_mode & 0o7777 == kept


def test_an_archive_with_dot_dot(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UnsafeArchive, match=r"'\.\./escaped' climbs out"):
        unpack(packed(tmp_path, ("../escaped", b"x")), target)
    assert not (tmp_path / "escaped").exists()


def test_an_archive_with_an_absolute_link(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UnsafeArchive, match="absolute path"):
        unpack(packed(tmp_path, ("passwd", "/etc/passwd")), target)


def test_an_archive_that_links_out_and_writes_through(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UnsafeArchive):
        unpack(packed(tmp_path, ("out", "../"), ("out/escaped", b"x")), target)
    assert not (tmp_path / "escaped").exists()


def test_a_file_behind_two_names_is_not_written_through(target: Path) -> None:
    unpacker = Unpacker(target, UnpackCounter(Bounds(), 100), space=ROOM)
    unpacker.add(
        [
            Entry("one", EntryKind.FILE, 1, data=[b"1"]),
            Entry("two", EntryKind.HARD_LINK, target="one"),
            Entry("two", EntryKind.FILE, 1, data=[b"2"]),
        ]
    )
    assert ((target / "one").read_bytes(), (target / "two").read_bytes()) == (b"1", b"2")


def test_two_names_are_one_file(target: Path) -> None:
    unpacker = Unpacker(target, UnpackCounter(Bounds(), 100), space=ROOM)
    unpacker.add([Entry("one", EntryKind.FILE, 1, data=[b"1"]), Entry("two", EntryKind.HARD_LINK, target="one")])
    assert (target / "one").samefile(target / "two")


def test_where_links_are_refused_the_file_is_copied(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    unpacker = Unpacker(target, UnpackCounter(Bounds(), 100), space=ROOM)
    unpacker.add([Entry("one", EntryKind.FILE, 1, 0o755, data=[b"1"]), Entry("two", EntryKind.HARD_LINK, target="one")])
    assert (target / "two").read_bytes() == b"1"
    assert (target / "two").stat().st_mode == (target / "one").stat().st_mode


def test_two_names_the_disk_takes_for_one_are_refused(target: Path) -> None:
    # As on a file system that does not tell `A` from `a`: something is there that the picture does not show.
    (target / "A").symlink_to("/")
    unpacker = Unpacker(target, UnpackCounter(Bounds(), 100), space=ROOM)
    with pytest.raises(UnsafeArchive, match="a name that this file system treats as equal"):
        unpacker.add([Entry("A/etc", EntryKind.FOLDER)])


def test_layers_with_whiteouts_on_the_disk(target: Path) -> None:
    unpacker = Unpacker(target, UnpackCounter(Bounds(), 100), rootfs=True, space=ROOM)
    unpacker.add(
        [
            Entry("keep", EntryKind.FILE, 1, data=[b"1"]),
            Entry("old/a/b", EntryKind.FILE, 1, data=[b"1"]),
            Entry("opaque/x", EntryKind.FILE, 1, data=[b"1"]),
            Entry("turn", EntryKind.FOLDER),
            Entry("turn/inner", EntryKind.FILE, 1, data=[b"1"]),
        ]
    )
    unpacker.add(
        [
            Entry(".wh.old", EntryKind.FILE),
            Entry("opaque/y", EntryKind.FILE, 1, data=[b"2"]),
            Entry("opaque/.wh..wh..opq", EntryKind.FILE),
            Entry("turn", EntryKind.FILE, 1, data=[b"2"]),
        ]
    )
    unpacker.finish()
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    assert found == ["keep", "opaque", "opaque/y", "turn"]


def test_a_bomb_of_ten_gigabytes_is_refused_before_a_byte_is_written(tmp_path: Path, target: Path) -> None:
    info = tarfile.TarInfo("bomb")
    info.size = 10 * 2**30
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(MIB)))
    with pytest.raises(TooLarge, match="looks like a decompression bomb"):
        unpack(path, target)
    assert list(target.iterdir()) == []


def test_a_bomb_of_many_small_files_is_refused_on_the_way(tmp_path: Path, target: Path) -> None:
    members = [(f"f{number}", bytes(MIB)) for number in range(12)]
    bounds = Bounds(ratio_floor_bytes=4 * MIB, max_ratio=100)
    with pytest.raises(TooLarge):
        unpack(packed(tmp_path, *members), target, bounds)
    assert sum(path.stat().st_size for path in target.iterdir()) <= 4 * MIB


def test_a_zip_bomb_is_refused_by_its_own_table_of_contents(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(8 * MIB))
    with pytest.raises(TooLarge):
        unpack(path, target, Bounds(ratio_floor_bytes=MIB))
    assert list(target.iterdir()) == []


def test_a_zip_that_lies_about_its_sizes(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "lie.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("f", b"x" * 5000)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = (10).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(BadArchive):
        unpack(path, target)


def test_too_many_entries(tmp_path: Path, target: Path) -> None:
    with pytest.raises(TooLarge, match="more than 3 files"):
        unpack(packed(tmp_path, *((f"f{n}", b"") for n in range(4))), target, Bounds(max_entries=3))


def test_folders_that_come_about_by_themselves_count_as_entries(tmp_path: Path, target: Path) -> None:
    with pytest.raises(TooLarge, match="more than 5 files"):
        unpack(packed(tmp_path, ("a/b/c/d/e/f/g", b"")), target, Bounds(max_entries=5))


def test_the_disk_is_asked_before_large_files(target: Path) -> None:
    unpacker = Unpacker(
        target, UnpackCounter(Bounds(), 2**40), space=DiskSpace(reserve_bytes=0, measure=lambda _folder: 100 * MIB)
    )
    with pytest.raises(NoSpace):
        unpacker.add([Entry("f", EntryKind.FILE, 200 * MIB, data=[b"x"])])
    assert list(target.iterdir()) == []


def test_a_full_disk_has_a_name(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    unpacker = Unpacker(target, UnpackCounter(Bounds(), 100), space=ROOM)
    with pytest.raises(NoSpace, match="the disk is full"):
        unpacker.add([Entry("f", EntryKind.FILE, 1, data=[b"x"])])


def test_unpacking_can_be_given_up(target: Path) -> None:
    stop = StopToken()

    def endless() -> object:
        number = 0
        while True:
            number += 1
            if number == 10:
                stop.set()
            yield Entry(f"f{number}", EntryKind.FILE)

    with pytest.raises(Stopped):
        Unpacker(target, UnpackCounter(Bounds(), 100), space=ROOM).add(endless(), stop)  # type: ignore[arg-type]
    assert len(list(target.iterdir())) == 9


def test_what_is_no_archive(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "page.tar.gz"
    path.write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(BadArchive, match="not a tar archive"):
        unpack(path, target)


def test_progress_is_told_in_packed_bytes(tmp_path: Path, target: Path) -> None:
    path = packed(tmp_path, ("f", os.urandom(2 * MIB)))
    seen: list[int] = []
    unpack_archive(path, target, Bounds(), space=ROOM, on_bytes=seen.append)
    assert path.stat().st_size <= sum(seen) <= path.stat().st_size + 16
