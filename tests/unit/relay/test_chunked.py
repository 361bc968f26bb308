"""Chunked framing, both ways: exact to the byte, and strict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.relay.http1.chunked import LAST_CHUNK, ChunkedDecoder, ChunkScanner, PieceScanner, frame, is_whole_chunk
from corral.relay.http1.fields import Malformed


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    out = []
    for cut in cuts:
        out.append(data[:cut])
        data = data[cut:]
    return [piece for piece in [*out, data] if piece]


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=6), st.lists(st.integers(1, 9), max_size=40), st.binary())
def test_any_split_gives_the_same_body_and_the_same_rest(chunks: list[bytes], cuts: list[int], behind: bytes) -> None:
    data = b"".join(frame(chunk) for chunk in chunks) + b"0;x=y\r\nA: b\r\n\r\n" + behind
    decoder = ChunkedDecoder()
    body, rest = b"", b""
    for piece in pieces_of(data, cuts):
        if decoder.done:
            rest += piece
            continue
        found, rest = decoder.feed(piece)
        body += b"".join(found)
    assert decoder.done
    assert (body, rest) == (b"".join(chunks), behind)


@pytest.mark.parametrize("size", [b"0", b"00", b"000000000000000"])
def test_the_last_chunk_may_have_several_zeros(size: bytes) -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(size + b"\r\n\r\nrest") == ([], b"rest")


@pytest.mark.parametrize(
    "data", [b"g\r\n", b" 1\r\n", b"1 \r\n", b"\r\n", b"0x1\r\n", b"1\n", b"1\rx", b"f" * 16 + b"\r\n"]
)
def test_bad_sizes(data: bytes) -> None:
    with pytest.raises(Malformed):
        ChunkedDecoder().feed(data)


def test_an_incomplete_chunk_is_waited_for() -> None:
    decoder = ChunkedDecoder()
    for byte in b"5;e\r\nhello\r\n0\r\n\r":
        decoder.feed(bytes([byte]))
        assert not decoder.done
    assert decoder.feed(b"\n") == ([], b"")
    assert decoder.done


# Answers


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=6), st.lists(st.integers(1, 9), max_size=40))
def test_a_scanner_finds_the_end_whatever_the_split(chunks: list[bytes], cuts: list[int]) -> None:
    data = b"".join(frame(chunk) for chunk in chunks) + b"0\r\n\r\n"
    plain, collecting = ChunkScanner(), PieceScanner()
    for _ in range(2):  # one scanner serves many answers
        plain.start()
        collecting.start()
        collected = b""
        for piece in pieces_of(data, cuts):
            assert not plain.complete
            plain.feed(piece)
            collecting.feed(piece)
            collected += b"".join(collecting.take())
        assert plain.complete
        assert collecting.complete
        assert collected == b"".join(chunks)


@given(st.sampled_from([b"x", b"\r\n", b"\n", b"\r", b"HTTP/1.1 200 OK\r\n\r\n", b"0\r\n\r\n"]), st.integers(1, 12))
def test_a_scanner_refuses_bytes_after_the_end(behind: bytes, cut: int) -> None:
    data = b"2\r\nok\r\n0\r\n\r\n" + behind
    scanner = ChunkScanner()
    scanner.start()
    scanner.feed(data[:cut]) if cut < len(data) - len(behind) else None
    with pytest.raises(Malformed):
        scanner.feed(data[cut:] if cut < len(data) - len(behind) else data)


@pytest.mark.parametrize("data", [b"g\r\nx", b"2\r\nabc\r\n", b"2\nab\r\n", b"-1\r\n", b"2 \r\nab\r\n"])
def test_a_scanner_refuses_bad_framing(data: bytes) -> None:
    scanner = ChunkScanner()
    scanner.start()
    with pytest.raises(Malformed):
        scanner.feed(data + b"0\r\n\r\n")


def test_a_released_scanner_can_start_again() -> None:
    scanner = PieceScanner()
    scanner.start()
    scanner.release()
    scanner.start()
    scanner.feed(b"2\r\nok\r\n0\r\n\r\n")
    assert (scanner.complete, scanner.take()) == (True, [b"ok"])


# Tokens of a stream


def test_every_small_chunk_is_seen_to_be_whole() -> None:
    assert all(is_whole_chunk(frame(b"x" * size)) for size in range(1, 2000))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        LAST_CHUNK,
        frame(b"ok") + LAST_CHUNK,
        frame(b"ok") + frame(b"ok"),  # whole, but the scanner is faster
        frame(b"ok")[:-1],
        frame(b"ok")[:-2] + b"xx",
        b"A\r\n0123456789\r\n",  # large letters, zeros before it, more than a size: as good, but not for us to judge
        b"02\r\nok\r\n",
        b"2;a=b\r\nok\r\n",
        b"2\nok\r\n",
        b"+2\r\nok\r\n",
        frame(b"x" * 5000),
    ],
)
def test_what_is_not_plainly_one_whole_chunk_is_left_to_the_scanner(data: bytes) -> None:
    assert not is_whole_chunk(data)


@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=2),
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from(b"\r\n0123456789abfAF;x ")), max_size=3),
)
def test_a_chunk_taken_for_whole_is_so_for_the_scanner_too(chunks: list[bytes], spoiled: list[tuple[int, int]]) -> None:
    data = bytearray(b"".join(frame(chunk) for chunk in chunks))
    for at, byte in spoiled:
        data[at % len(data)] = byte
    if is_whole_chunk(bytes(data)):
        scanner = ChunkScanner()
        scanner.start()
        scanner.feed(bytes(data))
        assert not scanner.complete
        scanner.feed(LAST_CHUNK)
        assert scanner.complete
