"""Sets of chunks: what is encoded is decoded, and a bitmap that fits no blob is refused."""

from __future__ import annotations

import base64
import contextlib
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.blobs.swarm.chunk_set import ChunkSet, decode_chunks, from_bytes
from corral.kit.errors import Invalid


@given(st.integers(0, 300).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, (1 << count) - 1))))
def test_encoding_keeps_the_set(case: tuple[int, int]) -> None:
    chunks = ChunkSet(*case)
    assert decode_chunks(chunks.encode(), chunks.count) == chunks
    assert from_bytes(chunks.to_bytes(), chunks.count) == chunks
    assert len(list(chunks)) == len(chunks)
    assert all(index in chunks for index in chunks)


@given(st.sets(st.integers(0, 299), min_size=1), st.integers())
def test_a_picked_chunk_is_one_of_the_set(chunks: set[int], seed: int) -> None:
    assert ChunkSet.of(300, chunks).pick(Random(seed)) in chunks


def test_set_operations() -> None:
    some = ChunkSet.of(10, [0, 9])
    assert list(some.add(4)) == [0, 4, 9]
    assert list(ChunkSet.complete(10).minus(some)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(some.union(ChunkSet.of(10, [3]))) == [0, 3, 9]
    assert ChunkSet.complete(10).is_complete
    assert ChunkSet.complete(10).encode() == "all"
    assert not some.is_complete


@pytest.mark.parametrize("text", ["", "AA", "A===", "é", "AAAA", "////", "ALL", "a" * (1 << 21)])
def test_bitmaps_that_fit_no_blob_are_refused(text: str) -> None:
    with pytest.raises(Invalid):
        decode_chunks(text, 10)


@given(
    st.one_of(st.text(max_size=60), st.binary(max_size=40).map(lambda raw: base64.b64encode(raw).decode())),
    st.integers(-1, 300),
)
def test_what_another_worker_sends_is_a_set_of_this_blob_or_refused(text: str, count: int) -> None:
    with contextlib.suppress(Invalid):
        found = decode_chunks(text, count)
        assert found.count == count
        assert all(0 <= index < count for index in found)


def test_counts_and_indexes_out_of_range_are_refused() -> None:
    for count in (-1, 1 << 30):
        with pytest.raises(Invalid):
            decode_chunks("all", count)
    for index in (-1, 10):
        with pytest.raises(Invalid):
            ChunkSet.of(10, [index])
