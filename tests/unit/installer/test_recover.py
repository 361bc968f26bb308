"""What is found on the disk after a start: leftovers go, interrupted steps are finished, LocalAI's folders come in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from corral.blobs.folder_listing import list_tree
from corral.worker.installer.folder import BackendFolder
from corral.worker.installer.inventory import read_inventory
from corral.worker.installer.records import Metadata, VersionRecord, write_metadata
from corral.worker.installer.recover import import_flat, recover

A, B, C = ("sha256:" + letter * 64 for letter in "abc")


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    folder = tmp_path / "backends"
    folder.mkdir()
    return folder


def put(folder: BackendFolder, digest: str, at: str, *, switch: bool = True) -> Path:
    version = folder.begin(digest)
    directory = folder.directory(version)
    (directory / "run.sh").write_text(digest)
    record = VersionRecord(id=version, digest=digest, content_digest=digest, made_at=at)
    folder.finish(record, list_tree(directory))
    if switch:
        folder.switch(version, at)
    return directory


def versions(folder: BackendFolder) -> list[str]:
    return sorted(path.name for path in (folder.path / "versions").iterdir())


def test_a_tidy_folder_is_left_alone(backends: Path) -> None:
    folder = BackendFolder(backends / "x")
    put(folder, A, "1")
    put(folder, B, "2")
    before = versions(folder)
    done = recover(backends, (), "9")
    assert (done.removed, done.imported, done.finished) == ([], [], [])
    assert versions(folder) == before
    assert len(before) == 6


def test_leftovers_go(backends: Path) -> None:
    folder = BackendFolder(backends / "x")
    put(folder, A, "1")
    half = folder.begin(B)
    (folder.directory(half) / "run.sh").touch()
    for name in (f"{half}.tree", f".{half}.json.abc", ".abcd.tar"):
        (folder.path / "versions" / name).touch()
    (folder.path / ".current").symlink_to("versions/x")
    (backends / ".deleting-y" / "versions").mkdir(parents=True)
    (backends / "..sequence.abc").touch()
    recover(backends, (), "9")
    assert versions(folder) == [
        "sha256-" + "a" * 64,
        "sha256-" + "a" * 64 + ".json",
        "sha256-" + "a" * 64 + ".tree",
    ]
    assert sorted(path.name for path in backends.iterdir()) == ["x"]
    assert sorted(path.name for path in folder.path.iterdir()) == ["current", "versions"]
    assert [row.digest for row in read_inventory(backends).rows()] == [A]


def test_what_something_runs_from_stays_even_if_it_is_old(backends: Path) -> None:
    folder = BackendFolder(backends / "x")
    oldest = put(folder, A, "1")
    put(folder, B, "2")
    put(folder, C, "3")
    recover(backends, {oldest.resolve()}, "9")
    assert oldest.exists()
    recover(backends, (), "9")
    assert not oldest.exists()
    current, previous = folder.current(), folder.previous()
    assert current is not None
    assert previous is not None
    assert (current.digest, previous.digest) == (C, B)


def test_a_first_install_that_lacked_only_the_pointer_is_finished(backends: Path) -> None:
    folder = BackendFolder(backends / "x")
    put(folder, A, "1", switch=False)
    assert recover(backends, (), "9").finished == ["x"]
    assert [row.digest for row in read_inventory(backends).rows()] == [A]


def test_a_version_fetched_aside_waits_for_its_switch(backends: Path) -> None:
    folder = BackendFolder(backends / "x")
    put(folder, A, "1")
    aside = put(folder, B, "2", switch=False)
    recover(backends, (), "9")
    assert aside.exists()
    current = folder.current()
    assert current is not None
    assert current.digest == A


def test_a_newer_one_aside_replaces_an_older_one(backends: Path) -> None:
    folder = BackendFolder(backends / "x")
    put(folder, A, "1")
    older = put(folder, B, "2", switch=False)
    newer = put(folder, C, "3", switch=False)
    recover(backends, (), "9")
    assert (older.exists(), newer.exists()) == (False, True)


def test_a_first_install_that_never_got_far_leaves_nothing(backends: Path) -> None:
    BackendFolder(backends / "x").begin(A)
    recover(backends, (), "9")
    assert list(backends.iterdir()) == []


def test_a_damaged_pointer_removes_nothing(backends: Path) -> None:
    folder = BackendFolder(backends / "x")
    put(folder, A, "1")
    put(folder, B, "2")
    (folder.path / "current").unlink()
    (folder.path / "current").symlink_to("versions/gone")
    with capture_logs() as lines:
        recover(backends, (), "9")
    assert len(versions(folder)) == 6
    assert "the current version is damaged" in lines[0]["event"]


def test_half_a_meta_goes_and_a_whole_one_stays(backends: Path) -> None:
    (backends / "half").mkdir()
    (backends / "half" / ".metadata.json.abc").touch()
    (backends / "whole").mkdir()
    write_metadata(backends / "whole", Metadata(name="whole", meta_backend_for="x"))
    recover(backends, (), "9")
    assert sorted(path.name for path in backends.iterdir()) == ["whole"]


def test_what_is_not_ours_is_left_alone(backends: Path) -> None:
    (backends / "notes").mkdir()
    (backends / "notes" / "readme").touch()
    (backends / "file").touch()
    (backends / ".hidden").mkdir()
    recover(backends, (), "9")
    assert sorted(path.name for path in backends.iterdir()) == [".hidden", "file", "notes"]


def test_one_that_cannot_be_tidied_does_not_keep_the_others_from_it(backends: Path) -> None:
    (backends / "a").mkdir()
    os.mkfifo(backends / "a" / "pipe")
    (backends / "a" / "run.sh").touch()  # cannot be imported: nobody knows what a pipe is
    flat(backends, "b")
    assert recover(backends, (), "9").imported == ["b"]


# Flat folders


def flat(backends: Path, name: str, **metadata: str) -> Path:
    folder = backends / name
    (folder / "lib").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "lib" / "x").write_text(name)
    if metadata:
        (folder / "metadata.json").write_text(json.dumps({"name": name} | metadata, indent=2))
    return folder


def test_a_flat_folder_is_taken_in_without_a_copy(backends: Path) -> None:
    inode = flat(backends, "cpu-x", alias="x", version="1.2", uri="h/x:1", digest=A).stat().st_ino
    assert recover(backends, (), "9").imported == ["cpu-x"]
    build = read_inventory(backends).find("x")
    assert build is not None
    assert build.directory.stat().st_ino == inode
    assert (build.name, build.digest, build.metadata.version) == ("cpu-x", A, "1.2")
    assert (backends / "cpu-x" / "current" / "run.sh").exists()
    assert recover(backends, (), "9").imported == []


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_without_readable_metadata_the_folders_name_counts(backends: Path, content: str | None) -> None:
    folder = flat(backends, "x")
    if content is not None:
        (folder / "metadata.json").write_text(content)
    recover(backends, (), "9")
    (row,) = read_inventory(backends).rows()
    assert (row.name, row.digest) == ("x", "")


def test_a_flat_folder_in_use_waits(backends: Path) -> None:
    folder = flat(backends, "x")
    assert recover(backends, {folder.resolve()}, "9").imported == []
    assert import_flat(backends, "x", (), "9") == ["x"]
    assert import_flat(backends, "x", (), "9") == []


@pytest.mark.parametrize("step", ["begun", "moved", "recorded", "switched"])
def test_an_interrupted_import_is_finished(backends: Path, step: str) -> None:
    source = flat(backends, "x", digest=A)
    aside = backends / ".importing-x"
    if step == "begun":
        (aside / "versions").mkdir(parents=True)
    else:
        listing = list_tree(source, leave_out=("metadata.json",))
        version = "sha256-" + listing.digest.removeprefix("sha256:")
        (aside / "versions").mkdir(parents=True)
        source.rename(aside / "versions" / version)
        folder = BackendFolder(aside)
        if step in ("recorded", "switched"):
            folder.finish(VersionRecord(id=version, digest=A, content_digest=listing.digest, made_at="1"), listing)
        if step == "switched":
            folder.switch(version, "1")
    assert recover(backends, (), "9").imported == ["x"]
    assert [(row.name, row.digest) for row in read_inventory(backends).rows()] == [("x", A)]
    assert sorted(path.name for path in backends.iterdir()) == ["x"]


def test_localai_interrupted_in_the_middle_of_its_swap(backends: Path) -> None:
    flat(backends, "x.install-backup", alias="shared")
    flat(backends, "x.install-tmp", alias="shared")
    flat(backends, "y", version="new")
    flat(backends, "y.backup", version="old")
    (backends / "z.upgrade-tmp").mkdir()
    recover(backends, (), "9")
    assert sorted(path.name for path in backends.iterdir()) == ["x", "y"]
    rows = read_inventory(backends).rows()
    assert [(row.name, row.alias, row.version) for row in rows] == [("x", "shared", ""), ("y", "", "new")]
