"""URI forms (docs/reference/wire/gallery.md#uri-forms), in their own words."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.codec import decode, encode
from corral.contract.sources import (
    ImageIndex,
    PlatformImage,
    Source,
    TextFile,
    Wheel,
    is_safe_path,
    parse_reference,
    parse_requirement,
    parse_uri,
    public_source,
)
from corral.kit.errors import Invalid

HASH = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "kind", "uri"),
    [
        ("oci://registry.example/a/b:1", "oci", "registry.example/a/b:1"),
        ("oci://localhost:5000/a:1", "oci", "localhost:5000/a:1"),
        ("quay.io/go-skynet/local-ai-backends:latest-cpu-x", "oci", "quay.io/go-skynet/local-ai-backends:latest-cpu-x"),
        ("ghcr.io/a/b", "oci", "ghcr.io/a/b:latest"),
        ("docker.io/ubuntu:24.04", "oci", "docker.io/library/ubuntu:24.04"),
        ("https://example.com/a.tar.gz", "http", "https://example.com/a.tar.gz"),
        ("http://example.com/a.tar.gz", "http", "http://example.com/a.tar.gz"),
        ("file:///srv/b%20c.tar", "file", "/srv/b c.tar"),
        ("ocifile:///srv/image.tar", "ocifile", "/srv/image.tar"),
        ("/srv/backends/mock", "directory", "/srv/backends/mock"),
        ("./mock", "directory", "./mock"),
        ("pypi://XLlama_cpp==1.2", "pypi", "xllama-cpp==1.2"),
        ("pypi://vllm[audio, video]", "pypi", "vllm[audio,video]"),
        ("github:o/r/dir/f.tar@v1", "http", "https://raw.githubusercontent.com/o/r/v1/dir/f.tar"),
        ("github://o/r/f.tar", "http", "https://raw.githubusercontent.com/o/r/main/f.tar"),
        ("huggingface://o/r/d/f.bin", "http", "https://huggingface.co/o/r/resolve/main/d/f.bin"),
        ("hf://o/r/f.bin@rev", "http", "https://huggingface.co/o/r/resolve/rev/f.bin"),
        ("hf.co/o/r@rev/f.bin", "http", "https://huggingface.co/o/r/resolve/rev/f.bin"),
    ],
)
def test_what_the_forms_mean(text: str, kind: str, uri: str) -> None:
    source = parse_uri(text)
    assert (source.kind, source.uri, source.digest) == (kind, uri, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "llama-cpp",
        "localai/localai-backends:latest-cpu",
        "ollama://llama3",
        "file://relative/path",
        "oci://",
        "oci://UPPER/case",
        "oci://host/a b",
        "oci://host/a@sha256:short",
        "pypi://",
        "pypi://name>=1",
        "pypi://name @ https://example.com/x.whl",
        "pypi://--index-url",
        "github:only/two",
        "hf://owner/repo",
        "ftp://example.com/a",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_uri(text)


def test_a_mirror_of_an_image_needs_no_host() -> None:
    source = parse_uri("localai/localai-backends:latest-cpu", image=True)
    assert (source.kind, source.uri) == ("oci", "docker.io/localai/localai-backends:latest-cpu")


def test_a_pinned_reference_carries_its_digest() -> None:
    source = parse_uri(f"oci://registry.example/a/b@{HASH}")
    assert source.digest == HASH
    assert source.uri == f"registry.example/a/b@{HASH}"
    assert parse_reference(source.uri).tag == ""


def test_a_first_part_is_a_host_only_if_it_looks_like_one() -> None:
    assert parse_reference("org/name:1").host == "docker.io"
    assert parse_reference("org/name:1").repository == "org/name"
    assert parse_reference("localhost/name").host == "localhost"
    assert parse_reference("host:5000/name").host == "host:5000"


@given(st.text(max_size=80))
def test_no_text_raises_anything_but_invalid(text: str) -> None:
    with contextlib.suppress(Invalid):
        parse_uri(text)
    with contextlib.suppress(Invalid):
        parse_uri(text, image=True)
    with contextlib.suppress(Invalid):
        parse_requirement(text)


@given(st.from_regex(r"[a-z0-9]{1,5}(/[a-z0-9]{1,5}){0,3}(:[A-Za-z0-9]{1,5})?", fullmatch=True))
def test_a_reference_reads_back_as_itself(text: str) -> None:
    once = parse_reference(text)
    assert parse_reference(str(once)) == once


@pytest.mark.parametrize("path", ["serve.py", "a/b.txt", "a/..b"])
def test_paths_inside(path: str) -> None:
    assert is_safe_path(path)


@pytest.mark.parametrize("path", ["", ".", "/etc/passwd", "..", "a/../../b", "a\\b", "a/\x00", "a\n"])
def test_paths_that_lead_out(path: str) -> None:
    assert not is_safe_path(path)


def test_a_source_on_the_wire() -> None:
    source = Source(
        kind="pypi",
        uri="demo==1",
        digest=HASH,
        wheels=(Wheel("demo-1-py3-none-any.whl", "https://i/demo-1-py3-none-any.whl", "b" * 64, 3, "demo", "1"),),
        python="3.11",
        files=(TextFile("serve.py", "print()"),),
    )
    wire = encode(source)
    assert wire == (
        b'{"kind":"pypi","uri":"demo==1","digest":"' + HASH.encode() + b'","wheels":[{"name":"demo-1-py3-none-any.whl",'
        b'"url":"https://i/demo-1-py3-none-any.whl","sha256":"' + b"b" * 64 + b'","size":3,"project":"demo",'
        b'"version":"1"}],"python":"3.11","files":[{"path":"serve.py","text":"print()"}]}'
    )
    assert decode(Source, wire) == source
    assert decode(Source, b'{"kind":"oci","uri":"h/p:1","from_the_future":1}') == Source("oci", "h/p:1")


def test_a_variant_in_an_index_does_not_matter() -> None:
    index = ImageIndex(HASH, (PlatformImage("linux/amd64", "d1"), PlatformImage("linux/arm64/v8", "d2")))
    arm = index.find("linux/arm64")
    assert arm is not None
    assert arm.digest == "d2"
    assert index.find("linux/arm") is None
    assert index.find("darwin/arm64") is None


def test_workers_get_no_logins() -> None:
    login = "https://ann:s3cret@files.example/x?y=1"
    wheel = Wheel("a-1-py3-none-any.whl", "https://t0ken@index.example/a.whl", "0" * 64)
    assert public_source(Source("http", login)).uri == "https://files.example/x?y=1"
    assert public_source(Source("pypi", "a==1", wheels=(wheel,))).wheels[0].url == "https://index.example/a.whl"
    image = Source("oci", "host/x@sha256:" + "0" * 64)
    assert public_source(image) == image
