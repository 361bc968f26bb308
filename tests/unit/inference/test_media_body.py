"""Media in a body: base64 and data URLs are decoded, everything else is refused by the name of its field."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.inference.api_errors import ApiError
from corral.inference.openai.forms import FormBody
from corral.inference.openai.json_body import JsonBody
from corral.inference.openai.media_body import MediaBody, decode_media, extension_by_content
from corral.inference.request_files import LocalFolder

texts = st.one_of(st.text(max_size=12), st.sampled_from(["1", "-2", "1e400", "nan", "true", "1,2", "aGk="]))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("aGk=", b"hi"),
        ("data:image/png;base64,aGk=", b"hi"),
        ("data:;base64,aGk=", b"hi"),
        ("data:audio/wav;codecs=1;base64,aGk=", b"hi"),
        ("/9j/", b"\xff\xd8\xff"),  # a photo, not a path
    ],
)
async def test_what_is_decoded(text: str, content: bytes) -> None:
    assert await decode_media(text, "image") == content


@pytest.mark.parametrize(
    "text",
    [
        *("", "%", "aGk", "a Gk=", "data:image/png;base64,", "data:image/png,aGk=", "data:image/png;base64"),
        *("http://localhost/x", "HTTPS://example.com", "file:///etc/passwd", "/etc/passwd", "../x"),
    ],
)
async def test_what_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        await decode_media(text, "image")
    assert (refused.value.status, refused.value.param) == (400, "image")


async def test_files_of_a_request(tmp_path: Path) -> None:
    body = MediaBody(JsonBody({"image": ["aGk=", {"image_url": "data:;base64,aG8="}]}), LocalFolder(tmp_path, None))
    assert [path.name for path in await body.local_files("image")] == ["image-json-0.bin", "image-json-1.bin"]
    assert {path.read_bytes() for path in tmp_path.glob("image-*")} == {b"hi", b"ho"}  # noqa: ASYNC240
    assert await body.file("mask") == ""
    with pytest.raises(ApiError, match="mask is missing"):
        await body.required_file("mask")
    with pytest.raises(ApiError, match="more than 1 file"):
        await body.file("image")


@given(st.dictionaries(st.sampled_from(["a", "a[]", "a[b]", "a[", "a]"]), st.lists(texts, min_size=1, max_size=3)))
def test_fields_of_a_form_are_read_or_refused(fields: dict[str, list[str]]) -> None:
    form = FormBody(fields)
    reads: list[Any] = [form.text, form.texts, form.flag, form.number, form.whole, form.numbers, form.mapping]
    for read in reads:
        with contextlib.suppress(ApiError):
            read("a")


@pytest.mark.parametrize(
    ("content", "extension"),
    [
        (b"\x89PNG..", ".png"),
        (b"RIFF....WAVEfmt ", ".wav"),
        (b"RIFF....WEBPVP8 ", ".webp"),
        (b"....ftypmp42", ".mp4"),
        (b"text", ".bin"),
        (b"", ".bin"),
    ],
)
def test_the_extension_by_which_engines_know_a_format(content: bytes, extension: str) -> None:
    assert extension_by_content(content) == extension
