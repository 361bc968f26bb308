"""Our tar reader says what the standard library's does, and refuses what is broken."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.blobs.archives.entries import EntryKind
from corral.blobs.archives.tar import read_tar
from corral.blobs.errors import BadArchive, UnsafeArchive

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=60).filter(
    lambda name: name not in (".", "..")
)
PATHS = st.lists(NAMES, min_size=1, max_size=6).map("/".join)
MEMBERS = st.lists(
    st.one_of(
        st.tuples(st.just("file"), PATHS, st.binary(max_size=2000)),
        st.tuples(st.just("folder"), PATHS, st.just(b"")),
        st.tuples(st.just("link"), PATHS, PATHS.map(str.encode)),
        st.tuples(st.just("same"), PATHS, PATHS.map(str.encode)),
    ),
    max_size=8,
)
TYPES = {"file": tarfile.REGTYPE, "folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "same": tarfile.LNKTYPE}
KINDS = {"file": EntryKind.FILE, "folder": EntryKind.FOLDER, "link": EntryKind.SYMLINK, "same": EntryKind.HARD_LINK}


def pack(members: list[tuple[str, str, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for kind, name, data in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.mtime = TYPES[kind], 0o755, 1_700_000_000
            if kind == "file":
                info.size = len(data)
            else:
                info.linkname = data.decode()
            archive.addfile(info, io.BytesIO(data) if kind == "file" else None)
    return out.getvalue()


def in_blocks(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def read(data: bytes, block: int = 512) -> list[tuple[str, EntryKind, bytes, str]]:
    return [(e.name, e.kind, b"".join(bytes(p) for p in e.data), e.target) for e in read_tar(in_blocks(data, block))]


@given(MEMBERS, st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]), st.sampled_from([1, 100, 512, 700, 10**6]))
def test_reads_what_was_packed(members: list[tuple[str, str, bytes]], format: int, block: int) -> None:
    expected = [
        (name, KINDS[kind], data if kind == "file" else b"", data.decode() if kind in ("link", "same") else "")
        for kind, name, data in members
    ]
    found = read(pack(members, format), block)
    assert [(name.rstrip("/"), *rest) for name, *rest in found] == [(name, *rest) for name, *rest in expected]


def test_unread_data_is_skipped() -> None:
    data = pack([("file", "a", b"x" * 1000), ("file", "b", b"y")])
    assert [entry.name for entry in read_tar(in_blocks(data, 300))] == ["a", "b"]


def test_mode_size_and_time() -> None:
    (entry,) = read_tar(in_blocks(pack([("file", "a", b"123")]), 512))
    assert (entry.mode, entry.size, entry.modified_s) == (0o755, 3, 1_700_000_000.0)


def test_long_names_of_ustar() -> None:
    name = "/".join(["folder" * 8] * 3) + "/file"
    assert read(pack([("file", name, b"1")], tarfile.USTAR_FORMAT))[0][0] == name


def test_a_number_too_large_for_octal_digits() -> None:
    info = tarfile.TarInfo("big")
    info.size = 9 * 2**30
    data = info.tobuf(tarfile.GNU_FORMAT)
    entries = read_tar(iter([data]))
    assert next(entries).size == 9 * 2**30


def test_names_that_are_not_utf8_come_back_as_they_went_in() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT, encoding="latin-1") as archive:
        archive.addfile(tarfile.TarInfo("caf\xe9"))
    (name, *_rest) = read(out.getvalue())[0]
    assert name.encode("utf-8", "surrogateescape") == b"caf\xe9"


def test_an_old_way_to_say_folder() -> None:
    info = tarfile.TarInfo("a")
    data = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    data[1:2] = b"/"
    data[148:156] = b" " * 8
    data[148:156] = f"{sum(data[:512]):06o}\0 ".encode()
    assert read(bytes(data) + bytes(1024))[0][:2] == ("a/", EntryKind.FOLDER)


def test_global_headers_count_for_all_that_follow() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"mtime": "5"}) as archive:
        info = tarfile.TarInfo("a")
        archive.addfile(info)
    (entry,) = read_tar(in_blocks(out.getvalue(), 512))
    assert entry.modified_s == 5.0


@pytest.mark.parametrize(("kind", "what"), [(tarfile.CHRTYPE, "character device"), (tarfile.FIFOTYPE, "named pipe")])
def test_devices_and_pipes_are_refused(kind: bytes, what: str) -> None:
    info = tarfile.TarInfo("dev/null")
    info.type = kind
    with pytest.raises(UnsafeArchive, match=what):
        read(info.tobuf() + bytes(1024))


def test_sparse_and_unknown_members_are_refused() -> None:
    for kind in (b"S", b"Z"):
        info = tarfile.TarInfo("a")
        info.type = kind
        with pytest.raises(BadArchive, match="sparse" if kind == b"S" else "unsupported type"):
            read(info.tobuf() + bytes(1024))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a")
        info.pax_headers = {"GNU.sparse.major": "1"}
        archive.addfile(info)
    with pytest.raises(BadArchive, match="sparse"):
        read(out.getvalue())


@pytest.mark.parametrize("cut", [100, 512, 700, 1024, 1300])
def test_a_cut_archive_is_refused_or_said_to_end(cut: int) -> None:
    whole = pack([("file", "a", b"x" * 1500)])
    with pytest.raises(BadArchive, match="ends in the middle"):
        read(whole[:cut])


def test_what_is_no_archive_is_refused() -> None:
    with pytest.raises(BadArchive, match="not a tar archive"):
        read(b"<html>404</html>" + b" " * 2000)


@given(st.binary(max_size=3000))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    with contextlib.suppress(BadArchive):
        read(data)


@given(MEMBERS, st.integers(0, 10**6), st.binary(min_size=1, max_size=8))
def test_no_damage_breaks_the_reader(members: list[tuple[str, str, bytes]], at: int, noise: bytes) -> None:
    data = bytearray(pack(members))
    at %= len(data)
    data[at : at + len(noise)] = noise
    with contextlib.suppress(BadArchive):
        read(bytes(data))


def test_a_header_of_gigabytes_is_refused() -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 2**30
    with pytest.raises(BadArchive, match="a header has"):
        read(info.tobuf() + bytes(1024))
