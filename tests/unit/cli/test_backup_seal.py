"""Streams with a passphrase and without one: the reader finds every change."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.cli.backup.seal import (
    CHUNK_BYTES,
    Seal,
    SealingWriter,
    SummingReader,
    SummingWriter,
    UnsealingReader,
    make_key,
    open_key,
)
from corral.kit.errors import Denied, Invalid

KEY = bytes(range(32))
HEADER = b"header\n"
SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5)
SEALED_CHUNK = CHUNK_BYTES + 16


def sealed(data: bytes) -> bytes:
    file = io.BytesIO()
    writer = SealingWriter(file, KEY, HEADER)
    for at in range(0, len(data), 10_000):
        writer.write(data[at : at + 10_000])
    writer.finish()
    return file.getvalue()


def unsealed(stream: bytes, *, key: bytes = KEY, header: bytes = HEADER) -> bytes:
    reader = UnsealingReader(io.BytesIO(stream), key, header)
    data = b""
    while piece := reader.read(7_000):
        data += piece
    reader.finish()
    return data


def summed(data: bytes) -> bytes:
    file = io.BytesIO()
    writer = SummingWriter(file, HEADER)
    writer.write(data)
    writer.finish()
    return file.getvalue()


def read_summed(stream: bytes, *, header: bytes = HEADER) -> bytes:
    reader = SummingReader(io.BytesIO(stream), header)
    data = b""
    while piece := reader.read(11):
        data += piece
    reader.finish()
    return data


@pytest.mark.parametrize("size", SIZES)
def test_what_was_sealed_comes_back(size: int) -> None:
    data = bytes(at % 251 for at in range(size))
    assert unsealed(sealed(data)) == data
    assert UnsealingReader(io.BytesIO(sealed(data)), KEY, HEADER).read() == data


@pytest.mark.parametrize("size", SIZES)
def test_a_stream_that_was_cut_off_is_refused(size: int) -> None:
    stream = sealed(bytes(size))
    for kept in {0, 1, 15, len(stream) - 1, len(stream) // 2, SEALED_CHUNK, 2 * SEALED_CHUNK} - {len(stream)}:
        if kept < len(stream):
            with pytest.raises(Invalid, match="damaged or incomplete"):
                unsealed(stream[:kept])


def test_chunks_in_another_order_or_of_another_file_are_refused() -> None:
    stream = sealed(bytes(3 * CHUNK_BYTES))
    first, second, rest = stream[:SEALED_CHUNK], stream[SEALED_CHUNK : 2 * SEALED_CHUNK], stream[2 * SEALED_CHUNK :]
    for other in (second + first + rest, first + rest, first + first + second + rest, stream + b"x", stream + rest):
        with pytest.raises(Invalid):
            unsealed(other)
    with pytest.raises(Invalid):
        unsealed(stream, header=b"another\n")
    with pytest.raises(Invalid):
        unsealed(stream, key=KEY[::-1])


@given(st.binary(max_size=300), st.data())
def test_damage_at_any_byte_is_found(data: bytes, draw: st.DataObject) -> None:
    for stream, read in ((sealed(data), unsealed), (summed(data), read_summed)):
        at = draw.draw(st.integers(0, len(stream) - 1))
        bit = draw.draw(st.integers(0, 7))
        changed = bytearray(stream)
        changed[at] ^= 1 << bit
        with pytest.raises(Invalid):
            read(bytes(changed))
        with pytest.raises(Invalid):
            read(stream[:at])


@given(st.binary(max_size=300))
def test_a_stream_without_passphrase_ends_with_its_sum(data: bytes) -> None:
    assert read_summed(summed(data)) == data
    with pytest.raises(Invalid):
        read_summed(summed(data), header=b"another\n")
    with pytest.raises(Invalid):
        read_summed(summed(data) + b"x")


def test_the_key_belongs_to_passphrase_and_salt() -> None:
    seal = Seal(n=2**10)
    key, check = make_key("four words or more", seal)
    seal = replace(seal, check=check)
    assert open_key("four words or more", seal) == key
    with pytest.raises(Denied, match="not the one of this backup"):
        open_key("four words or mor", seal)
    with pytest.raises(Denied):
        open_key("four words or more", replace(seal, salt="00" * 16))
    assert make_key("four words or more", Seal(n=2**10))[0] != key, "each file has its own salt"


@pytest.mark.parametrize(
    "costs", [{"n": 2**40}, {"n": 3}, {"n": 0}, {"r": 0}, {"p": -1}, {"r": 2**20}, {"p": 2**20}, {"salt": "zz"}]
)
def test_a_header_cannot_ask_for_any_cost(costs: dict[str, int]) -> None:
    with pytest.raises(Invalid):
        make_key("x", replace(Seal(n=2**10), **costs))  # type: ignore[arg-type]


def test_a_method_of_a_newer_release() -> None:
    with pytest.raises(Invalid, match="upgrade corral"):
        make_key("x", Seal(n=2**10, method="argon2id+aes"))


def test_the_costs_of_a_new_backup() -> None:
    """OWASP's recommendation for scrypt: N = 2^17, r = 8, p = 1."""
    assert (Seal().n, Seal().r, Seal().p) == (2**17, 8, 1)
