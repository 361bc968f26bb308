"""Uploads on the disk: temporary names, hashes that are trusted only while they belong to their file, permissions."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

import pytest

from corral.kit.threads import StopToken
from corral.worker.localai.ranges import PartialState
from corral.worker.localai.uploads import Upload, UploadBusy, WrongHash, hash_and_store, read_sidecar, write_sidecar

HELLO = hashlib.sha256(b"hello").hexdigest()


def finish(upload: Upload, content: bytes, declared: str = "") -> None:
    upload.open(append=False, target=declared, total=len(content))
    upload.write([content])
    upload.commit(upload.verify(declared, StopToken()))


def test_a_file_appears_when_it_is_verified(tmp_path: Path) -> None:
    target = tmp_path / "m" / "w.gguf"
    upload = Upload(target)
    assert upload.state() is None
    upload.open(append=False, target=HELLO, total=5)
    upload.write([b"hel"])
    upload.close()
    assert not target.exists()
    assert Upload(target).state() == PartialState(3, HELLO, 5)
    again = Upload(target)
    again.open(append=True, target=HELLO, total=5)
    again.write([b"", b"l", b"o"])
    again.commit(again.verify(HELLO, StopToken()))
    assert target.read_bytes() == b"hello"
    assert (tmp_path / "m" / "w.gguf.sha256").read_text() == HELLO
    assert sorted(os.listdir(tmp_path / "m")) == ["w.gguf", "w.gguf.sha256"]
    assert read_sidecar(target) == HELLO
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert stat.S_IMODE(target.parent.stat().st_mode) == 0o750


def test_a_wrong_hash_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "w"
    finish(Upload(target), b"hello", HELLO)
    with pytest.raises(WrongHash, match=f"sha256 mismatch: expected {HELLO} got "):
        finish(Upload(target), b"other", HELLO)
    assert (target.read_bytes(), read_sidecar(target)) == (b"hello", HELLO)
    assert sorted(os.listdir(tmp_path)) == ["w", "w.sha256"]


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    target = tmp_path / "w"
    finish(Upload(target), b"hello")
    with target.open("rb") as reader:
        finish(Upload(target), b"HELLO!")
        assert reader.read() == b"hello"


def test_a_name_as_long_as_names_can_be(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    finish(Upload(target), b"hello", HELLO)
    assert target.read_bytes() == b"hello"
    assert os.listdir(tmp_path) == [target.name], "no room for the hash beside it"


def test_a_note_that_cannot_be_read_is_no_target(tmp_path: Path) -> None:
    upload = Upload(tmp_path / "w")
    upload.open(append=False, target=HELLO, total=5)
    upload.write([b"he"])
    upload.close()
    note = next(tmp_path.glob("*.json"))
    note.write_bytes(b'{"name": "w", "target"')
    assert upload.state() == PartialState(2)
    note.unlink()
    assert upload.state() == PartialState(2)


def test_two_processes_do_not_write_one_upload(tmp_path: Path) -> None:
    """A worker that hands over still receives. The lock belongs to the open file, so one process can show it."""
    first, second = Upload(tmp_path / "w"), Upload(tmp_path / "w")
    first.open(append=False, target=HELLO, total=5)
    first.write([b"hel"])
    for refused in (second.check_free, lambda: second.open(append=False)):
        with pytest.raises(UploadBusy):
            refused()
    second.close()
    assert first.state() == PartialState(3, HELLO, 5)
    first.close()
    second.check_free()
    second.open(append=True, target=HELLO, total=5)
    second.write([b"lo"])
    second.commit(second.verify(HELLO, StopToken()))
    assert (tmp_path / "w").read_bytes() == b"hello"


def test_a_link_in_place_of_the_bytes_is_not_followed(tmp_path: Path) -> None:
    upload = Upload(tmp_path / "w")
    upload.open(append=False)
    upload.close()
    partial = next(path for path in tmp_path.iterdir() if not path.name.endswith(".json"))
    partial.unlink()
    partial.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        upload.open(append=True)
    assert not (tmp_path / "victim").exists()


def test_a_link_in_place_of_the_note_is_not_followed(tmp_path: Path) -> None:
    upload = Upload(tmp_path / "w")
    upload.open(append=False)
    upload.close()
    note = next(path for path in tmp_path.iterdir() if path.name.endswith(".json"))
    (tmp_path / "victim").write_text("of another program")
    note.unlink()
    note.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        upload.open(append=False, target=HELLO, total=5)
    upload.close()
    assert (tmp_path / "victim").read_text() == "of another program"


def test_a_hash_is_computed_once_and_stored(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"hello")
    assert read_sidecar(path) == ""
    assert hash_and_store(path, StopToken()) == HELLO
    assert read_sidecar(path) == HELLO
    os.chmod(tmp_path / "w.sha256", 0o600)
    (tmp_path / "w.sha256").unlink()
    assert hash_and_store(path, StopToken()) == HELLO


@pytest.mark.parametrize("how", ["written", "replaced", "restored with its old time", "hash of LocalAI"])
def test_a_hash_of_another_file_is_not_trusted(tmp_path: Path, how: str) -> None:
    path, other = tmp_path / "w", tmp_path / "other"
    path.write_bytes(b"hello")
    other.write_bytes(b"hellO")
    shutil.copystat(path, other)
    write_sidecar(path, HELLO)
    before = path.stat()
    match how:
        case "written":
            path.write_bytes(b"hellO")
        case "replaced":
            os.replace(other, path)
        case "restored with its old time":
            path.write_bytes(b"hellO")
            os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
            assert path.stat().st_mtime_ns == before.st_mtime_ns
        case _:
            (tmp_path / "w.sha256").write_text(HELLO)  # written later: newer than its file, as upstream wants it
    assert read_sidecar(path) == ""


def test_folders_for_backends_of_another_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    finish(Upload(tmp_path / "models" / "m" / "w", (64100, 64101)), b"x")
    finish(Upload(tmp_path / "staging" / "e" / "w", (64100, 64101), owned=True), b"x")
    for path in ("models", "models/m", "models/m/w"):
        status = (tmp_path / path).stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o027) == (0, 64101, 0), "may read, not write"
    for path in ("staging", "staging/e", "staging/e/w"):
        status = (tmp_path / path).stat()
        assert (status.st_uid, status.st_gid) == (64100, 64101)
