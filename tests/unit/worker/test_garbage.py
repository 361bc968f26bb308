"""Which fetched model files are removed, and how many bytes that frees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.worker.files.garbage import StoredSet, describe, over_limit, stored_bytes, unneeded


def a_set(name: str, used_at: float, *inodes: int, in_use: bool = False, size: int = 100) -> StoredSet:
    paths = tuple(f"{name}/s/{inode}.gguf" for inode in inodes)
    return StoredSet(name, paths, used_at, {(1, inode): size for inode in inodes}, in_use)


@pytest.mark.parametrize(
    ("keep", "gone"),
    [
        ((), ["b", "a"]),
        (("a/",), ["b"]),
        (("a/s/", "b/s/"), []),
        (("a/other/",), ["b", "a"]),
        (("ab/",), ["b", "a"]),
    ],
)
def test_sets_of_no_model_go_the_longest_unused_first(keep: tuple[str, ...], gone: list[str]) -> None:
    sets = [a_set("a", 50.0, 1), a_set("b", 10.0, 2), a_set("busy", 1.0, 3, in_use=True), a_set("fresh", 99.0, 4)]
    assert [each.name for each in unneeded(sets, keep, used_before=90.0)] == gone


def test_bytes_that_another_set_shares_stay() -> None:
    one, two, three = a_set("one", 1.0, 1, 2), a_set("two", 2.0, 2, 3), a_set("three", 3.0, 3)
    assert stored_bytes([one, two, three]) == 300
    freed = describe([one, two], [three], "unused")
    assert [(each.name, each.files, each.size_bytes) for each in freed] == [("one/s", 2, 200), ("two/s", 2, 0)]


@pytest.mark.parametrize(
    ("limit", "need", "gone"),
    [(300, 0, []), (299, 0, ["old"]), (300, 100, ["old"]), (100, 0, ["old", "mid"]), (50, 100, ["old", "mid"])],
)
def test_the_limit_takes_the_longest_unused_and_never_what_is_in_use(limit: int, need: int, gone: list[str]) -> None:
    sets = [a_set("mid", 2.0, 2), a_set("old", 1.0, 1), a_set("busy", 0.0, 3, in_use=True)]
    assert [each.name for each in over_limit(sets, limit, need)] == gone


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 6), min_size=1), st.floats(0, 100), st.booleans()), max_size=6),
    st.integers(0, 800),
)
def test_what_remains_fits_or_is_all_in_use(made: list[tuple[set[int], float, bool]], limit: int) -> None:
    sets = [a_set(str(index), at, *sorted(inodes), in_use=busy) for index, (inodes, at, busy) in enumerate(made)]
    gone = over_limit(sets, limit)
    rest = [each for each in sets if each not in gone]
    assert not any(each.in_use for each in gone)
    assert stored_bytes(rest) <= limit or all(each.in_use for each in rest)
