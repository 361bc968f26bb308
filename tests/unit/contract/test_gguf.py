"""The head of a GGUF file is read, and files made to hurt are refused."""

from __future__ import annotations

import io
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corral.contract import gguf as reading
from corral.contract.codec import decode, encode
from corral.contract.gguf import GgufHeader, Truncated, read_header
from corral.kit.errors import Invalid
from tests.support.gguf_files import LLAMA, TOKENS, gguf


def read(data: bytes) -> GgufHeader:
    return read_header(io.BytesIO(data))


@pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])
@pytest.mark.parametrize("version", [2, 3])
def test_the_shape_of_a_model(version: int, order: str) -> None:
    header = read(gguf(LLAMA | TOKENS, version=version, order=order))
    assert (header.version, header.architecture, header.vocabulary) == (version, "llama", 4)
    assert header.number("block_count") == 32
    assert header.number("attention.head_count_kv") == 8
    assert header.values["rope.freq_base"] == 500000.0
    assert "name" not in header.values


def test_reading_ends_where_the_tokens_begin() -> None:
    data = gguf(LLAMA | TOKENS)
    file = io.BytesIO(data + b"\xff" * 1000)
    read_header(file)
    assert file.tell() < len(data) - len(b"<s></s>ab")


def test_the_vocabulary_may_stand_in_the_shape() -> None:
    assert read(gguf(LLAMA | {"llama.vocab_size": 32000})).vocabulary == 32000


def test_one_number_per_layer_or_one_for_all() -> None:
    header = read(gguf(LLAMA | {"llama.block_count": 3, "llama.attention.head_count_kv": [4, 0, 8]}))
    assert header.numbers("attention.head_count_kv", 3) == (4, 0, 8)
    assert header.numbers("attention.head_count", 3) == (32, 32, 32)
    assert header.numbers("attention.head_count_kv", 5) == ()
    assert header.numbers("nothing", 3) == ()


def test_what_is_long_or_of_no_interest_is_passed_over() -> None:
    more: dict[str, Any] = {
        "general.license": "x" * 100_000,
        "llama.big_list": list(range(5000)),
        "llama.texts": ["a", "b" * 1000],
        "llama.flags": [True, False],
        "llama.nested": [[1, 2], [3]],
        "llama.large": 2**40,
        "llama.below": -5,
        "llama.is_odd": True,
    }
    header = read(gguf(more | LLAMA | TOKENS))
    assert header.number("block_count") == 32
    assert header.number("large") == 2**40
    assert header.number("below") == 0
    assert header.number("is_odd") == 0
    assert header.values["flags"] == (True, False)
    assert "big_list" not in header.values
    assert "nested" not in header.values


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"GGUF", "ends in the middle"),
        (b"GGUF\x03\0\0\0", "ends in the middle"),
        (gguf(LLAMA, version=1), "version 1 is not known"),
        (gguf(LLAMA, version=99), "version 99 is not known"),
        (gguf(LLAMA, count=2**40), "no GGUF file has so many"),
        (gguf(LLAMA, count=9), "ends in the middle"),
        (gguf({}), "does not name its architecture"),
        (gguf({"general.architecture": 7}), "does not name its architecture"),
        (gguf({}, count=1) + struct.pack("<Q", 2**63), "no GGUF file has such"),
        (gguf({}, count=1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 77), "unknown kind 77"),
        (gguf({}, count=1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 8, 2**62), "longer than"),
        (gguf({}, count=1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 77, 3), "a list of unknown kind 77"),
        (gguf({}, count=1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 10, 2**62), "longer than"),
        (gguf({}, count=1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**62), "ends in the middle"),
        (gguf({"tokenizer.ggml.tokens": 5}), "not a list"),
    ],
)
def test_what_no_sane_program_wrote_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        read(data)


def test_lists_in_lists_end_somewhere() -> None:
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50
    with pytest.raises(Invalid, match="unknown kind 9"):
        read(gguf({}, count=1) + struct.pack("<Q", 1) + b"k" + nested)


def test_texts_without_end_are_not_walked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_BYTES", 4096)
    endless = gguf({}, count=1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**62) + b"\0" * 8192
    with pytest.raises(Invalid, match="longer than 4096 bytes"):
        read(endless)


def test_cut_off_anywhere_it_is_refused_or_read() -> None:
    whole = gguf(LLAMA | TOKENS)
    for length in range(len(whole)):
        try:
            assert read(whole[:length]).architecture == "llama"  # only what comes after the shape was missing
        except Invalid:
            continue


@given(st.binary(max_size=400))
@example(b"\xff" * 100)
def test_no_bytes_do_harm(data: bytes) -> None:
    for start in (b"", b"GGUF\x03\0\0\0", gguf({}, count=3), gguf(LLAMA, count=12)):
        try:
            read(start + data)
        except Invalid:
            continue


@given(st.integers(0, 200), st.integers(0, 255))
def test_no_changed_byte_does_harm(position: int, value: int) -> None:
    data = bytearray(gguf(LLAMA | TOKENS))
    data[position] = value
    try:
        header = read(bytes(data))
    except Invalid:
        return
    assert isinstance(header, GgufHeader)


def read_whole(data: bytes) -> GgufHeader:
    return read_header(io.BytesIO(data), whole=True)


def test_what_follows_the_vocabulary_is_read_when_it_is_wanted() -> None:
    after = {"tokenizer.ggml.merges": ["a b"] * 50, "tokenizer.chat_template": "{{ x }}" * 1000}
    data = gguf(LLAMA | TOKENS | after | {"general.type": "model"})
    assert read(data).chat_template is None
    header = read_whole(data)
    assert (header.chat_template, header.vocabulary, header.name, header.kind) == (True, 4, "a small llama", "model")
    assert read_whole(gguf(LLAMA | TOKENS)).chat_template is False


def test_a_beginning_asks_for_more_and_never_for_something_else() -> None:
    data = gguf(LLAMA | TOKENS | {"tokenizer.chat_template": "x" * 1000, "general.type": "model"})
    for length in range(1, len(data)):
        with pytest.raises(Truncated):
            read_whole(data[:length])


def test_numbers_that_are_none_are_left_out_and_the_rest_crosses_the_wire() -> None:
    values = {"llama.odd": float("inf"), "llama.odds": [1.5, float("nan")], "llama.fine": [1.5, 2.5]}
    header = read_whole(gguf(LLAMA | values | TOKENS))
    assert not header.values.keys() & {"odd", "odds"}
    assert decode(GgufHeader, encode(header)) == header


@given(st.binary(max_size=400))
def test_no_bytes_do_harm_behind_the_vocabulary(data: bytes) -> None:
    for start in (gguf(LLAMA | TOKENS, count=14), gguf(TOKENS, count=5)):
        try:
            decode(GgufHeader, encode(read_whole(start + data)))
        except Invalid:
            continue
