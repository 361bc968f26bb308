"""Listing, comparing, copying and removing whole folders."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from corral.blobs.archives.entries import Bounds
from corral.blobs.disk import copy_tree, remove_tree, sync_tree
from corral.blobs.errors import BadArchive, TooLarge
from corral.blobs.folder_listing import compare_listings, list_tree, read_listing, write_listing
from corral.kit.threads import Stopped, StopToken


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "lib" / "empty").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "lib" / "x").write_bytes(b"\0" * 100)
    (folder / "lib" / "link").symlink_to("../run.sh")
    (folder / "abs").symlink_to("/usr/bin/env")
    return folder


def copy_of(tree: Path, name: str) -> Path:
    target = tree.parent / name
    target.mkdir()
    copy_tree(tree, target, Bounds())
    return target


def test_a_copy_has_the_same_digest(tree: Path) -> None:
    copy = copy_of(tree, "copy")
    assert list_tree(copy) == list_tree(tree)
    assert os.readlink(copy / "abs") == "/usr/bin/env"
    assert (copy / "run.sh").stat().st_mtime_ns == (tree / "run.sh").stat().st_mtime_ns


def test_a_copy_does_not_change_with_its_source(tree: Path) -> None:
    copy = copy_of(tree, "copy")
    with (tree / "run.sh").open("r+") as file:
        file.write("changed in place")
    assert (copy / "run.sh").read_text() == "#!/bin/sh\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "run.sh").write_text("#!/bin/sh "),
        lambda tree: (tree / "run.sh").chmod(0o644),
        lambda tree: (tree / "new").touch(),
        lambda tree: (tree / "new").mkdir(),
        lambda tree: (tree / "lib" / "x").unlink(),
        lambda tree: (tree / "lib" / "x").rename(tree / "lib" / "y"),
        lambda tree: ((tree / "abs").unlink(), (tree / "abs").symlink_to("/usr/bin/env2")),
        lambda tree: (tree / "lib" / "empty").rmdir(),
    ],
)
def test_any_change_shows_in_the_digest(tree: Path, change: object) -> None:
    before = list_tree(tree).digest
    change(tree)  # type: ignore[operator]
    assert list_tree(tree).digest != before


def test_times_and_owners_do_not_show(tree: Path) -> None:
    before = list_tree(tree).digest
    os.utime(tree / "run.sh", (0, 0))
    assert list_tree(tree).digest == before


def test_differences_are_named_and_additions_are_no_damage(tree: Path) -> None:
    before = list_tree(tree)
    (tree / "__pycache__").mkdir()
    assert compare_listings(before, list_tree(tree)).is_whole
    (tree / "lib" / "x").unlink()
    (tree / "run.sh").write_text("other")
    difference = compare_listings(before, list_tree(tree))
    assert (difference.missing, difference.changed, difference.added) == (("lib/x",), ("run.sh",), ("__pycache__",))
    assert not difference.is_whole


def test_a_listing_survives_the_disk(tree: Path, tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tree) + b"/caf\xe9")  # a name that is not UTF-8
    listing = list_tree(tree)
    write_listing(tmp_path / "x.tree", listing)
    assert read_listing(tmp_path / "x.tree") == listing
    assert read_listing(tmp_path / "missing.tree") is None
    (tmp_path / "x.tree").write_text("{")
    assert read_listing(tmp_path / "x.tree") is None


def test_names_at_the_top_can_be_left_out(tree: Path) -> None:
    (tree / "metadata.json").write_text("{}")
    (tree / "lib" / "metadata.json").write_text("{}")
    paths = [row.path for row in list_tree(tree, leave_out=("metadata.json",)).rows]
    assert "metadata.json" not in paths
    assert "lib/metadata.json" in paths


def test_pipes_are_refused(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    with pytest.raises(BadArchive, match="neither a file, a folder nor a link"):
        list_tree(tree)
    with pytest.raises(BadArchive, match="neither a file, a folder nor a link"):
        copy_of(tree, "copy")


def test_a_copy_has_bounds(tree: Path) -> None:
    (tree.parent / "copy").mkdir()
    with pytest.raises(TooLarge):
        copy_tree(tree, tree.parent / "copy", Bounds(max_bytes=50))


def test_reading_can_be_given_up(tree: Path) -> None:
    stop = StopToken()
    stop.set()
    with pytest.raises(Stopped):
        list_tree(tree, stop)


def test_removing_does_not_follow_links(tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").touch()
    (tree / "out").symlink_to(outside)
    remove_tree(tree)
    assert not tree.exists()
    assert (outside / "keep").exists()
    remove_tree(tree)  # gone already


def test_removing_works_on_folders_nobody_may_write(tree: Path) -> None:
    (tree / "lib").chmod(stat.S_IRUSR | stat.S_IXUSR)
    remove_tree(tree)
    assert not tree.exists()


def test_syncing_says_when_it_cannot(tree: Path, tmp_path: Path) -> None:
    sync_tree(tree)
    with pytest.raises(FileNotFoundError):
        sync_tree(tmp_path / "missing")
