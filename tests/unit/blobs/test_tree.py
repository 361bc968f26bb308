"""The picture of the tree: names, links, replacements, whiteouts."""

from __future__ import annotations

import pytest

from corral.blobs.archives.entries import Entry, EntryKind
from corral.blobs.archives.tree import Placed, Removed, Tree
from corral.blobs.errors import BadArchive, UnsafeArchive


def file(name: str) -> Entry:
    return Entry(name, EntryKind.FILE)


def folder(name: str) -> Entry:
    return Entry(name, EntryKind.FOLDER)


def link(name: str, target: str) -> Entry:
    return Entry(name, EntryKind.SYMLINK, target=target)


def same(name: str, target: str) -> Entry:
    return Entry(name, EntryKind.HARD_LINK, target=target)


def tree_of(*entries: Entry, rootfs: bool = False) -> Tree:
    tree = Tree(rootfs=rootfs)
    tree.next_layer()
    for entry in entries:
        tree.put(entry)
    return tree


@pytest.mark.parametrize(
    ("name", "path", "made"),
    [
        ("a", "a", ()),
        ("./a", "a", ()),
        ("a/b/c", "a/b/c", ("a", "a/b")),
        ("a//b/./c", "a/b/c", ("a", "a/b")),
        ("..a/b..", "..a/b..", ("..a",)),
    ],
)
def test_plain_names(name: str, path: str, made: tuple[str, ...]) -> None:
    assert tree_of().put(file(name)) == Placed(path, made)


@pytest.mark.parametrize(
    "name", ["../a", "a/../../b", "a/..", "..", "/etc/passwd", "//a", "a\0b", "x" * 5000, "/".join("a" * 200)]
)
def test_names_that_reach_outside_or_are_none(name: str) -> None:
    with pytest.raises(UnsafeArchive):
        tree_of().put(file(name))


def test_an_image_root_is_not_the_machines() -> None:
    assert tree_of(rootfs=True).put(file("/etc/passwd")) == Placed("etc/passwd", ("etc",))


def test_the_folder_itself_is_no_entry() -> None:
    assert tree_of().put(folder("./")) is None
    assert tree_of().put(folder("")) is None
    with pytest.raises(UnsafeArchive, match="folder itself"):
        tree_of().put(file("."))


@pytest.mark.parametrize("target", ["/etc", "..", "../x", "a/../../..", "b/../../../etc"])
def test_links_to_outside_are_refused(target: str) -> None:
    with pytest.raises(UnsafeArchive):
        tree_of().put(link("a", target))


@pytest.mark.parametrize(
    ("name", "target", "written"),
    [
        ("a/b/c", "../x", "../x"),
        ("a", "b/c", "b/c"),
        ("lib/libx.so", "./libx.so.1", "./libx.so.1"),
    ],
)
def test_links_inside_stay_as_they_are(name: str, target: str, written: str) -> None:
    placed = tree_of().put(link(name, target))
    assert isinstance(placed, Placed)
    assert placed.target == written


@pytest.mark.parametrize(
    ("name", "target", "written"),
    [
        ("bin/sh", "/usr/bin/dash", "../usr/bin/dash"),
        ("sh", "/usr/bin/dash", "usr/bin/dash"),
        ("a/b/root", "/", "../.."),
        ("a/dots", "./../x/../y", "../x/../y"),
        ("a/up", "../../../x", "../x"),  # in a container `..` stops at the root
        ("up", "../..", "."),
        ("a/b", "../c", "../c"),
    ],
)
def test_an_images_links_are_read_as_a_container_reads_them(name: str, target: str, written: str) -> None:
    tree = tree_of(rootfs=True)
    placed = tree.put(link(name, target))
    assert isinstance(placed, Placed)
    assert placed.target == written
    tree.check_links()


def test_a_file_put_through_a_link_lands_where_the_link_leads() -> None:
    tree = tree_of(folder("usr/lib"), link("lib", "usr/lib"))
    assert tree.put(file("lib/x.so")) == Placed("usr/lib/x.so")
    assert tree.put(file("lib/deep/y.so")) == Placed("usr/lib/deep/y.so", ("usr/lib/deep",))


def test_a_link_behind_another_is_followed_too() -> None:
    tree = tree_of(folder("real"), link("one", "real"), link("two", "one"))
    assert tree.put(file("two/x")) == Placed("real/x")


def test_a_link_that_changes_is_followed_anew() -> None:
    tree = tree_of(folder("a"), folder("b"), link("now", "a"))
    assert tree.put(file("now/1")) == Placed("a/1")
    assert tree.put(link("now", "b")) == Placed("now", (), remove=True, target="b")
    assert tree.put(file("now/2")) == Placed("b/2")


def test_links_in_circles_are_refused() -> None:
    with pytest.raises(UnsafeArchive, match="loop of links"):
        tree_of(link("a", "b"), link("b", "a")).put(file("a/x"))


def test_link_then_write_through_by_way_of_dots_is_refused() -> None:
    # Each link alone stays inside: `here` is the folder itself, and `here/..` looks like it to whoever only counts.
    tree = tree_of(link("here", "."))
    tree.put(link("out", "here/../x"))
    with pytest.raises(UnsafeArchive, match="leads outside"):
        tree.put(file("out/y"))


