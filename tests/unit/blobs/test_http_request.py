"""Requests for blobs: what is read, what is not, and which bytes a range means."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.blobs.serving.http_request import ByteRange, MalformedRequest, RangeNotSatisfiable, choose_range, read_head

DIGEST = "sha256:" + "ab" * 32


def head(line: str, *fields: str) -> bytes:
    return "\r\n".join([line, *fields, "", ""]).encode("latin-1")


def test_a_request_for_a_blob() -> None:
    read = read_head(head(f"GET /blobs/{DIGEST} HTTP/1.1", "Host: x", "Authorization: Bearer t", "RANGE:bytes=5-"))
    assert (read.method, read.digest, read.keep_alive) == ("GET", DIGEST, True)
    assert (read.headers["authorization"], read.headers["range"]) == ("Bearer t", "bytes=5-")


@pytest.mark.parametrize(
    ("line", "fields", "keeps"),
    [
        ("GET / HTTP/1.1", (), True),
        ("GET / HTTP/1.1", ("Connection: close",), False),
        ("GET / HTTP/1.0", (), False),
    ],
)
def test_whether_the_connection_is_kept(line: str, fields: tuple[str, ...], keeps: bool) -> None:
    assert read_head(head(line, *fields)).keep_alive is keeps


@pytest.mark.parametrize("path", ["/", "/blobs/", "/blobs/sha256:zz", f"/blobs/../{DIGEST}", f"/other/{DIGEST}"])
def test_what_is_no_blob(path: str) -> None:
    assert read_head(head(f"GET {path} HTTP/1.1")).digest == ""


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: x\ny\r\n\r\n",
        b"GET / HTTP/1.1\r\nRange: bytes=0-\r\nRange: bytes=1-\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 3\r\n\r\n",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_what_is_not_read(data: bytes) -> None:
    with pytest.raises(MalformedRequest):
        read_head(data)


@pytest.mark.parametrize(
    ("asked", "size", "part"),
    [
        ("", 10, ByteRange(0, 10, 10)),
        ("bytes=0-", 10, ByteRange(0, 10, 10, whole=False)),
        ("bytes=4-", 10, ByteRange(4, 6, 10, whole=False)),
        ("bytes=4-4", 10, ByteRange(4, 1, 10, whole=False)),
        ("bytes=4-400", 10, ByteRange(4, 6, 10, whole=False)),
        ("bytes=-3", 10, ByteRange(7, 3, 10, whole=False)),
        ("bytes=-30", 10, ByteRange(0, 10, 10, whole=False)),
        ("bytes=10-", 10, RangeNotSatisfiable(10)),
        ("bytes=0-", 0, RangeNotSatisfiable(0)),
        ("bytes=-0", 10, RangeNotSatisfiable(10)),
        ("bytes=-", 10, ByteRange(0, 10, 10)),
        ("bytes=5-4", 10, ByteRange(0, 10, 10)),
        ("bytes=1-2,4-5", 10, ByteRange(0, 10, 10)),
        ("lines=1-2", 10, ByteRange(0, 10, 10)),
    ],
)
def test_which_bytes_a_range_means(asked: str, size: int, part: ByteRange | RangeNotSatisfiable) -> None:
    assert choose_range(asked, size) == part


def test_a_range_of_another_file_means_all_of_this_one() -> None:
    assert choose_range("bytes=4-", 10, condition='"a"', etag='"b"') == ByteRange(0, 10, 10)
    assert choose_range("bytes=4-", 10, condition='"b"', etag='"b"') == ByteRange(4, 6, 10, whole=False)


@given(st.text(max_size=30), st.integers(0, 2**60))
def test_a_part_lies_in_the_file(asked: str, size: int) -> None:
    match choose_range(f"bytes={asked}", size):
        case ByteRange(start, count):
            assert start >= 0
            assert count >= 0
            assert start + count <= size
        case RangeNotSatisfiable(told):
            assert told == size


@pytest.mark.parametrize("filler", [" ", "\t", " \t", "x ", "x:"])
def test_no_line_keeps_us_busy(filler: str) -> None:
    """Nobody has shown a token yet, and all threads of the controller wait while one looks at a pattern."""
    began = time.process_time()
    for end in ("", "\x01", "x"):
        line = "x:" + filler * (16_000 // len(filler)) + end
        with contextlib.suppress(MalformedRequest):
            read_head(f"GET /blobs/x HTTP/1.1\r\n{line}\r\n\r\n".encode())
    assert time.process_time() - began < 2
    assert read_head(b"GET / HTTP/1.1\r\nX: \t a b \t\r\n\r\n").headers == {"x": "a b"}
