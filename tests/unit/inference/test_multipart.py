"""Forms as they come over the wire: the same, however they are cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.inference.api_errors import ApiError
from corral.inference.openai.multipart import FormPart, FormReader, boundary_of
from corral.inference.request_files import extension_of

BOUNDARY = b"b0undary"


def written(parts: Sequence[tuple[str, str | None, bytes]], *, preamble: bytes = b"", epilogue: bytes = b"") -> bytes:
    out = preamble
    for name, filename, content in parts:
        more = f'; filename="{filename}"' if filename is not None else ""
        head = f'content-disposition: form-data; name="{name}"{more}'.encode()
        out += b"--" + BOUNDARY + b"\r\n" + head + b"\r\n\r\n" + content + b"\r\n"
    return out + b"--" + BOUNDARY + b"--\r\n" + epilogue


def read(pieces: Sequence[bytes]) -> list[tuple[str, str | None, bytes]]:
    reader = FormReader(BOUNDARY)
    found: list[tuple[str, str | None, bytes]] = []
    for piece in pieces:
        for event in reader.feed(piece):
            if isinstance(event, FormPart):
                found.append((event.name, event.filename, b""))
            else:
                name, filename, content = found[-1]
                found[-1] = name, filename, content + event
    reader.close()
    return found


def cut(body: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted(place % (len(body) + 1) for place in places)
    return [body[start:end] for start, end in zip([0, *ends], [*ends, len(body)], strict=True)]


# Made of what a boundary is made of, so that halves of one are common.
contents = st.lists(st.sampled_from([b"\r\n", b"--", b"\r", b"-", b"b0und", b"x", b"\n"]), max_size=12).map(b"".join)
parts = st.lists(st.tuples(st.sampled_from(["file", "model", "a b"]), st.sampled_from([None, "x.wav"]), contents))


@given(parts, st.lists(st.integers(0, 10_000), max_size=8))
def test_however_it_is_cut(told: list[tuple[str, str | None, bytes]], places: list[int]) -> None:
    body = written(told, preamble=b"nobody's\r\n", epilogue=b"nor this")
    assert read(cut(body, places)) == told
    assert read([body[at : at + 1] for at in range(len(body))]) == told


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b0undary\r\n",
        written([("a", None, b"x")])[:-6],
        b"--b0undary\r\n\r\nx\r\n--b0undary--",
        b"--b0undary\r\ncontent-disposition: attachment; name=x\r\n\r\nx\r\n--b0undary--",
        b"--b0undary junk\r\ncontent-disposition: form-data; name=x\r\n\r\nx\r\n--b0undary--",
        b"--b0undary\r\nx: " + b"y" * 20_000,
        written([("a", None, b"")] * 129),
    ],
)
def test_forms_that_are_malformed(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read([body])
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("told", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'Multipart/Form-Data; charset=utf-8; boundary="a b"', b"a b"),
        (b"multipart/form-data", None),
        (b"multipart/mixed; boundary=abc", None),
        (b"application/json", None),
        (b"", None),
        (b"multipart/form-data; boundary=" + b"x" * 71, None),
    ],
)
def test_boundaries(told: bytes, boundary: bytes | None) -> None:
    if boundary is not None:
        assert boundary_of(told) == boundary
    else:
        with pytest.raises(ApiError):
            boundary_of(told)


@pytest.mark.parametrize(
    ("name", "extension"),
    [("a.wav", ".wav"), ("../../x.MP3", ".mp3"), ("x", ".bin"), (None, ".bin"), ("x./../y", ".bin"), ("x.a b", ".bin")],
)
def test_of_a_file_name_only_its_ending_counts(name: str | None, extension: str) -> None:
    assert extension_of(name) == extension
