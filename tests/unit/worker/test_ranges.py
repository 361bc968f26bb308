"""Ranges of uploads: what a client may send, and what becomes of the bytes that are there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.blobs.serving.http_request import RangeNotSatisfiable, choose_range
from corral.worker.localai.ranges import (
    AppendBytes,
    DropBytes,
    FinishUpload,
    OtherUpload,
    PartialState,
    UploadRange,
    UploadStep,
    WrongOffset,
    decide_upload,
    parse_content_range,
    parse_sha256,
)

A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes 0-9/10", UploadRange(0, 9, 10)),
        ("bytes 5-5/10", UploadRange(5, 5, 10)),
        (" bytes 0-0/1 ", UploadRange(0, 0, 1)),
        ("bytes 0-10/10", None),
        ("bytes 6-5/10", None),
        ("bytes */10", None),
        ("bytes 0-9/*", None),
        ("bytes -1-9/10", None),
        ("bytes 0-9", None),
        ("bytes=0-9/10", None),
        ("bytes 0-9/10, 3-4/10", None),
        ("bytes 0 - 9/10", None),
        ("bytes ٠-٩/١٠", None),
        ("bytes 0-9/" + "9" * 40, None),
        ("", None),
    ],
)
def test_content_range(text: str, expected: UploadRange | None) -> None:
    assert parse_content_range(text) == expected


@given(st.integers(0, 10**17), st.integers(0, 10**6), st.integers(0, 10**6))
def test_every_valid_content_range_is_read(start: int, more: int, rest: int) -> None:
    span = parse_content_range(f"bytes {start}-{start + more}/{start + more + 1 + rest}")
    assert span is not None
    assert span.length == more + 1


@given(st.text(max_size=60))
def test_no_text_breaks_the_parsers(text: str) -> None:
    span = parse_content_range(text)
    assert span is None or 0 <= span.start <= span.end < span.total
    part = choose_range(text, 100)
    assert isinstance(part, RangeNotSatisfiable) or 0 <= part.start < part.start + part.count <= 100
    digest = parse_sha256(text)
    assert digest is None or len(digest) in (0, 64)


def test_a_hash_is_read_in_any_case() -> None:
    assert parse_sha256(" " + A.upper() + "\n") == A
    assert parse_sha256("") == ""
    for wrong in ("a", A[:-1], A + "a", "g" * 64):
        assert parse_sha256(wrong) is None


@pytest.mark.parametrize(
    ("span", "declared", "partial", "expected"),
    [
        # From the beginning.
        ((0, 9, 10), A, None, DropBytes()),
        ((0, 9, 10), A, PartialState(0, B, 10), DropBytes()),
        ((0, 9, 10), A, PartialState(4, B, 10), DropBytes()),
        ((0, 9, 10), A, PartialState(4), DropBytes()),
        ((0, 9, 10), "", PartialState(4, A, 10), DropBytes()),
        ((0, 9, 10), "", PartialState(4), DropBytes()),
        ((0, 9, 10), A, PartialState(4, A, 10), WrongOffset(4)),
        ((0, 9, 10), A, PartialState(10, A, 10), FinishUpload()),
        ((0, 9, 10), A, PartialState(11, A, 10), FinishUpload()),
        # Further on.
        ((4, 9, 10), A, PartialState(4, A, 10), AppendBytes()),
        ((4, 9, 10), A, PartialState(4), AppendBytes()),
        ((4, 9, 10), "", PartialState(4), AppendBytes()),
        ((4, 9, 10), A, PartialState(4, B, 10), OtherUpload()),
        ((4, 9, 10), "", PartialState(4, B, 10), OtherUpload()),
        ((4, 9, 10), "", PartialState(4, "", 11), OtherUpload()),
        ((4, 9, 10), A, PartialState(3, A, 10), WrongOffset(3)),
        ((4, 9, 10), A, PartialState(5, A, 10), WrongOffset(5)),
        ((4, 9, 10), A, None, WrongOffset(0)),
    ],
)
def test_what_an_upload_does_with_the_bytes_that_are_there(
    span: tuple[int, int, int], declared: str, partial: PartialState | None, expected: UploadStep
) -> None:
    assert decide_upload(UploadRange(*span), declared, partial) == expected
