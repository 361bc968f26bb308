"""User and password of URLs: hidden where people look, kept where they are stored."""

from __future__ import annotations

import time

import pytest

from corral.kit.errors import Invalid
from corral.kit.redact import is_redacted, redact_url_bytes, redact_urls, restore

SECRET = "https://me:s3cret@files.example/x.gguf"
SHOWN = "https://***@files.example/x.gguf"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (SECRET, SHOWN),
        ("https://token@host", "https://***@host"),
        ("https://me:p@ss@host/a@b", "https://***@host/a@b"),
        ("oci://me:pw@registry.example/x@sha256:abc", "oci://***@registry.example/x@sha256:abc"),
        ("oci://alpine@sha256:abc", "oci://alpine@sha256:abc"),
        ("github:org/repo/index.yaml@main", "github:org/repo/index.yaml@main"),
        ("huggingface://org/repo/file@main", "huggingface://org/repo/file@main"),
        ("https://host/path?mail=a@b and c@d", "https://host/path?mail=a@b and c@d"),
        ("see http://host, or write to me@host", "see http://host, or write to me@host"),
        ("https://me:pa/ss@host/x", "https://***@host/x"),
        ("https://me:/pass@host/x", "https://***@host/x"),
        ("https://me:a/b/12@host:8080/x?y", "https://***@host:8080/x?y"),
        ("https://me:pa?ss@host/x", "https://***@host/x"),
        ("https://me:pa#ss@host/x", "https://***@host/x"),
        ("https://me:p@:a/ss@host/x", "https://***@host/x"),
        ("https://me:1:2/3@host/x", "https://***@host/x"),
        ("https://me:123456/3@host/x", "https://***@host/x"),
        ("<a title=https://me:p&#39;w@host/x>", "<a title=https://***@host/x>"),
        ("oci://me:p/w@registry.example/x@sha256:abc", "oci://***@registry.example/x@sha256:abc"),
        ("oci://registry:5000/org/x:tag@sha256:abc", "oci://registry:5000/org/x:tag@sha256:abc"),
        ("https://host:8080/npm/@scope/x", "https://host:8080/npm/@scope/x"),
        ("https://me:pw@host:8080/npm/@scope/x", "https://***@host:8080/npm/@scope/x"),
        ("http://[::1]:8080/a@b", "http://[::1]:8080/a@b"),
        ("http://[fe80::1]/a@b", "http://[fe80::1]/a@b"),
        ('["http://host:port/x","a@b"]', '["http://host:port/x","a@b"]'),
        (f'{{"uri":"{SECRET}","to":"a@b"}}', f'{{"uri":"{SHOWN}","to":"a@b"}}'),
        ("https://host/x?token=SECRET", "https://host/x?token=***"),
        ("https://host/x.gguf?size=3&sig=a%2Fb==&v=2#part", "https://host/x.gguf?size=3&sig=***&v=2#part"),
        ("https://me:pw@host/x?api_key=SECRET&key=k", "https://***@host/x?api_key=***&key=***"),
        (
            "s3://b/x?X-Amz-Credential=c&X-Amz-Date=1&x-amz-signature=s",
            "s3://b/x?X-Amz-Credential=***&X-Amz-Date=1&x-amz-signature=***",
        ),
        ("<a title=https://host/x?v=1&amp;access_token=SECRET>", "<a title=https://host/x?v=1&amp;access_token=***>"),
        (
            '{"uri":"https://host/x?AWSAccessKeyId=a&Expires=1","b":1}',
            '{"uri":"https://host/x?AWSAccessKeyId=***&Expires=1","b":1}',
        ),
        ("GET https://host/x?token=SECRET failed; token=x", "GET https://host/x?token=*** failed; token=x"),
        ('<a href="/fleet/requests?key=laptop&model=m">', '<a href="/fleet/requests?key=laptop&model=m">'),
        (
            "https://host/x?max_tokens=3&monkey=4&keyword=5&token=",
            "https://host/x?max_tokens=3&monkey=4&keyword=5&token=",
        ),
        (f"cannot be read ({SECRET}): 404; {SECRET}", f"cannot be read ({SHOWN}): 404; {SHOWN}"),
    ],
)
def test_only_secrets_are_hidden(text: str, shown: str) -> None:
    assert redact_urls(text) == shown
    assert redact_url_bytes(text.encode()) == shown.encode()
    assert is_redacted(shown) is (shown != text)


def test_long_texts_take_no_longer_for_each_of_their_letters() -> None:
    """Backends write logs; a text that took the square of its length would hold up the controller."""
    for piece in ("://a:b/", "://a:b@", "://a:b@/", "@", "://[:", "://a", "://?", "?token=", "://a?&token="):
        text = "@ ? " + piece * (100_000 // len(piece))
        began = time.process_time()
        redact_urls(text)
        assert time.process_time() - began < 5, piece


def test_what_was_shown_and_comes_back_is_what_was_stored() -> None:
    stored = {"files": [{"uri": SECRET}, {"uri": "https://a:b@c/d"}], "size": 1}
    shown = {"files": [{"uri": SHOWN}, {"uri": "https://***@c/d"}, {"uri": "https://plain"}], "size": 2}
    assert restore(shown, stored) == {
        "files": [{"uri": SECRET}, {"uri": "https://a:b@c/d"}, {"uri": "https://plain"}],
        "size": 2,
    }
    signed = "https://h/x?v=1&sig=abc"
    assert restore({"uri": "https://h/x?v=1&sig=***", "b": 2}, {"uri": signed}) == {"uri": signed, "b": 2}
    plain = {"uri": "https://other"}
    assert restore(plain, stored) is plain


@pytest.mark.parametrize(
    "stored", [{}, {"uri": "https://x/y"}, {"a": SECRET, "b": "https://me:other@files.example/x.gguf"}]
)
def test_stars_that_stand_for_nothing_are_refused(stored: dict[str, str]) -> None:
    with pytest.raises(Invalid, match="write them in place of the stars"):
        restore({"uri": SHOWN}, stored)
