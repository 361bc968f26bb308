"""Which blobs go when the limit of their store is reached."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.blobs.eviction import StoredBlob, choose_evicted

OLD, MIDDLE, NEW = StoredBlob("old", 40, 10.0), StoredBlob("middle", 40, 20.0), StoredBlob("new", 40, 30.0)
ALL = (NEW, OLD, MIDDLE)


@pytest.mark.parametrize(
    ("need", "limit", "keep", "used_before", "evicted"),
    [
        (0, 120, (), 100.0, ()),
        (1, 120, (), 100.0, ("old",)),
        (40, 120, (), 100.0, ("old",)),
        (41, 120, (), 100.0, ("old", "middle")),
        (41, 120, ("old",), 100.0, ("middle", "new")),  # a node is interested in its source
        (41, 120, (), 15.0, ("old",)),  # the others were requested a moment ago: the limit is exceeded for a while
        (0, 0, (), 100.0, ("old", "middle", "new")),
        (500, 120, (), 100.0, ("old", "middle", "new")),  # larger than the limit: fetched all the same
    ],
)
def test_the_least_recently_used_go(
    need: int, limit: int, keep: tuple[str, ...], used_before: float, evicted: tuple[str, ...]
) -> None:
    assert choose_evicted(ALL, keep, need_bytes=need, max_bytes=limit, used_before=used_before) == evicted


blobs = st.lists(st.builds(StoredBlob, st.uuids().map(str), st.integers(0, 50), st.floats(0, 100)), max_size=20)


@given(blobs, st.integers(0, 100), st.integers(0, 500), st.data())
def test_it_is_enough_and_no_more_than_needed(
    stored: list[StoredBlob], need: int, limit: int, data: st.DataObject
) -> None:
    keep = data.draw(st.sets(st.sampled_from([blob.digest for blob in stored]))) if stored else set()
    evicted = choose_evicted(stored, keep, need_bytes=need, max_bytes=limit, used_before=50.0)
    sizes = {blob.digest: blob.size for blob in stored}
    free = {blob.digest for blob in stored if blob.digest not in keep and blob.used_at < 50.0}
    left = sum(sizes.values()) + need - sum(sizes[each] for each in evicted)
    assert set(evicted) <= free
    assert left <= limit or set(evicted) == free
    assert not evicted or left + sizes[evicted[-1]] > limit
