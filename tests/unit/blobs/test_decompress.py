"""Packed streams are told by their first bytes, come out in bounded blocks, and damage is noticed."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.blobs.archives.decompress import MAX_BLOCK_BYTES, can_unpack_zstd, decompress_blocks
from corral.blobs.errors import BadArchive

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "none": bytes,
}


@pytest.mark.parametrize("packer", PACKERS)
@given(st.binary(max_size=5000), st.integers(0, 3))
def test_what_was_packed_comes_out(packer: str, data: bytes, members: int) -> None:
    pack = PACKERS[packer]
    plain = data if packer == "none" else data * (members + 1)
    packed = pack(data) if packer == "none" else pack(data) * (members + 1)
    if packer == "none" and data[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"\x28\xb5"):
        return
    assert b"".join(decompress_blocks(io.BytesIO(packed))) == plain


@pytest.mark.parametrize("packer", ["gzip", "xz", "bzip2"])
def test_blocks_stay_small_however_well_it_was_packed(packer: str) -> None:
    packed = PACKERS[packer](bytes(64 << 20))
    assert len(packed) < 100_000
    sizes = [len(block) for block in decompress_blocks(io.BytesIO(packed))]
    assert sum(sizes) == 64 << 20
    assert max(sizes) <= MAX_BLOCK_BYTES


@pytest.mark.parametrize("packer", ["gzip", "xz", "bzip2"])
def test_a_cut_stream_is_refused(packer: str) -> None:
    packed = PACKERS[packer](bytes(range(256)) * 1000)
    with pytest.raises(BadArchive):
        list(decompress_blocks(io.BytesIO(packed[:-20])))


@pytest.mark.parametrize("packer", ["gzip", "xz", "bzip2"])
@given(st.integers(10, 10**6), st.integers(1, 255))
def test_damage_is_noticed_or_harmless(packer: str, at: int, flip: int) -> None:
    plain = bytes(range(256)) * 8
    packed = bytearray(PACKERS[packer](plain))
    packed[at % len(packed)] ^= flip
    with contextlib.suppress(BadArchive):
        b"".join(decompress_blocks(io.BytesIO(bytes(packed))))


def test_padding_behind_the_stream_is_ignored() -> None:
    for packer in ("gzip", "xz", "bzip2"):
        assert b"".join(decompress_blocks(io.BytesIO(PACKERS[packer](b"abc") + bytes(1000)))) == b"abc"


@pytest.mark.skipif(can_unpack_zstd(), reason="this Python can unpack zstd")
def test_zstd_is_refused_by_name_where_python_cannot_unpack_it() -> None:
    with pytest.raises(BadArchive, match="zstd"):
        list(decompress_blocks(io.BytesIO(b"\x28\xb5\x2f\xfd" + bytes(20))))