def test_such_a_link_is_refused_in_the_end_even_if_nothing_is_written_through_it() -> None:
    tree = tree_of(folder("a/b"), link("d", "a/b"), link("out", "d/../x"))
    tree.check_links()  # inside: a/b/../x is a/x
    tree.put(link("d", "."))
    with pytest.raises(UnsafeArchive, match="'out' leads outside"):
        tree.check_links()


def test_links_to_nothing_are_fine() -> None:
    tree_of(link("a", "nowhere/at/all"), link("b", "a/further")).check_links()


def test_a_link_that_would_lead_outside_once_somebody_makes_a_folder_is_refused() -> None:
    tree = tree_of(link("b", "a/../.."), rootfs=True)
    with pytest.raises(UnsafeArchive, match="'b' leads outside"):
        tree.check_links()


def test_something_inside_a_file_is_refused() -> None:
    with pytest.raises(BadArchive, match="is a file"):
        tree_of(file("a")).put(file("a/b"))


def test_what_comes_later_replaces_what_was_there() -> None:
    tree = tree_of(folder("a"), file("a/b"), file("c"), link("d", "a"))
    assert tree.put(folder("a")) == Placed("a", keep=True)
    assert tree.put(file("c")) == Placed("c", remove=True)
    assert tree.put(file("d")) == Placed("d", remove=True)  # the link goes, not what it leads to
    assert tree.put(file("a")) == Placed("a", remove=True)
    assert tree.put(folder("c")) == Placed("c", remove=True)


def test_another_name_of_a_file() -> None:
    tree = tree_of(folder("real"), file("real/x"), link("way", "real"))
    assert tree.put(same("y", "way/x")) == Placed("y", target="real/x")


@pytest.mark.parametrize("target", ["missing", "real", "way", "real/missing", "missing/x", "../x", "/etc/passwd"])
def test_another_name_of_what_is_no_file_here_is_refused(target: str) -> None:
    tree = tree_of(folder("real"), file("real/x"), file("x"), link("way", "real"))
    with pytest.raises(UnsafeArchive):
        tree.put(same("y", target))


def test_another_name_of_what_it_would_replace_is_refused() -> None:
    with pytest.raises(BadArchive, match="replaces"):
        tree_of(file("x")).put(same("x", "x"))
    with pytest.raises(BadArchive, match="replaces"):
        tree_of(file("a/x")).put(same("a", "a/x"))


# Layers


def layers(*all_layers: list[Entry]) -> list[Placed | Removed | None]:
    """What the last layer does."""
    tree = Tree(rootfs=True)
    done: list[Placed | Removed | None] = []
    for layer in all_layers:
        tree.next_layer()
        done = [tree.put(entry) for entry in layer]
    return done


def test_a_whiteout_takes_away_what_earlier_layers_brought() -> None:
    assert layers([file("a/b"), file("a/c")], [file("a/.wh.b")]) == [Removed(("a/b",))]
    assert layers([file("a/b/c")], [file("a/.wh.b")]) == [Removed(("a/b",))]
    assert layers([folder("a")], [file("a/.wh.missing")]) == [Removed(())]
    assert layers([], [file("no/.wh.x")]) == [Removed(())]


def test_a_whiteout_says_nothing_about_its_own_layer() -> None:
    assert layers([file("x")], [file("b"), file(".wh.b")])[-1] == Removed(())
    assert layers([file("a/old")], [file("a/new"), file(".wh.a")])[-1] == Removed(("a/old",))
    assert layers([file("a/old")], [file(".wh.a"), file("a/new")]) == [Removed(("a",)), Placed("a/new", ("a",))]


def test_an_opaque_folder_shows_nothing_from_below() -> None:
    assert layers([file("a/1"), file("a/2/3"), file("b")], [folder("a"), file("a/.wh..wh..opq")])[-1] == Removed(
        ("a/1", "a/2")
    )
    # wherever in its layer the mark stands
    assert layers([file("a/1"), file("a/d/2")], [file("a/d/new"), file("a/.wh..wh..opq")])[-1] == Removed(
        ("a/1", "a/d/2")
    )


def test_a_whiteout_through_a_link_hits_what_the_link_leads_to() -> None:
    assert layers([file("usr/lib/x"), link("lib", "usr/lib")], [file("lib/.wh.x")]) == [Removed(("usr/lib/x",))]


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "a/.wh..."])
def test_whiteouts_of_nothing_or_of_dots_are_refused(name: str) -> None:
    with pytest.raises(UnsafeArchive):
        layers([file("a/b")], [file(name)])


def test_marks_of_old_storage_drivers_are_ignored() -> None:
    assert layers([file("a")], [folder(".wh..wh.plnk"), file(".wh..wh.aufs")]) == [Removed(()), Removed(())]


def test_in_a_plain_archive_such_a_name_is_just_a_name() -> None:
    assert tree_of(file("a")).put(file(".wh.a")) == Placed(".wh.a")


def test_a_layer_can_replace_anything() -> None:
    assert layers([folder("a"), file("a/b")], [link("a", "c")]) == [Placed("a", (), remove=True, target="c")]
    assert layers([link("a", "b")], [folder("a")]) == [Placed("a", remove=True)]
