"""Manifests of bundles: equal content has equal bytes, and a manifest that contradicts itself is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from corral.contract.bundles import (
    FORMAT,
    MAX_DOCUMENT_BYTES,
    BundledBackend,
    BundledBlob,
    BundledBuild,
    BundledFile,
    BundledModel,
    BundledPackages,
    BundleManifest,
    digest_of_bundle,
    read_manifest,
    view_of,
    write_manifest,
)
from corral.contract.sources import Source, Wheel
from corral.kit.errors import Invalid

LAYER, WEIGHTS, WHEEL = (f"sha256:{letter * 64}" for letter in "abc")
BUILD = BundledBuild(
    capability="default",
    platform="linux/amd64",
    variant="cpu-engine",
    source=Source("oci", "host/engine:1", LAYER),
    listed_digest=LAYER,
    content_digest=LAYER,
    blobs=(LAYER, LAYER),
)
MODEL = BundledModel("m", "farm@m", {"name": "m", "backend": "engine"}, (BundledFile("w", "u", "u", WEIGHTS, 7),))
PACKAGES = BundledPackages("linux/amd64", "3.12", "d" * 64, Source("pypi", "x", wheels=(Wheel("w", "u", "c" * 64),)))
MANIFEST = BundleManifest(
    FORMAT,
    "1.0",
    (BundledBackend("engine", builds=(BUILD,)),),
    (MODEL,),
    (PACKAGES,),
    (BundledBlob(LAYER, 5), BundledBlob(WEIGHTS, 7), BundledBlob(WHEEL, 3)),
)


def test_what_was_written_is_read() -> None:
    assert read_manifest(write_manifest(MANIFEST)) == MANIFEST


def test_equal_content_has_an_equal_digest() -> None:
    turned = msgspec.structs.replace(MODEL, definition={"backend": "engine", "name": "m"})
    other = msgspec.structs.replace(MANIFEST, models=(turned,))
    assert write_manifest(other) == write_manifest(MANIFEST)
    newer = msgspec.structs.replace(MANIFEST, corral="1.1")
    assert digest_of_bundle(write_manifest(newer)) != digest_of_bundle(write_manifest(MANIFEST))


def test_a_view_counts_each_layer_once() -> None:
    view = view_of(MANIFEST, "sha256:x")
    assert view.size_bytes == 15
    assert [(each.name, each.machine, each.size_bytes) for each in view.backends] == [
        ("engine", "linux/amd64, default", 5)
    ]
    assert [(each.name, each.files, each.size_bytes) for each in view.models] == [("m", 1, 7)]
    assert view.packages == ("linux/amd64, Python 3.12",)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"format": FORMAT + 1}, "create it again with this version"),
        ({"blobs": MANIFEST.blobs[:2]}, "contradicts itself"),
        ({"blobs": (*MANIFEST.blobs, BundledBlob("sha256:" + "d" * 64, 1))}, "contradicts itself"),
        ({"blobs": (*MANIFEST.blobs, MANIFEST.blobs[0])}, "twice"),
        ({"blobs": (BundledBlob("../../etc", 1),)}, "names a blob"),
        ({"blobs": (BundledBlob(LAYER, -1),)}, "names a blob"),
        ({"blobs": (BundledBlob(LAYER, 1 << 60),)}, "names a blob"),
        ({"models": (msgspec.structs.replace(MODEL, name="../m"),)}, "cannot be a model's name"),
        ({"models": (msgspec.structs.replace(MODEL, name="n"),)}, "has a definition of 'm' for 'n'"),
        ({"backends": (msgspec.structs.replace(MANIFEST.backends[0], name=""),)}, "without a name"),
    ],
)
def test_what_contradicts_itself_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        read_manifest(write_manifest(msgspec.structs.replace(MANIFEST, **changed)))


@pytest.mark.parametrize("document", [b"", b"null", b"[]", b"{", b"\xff", b'{"format":"1"}', b'{"format":1,"blobs":7}'])
def test_what_is_no_manifest_is_refused(document: bytes) -> None:
    with pytest.raises(Invalid):
        read_manifest(document)


def test_a_huge_manifest_is_refused() -> None:
    with pytest.raises(Invalid, match="are allowed"):
        read_manifest(b" " * (MAX_DOCUMENT_BYTES + 1))
