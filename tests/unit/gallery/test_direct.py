"""Installs from a URI of somebody's own (docs/reference/wire/gallery.md#direct-installs)."""

from __future__ import annotations

import pytest

from corral.gallery.backends.direct import direct_entry, why_not_for_localai
from corral.kit.errors import Invalid


@pytest.mark.parametrize(
    ("uri", "name", "expected"),
    [
        ("/srv/backends/mock", "", "mock"),
        ("/srv/backends/mock/", "", "mock"),
        ("/srv/backends/mock", "other", "other"),
        ("ocifile:///srv/images/voice.tar", "", "voice"),
        ("file:///srv/voice.tar.gz", "", "voice"),
        ("/srv/voice.tar.gz", "", "voice"),
        ("https://example.com/d/voice-1.2.tar.zst?x=1", "", "voice-1.2"),
        ("oci://r.example/a/b:1", "mine", "mine"),
    ],
)
def test_names(uri: str, name: str, expected: str) -> None:
    entry = direct_entry(uri, name=name, alias="short")
    assert (entry.name, entry.alias, entry.uri) == (expected, "short", uri)
    assert entry.gallery.url == ""


@pytest.mark.parametrize(
    ("uri", "name", "alias", "word"),
    [
        ("oci://r.example/a/b:1", "", "", "needs a name"),
        ("quay.io/a/b:1", "", "", "needs a name"),
        ("/", "", "", "needs a name"),
        ("https://example.com", "", "", "needs a name"),
        ("llama-cpp", "", "", "not a source"),
        ("https://exa mple/x.tgz", "mine", "", "not a URL"),
        ("http://[::bad/x.tgz", "mine", "", "not a URL"),
        ("https:///x.tgz", "mine", "", "not a URL"),
        ("http://host:0/x.tgz", "mine", "", "not a URL"),
        ("http://host:port/x.tgz", "mine", "", "not a URL"),
        ("/srv/x", "../x", "", "folder"),
        ("/srv/x", "", "a/b", "folder"),
        ("pypi://vllm", "vllm", "", "manifest"),
    ],
)
def test_what_is_missing_is_said(uri: str, name: str, alias: str, word: str) -> None:
    with pytest.raises(Invalid, match=word):
        direct_entry(uri, name=name, alias=alias)


@pytest.mark.parametrize("uri", ["oci://r.example/a/b:1", "quay.io/a/b:1", "ocifile:///srv/image.tar", "/srv/voice"])
def test_what_a_localai_worker_can_be_sent(uri: str) -> None:
    assert why_not_for_localai(uri) == ""


@pytest.mark.parametrize("uri", ["file:///srv/voice.tar.gz", "/srv/voice.tar.gz", "https://example.com/voice.tgz"])
def test_archives_have_no_wire_form_for_a_localai_worker(uri: str) -> None:
    assert uri in why_not_for_localai(uri)
