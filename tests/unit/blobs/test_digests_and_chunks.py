"""Digests are names of files, chunk lists describe files, and the disk is asked before it is used."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.blobs.chunks import CHUNK_BYTES, ChunkList, check_chunks, list_chunks, missing_chunks
from corral.blobs.digests import check_digest, digest_of, digest_of_parts, hash_file, hex_of
from corral.blobs.disk import DiskSpace, free_bytes
from corral.blobs.errors import NoBuild, NoSpace, TooLarge, UnsafeArchive, WrongDigest, is_final
from corral.kit.errors import CorralError, Denied, Invalid, Unreachable


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:" + "a" * 63, "sha256:" + "A" * 64, "md5:" + "a" * 32])
def test_what_is_no_digest(text: str) -> None:
    with pytest.raises(Invalid):
        check_digest(text)


def test_nothing_but_a_digest_becomes_a_file_name() -> None:
    with pytest.raises(Invalid):
        hex_of("sha256:../../../../etc/passwd")
    assert hex_of("sha256:" + "a" * 64) == "a" * 64


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_other_parts_other_digest(left: list[str], right: list[str]) -> None:
    assert (digest_of_parts(*left) == digest_of_parts(*right)) == (left == right)


def test_hashing_a_file_can_be_watched_and_stopped(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 3_000_000)
    seen: list[int] = []
    assert hash_file(path, on_bytes=seen.append) == "sha256:" + hashlib.sha256(b"x" * 3_000_000).hexdigest()
    assert sum(seen) == 3_000_000

    def stop(_size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hash_file(path, on_bytes=stop)


def test_a_chunk_is_four_mebibytes() -> None:
    assert CHUNK_BYTES == 4194304


@given(st.binary(max_size=50), st.integers(1, 20))
def test_a_list_describes_its_file_and_no_other(data: bytes, size: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        path.write_bytes(data)
        listed = check_chunks(list_chunks(path, chunk_bytes=size))
        assert listed.size == len(data)
        assert missing_chunks(path, listed) == []
        spans = [listed.span(index) for index in range(len(listed.chunks))]
        assert b"".join(data[start : start + length] for start, length in spans) == data
        assert all(listed.is_chunk(index, data[s : s + n]) for index, (s, n) in enumerate(spans))
        if data:
            changed = bytes([data[0] ^ 1]) + data[1:]
            path.write_bytes(changed)
            assert missing_chunks(path, listed) == [0]
            assert list_chunks(path, chunk_bytes=size).digest != listed.digest


def test_a_short_or_missing_file_lacks_its_last_chunks(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    listed = list_chunks(path, chunk_bytes=4)
    path.write_bytes(b"01234567")
    assert missing_chunks(path, listed) == [2]
    path.write_bytes(b"012345")
    assert missing_chunks(path, listed) == [1, 2]
    path.unlink()
    assert missing_chunks(path, listed) == [0, 1, 2]


@pytest.mark.parametrize("listed", [ChunkList(10, 4, ("a",)), ChunkList(-1, 4, ()), ChunkList(10, 0, ())])
def test_a_list_that_describes_no_file_is_refused(listed: ChunkList) -> None:
    with pytest.raises(Invalid):
        check_chunks(listed)


def test_room_is_asked_with_a_reserve(tmp_path: Path) -> None:
    room = DiskSpace(reserve_bytes=100, measure=lambda _folder: 1000)
    room.require(tmp_path, 900, "it")
    with pytest.raises(NoSpace, match=r"not enough disk for it: it needs 901 B and 100 B stay free"):
        room.require(tmp_path, 901, "it")


def test_free_space_of_a_folder_to_be(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b" / "c") > 0


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (WrongDigest("x"), True),
        (NoBuild("r", "linux/arm64", ["linux/amd64"]), True),
        (UnsafeArchive("x"), True),
        (TooLarge("x"), True),
        (NoSpace("x"), False),
        (Unreachable("x"), False),
        (Denied("x"), False),
    ],
)
def test_which_errors_time_cannot_cure(error: CorralError, final: bool) -> None:
    assert is_final(error) is final


def test_no_build_says_what_there_is() -> None:
    error = NoBuild("host/x:1", "linux/arm64", ["linux/amd64", "darwin/arm64"])
    assert error.code == "no_build"
    assert error.message == "no linux/arm64 build of host/x:1; it is made for linux/amd64, darwin/arm64"


def test_digest_of_bytes() -> None:
    assert digest_of(b"") == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
