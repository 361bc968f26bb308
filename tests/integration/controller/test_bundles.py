"""Loaded bundles of a controller: kept on the disk, and served without any origin."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from corral.blobs.sources.python_environment import WheelTools
from corral.blobs.store import BlobStore
from corral.blobs.upload import Uploads
from corral.contract.bundles import (
    FORMAT,
    BundledBackend,
    BundledBlob,
    BundledBuild,
    BundledFile,
    BundledModel,
    BundleManifest,
    write_manifest,
)
from corral.contract.sources import Source, Wheel
from corral.controller.backends.catalogue import MachineKind
from corral.controller.bundles.library import Bundles
from corral.kit.clock import SystemClock
from corral.kit.errors import Invalid, NotFound
from corral.store.records import BackendRequest
from tests.integration.blobs.test_python_environment import ENGINE, HELPER, WITH_UV
from tests.support.artifact_fleet import open_site

WEIGHTS = os.urandom(5000)
KIND = MachineKind("default", "linux/amd64", "3.11")


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def a_manifest(*contents: bytes, source: Source | None = None) -> BundleManifest:
    """A model with the first content as its file, and a backend with the others as its wheels."""
    first, *others = contents
    file = BundledFile("w.bin", "https://host/w.bin", "https://host/w.bin", digest_of(first), len(first))
    build = BundledBuild(
        capability="default",
        platform="linux/amd64",
        variant="engine-build",
        alias="engine",
        source=source or Source("pypi", "engine==1.0", "sha256:" + "0" * 64),
        listed_digest="sha256:" + "0" * 64,
        content_digest="sha256:" + "1" * 64,
        blobs=tuple(map(digest_of, others)),
    )
    return BundleManifest(
        FORMAT,
        "1",
        (BundledBackend("engine", builds=(build,)),),
        (BundledModel("m", "farm@m", {"name": "m", "description": "of a bundle"}, (file,)),),
        (),
        tuple(BundledBlob(digest_of(content), len(content)) for content in sorted(contents, key=digest_of)),
    )


async def upload(bundles: Bundles, contents: Sequence[bytes]) -> None:
    uploads = Uploads(bundles.blobs)
    for content in contents:
        await uploads.append(digest_of(content), 0, len(content), content)


@pytest.fixture
def bundles(tmp_path: Path) -> Bundles:
    return Bundles(tmp_path / "bundles", SystemClock())


async def test_a_loaded_bundle_survives_a_restart_and_is_removed(bundles: Bundles, tmp_path: Path) -> None:
    document = write_manifest(a_manifest(WEIGHTS))
    with pytest.raises(NotFound, match="was not uploaded"):
        await bundles.load(document)
    assert bundles.list_() == []
    await upload(bundles, [WEIGHTS])
    loaded = await bundles.load(document)
    assert (await bundles.load(document)).digest == loaded.digest, "loading it again changes nothing"
    again = Bundles(tmp_path / "bundles", SystemClock())
    assert [each.digest for each in again.list_()] == [loaded.digest]
    entry = again.find_model("M")
    assert entry is not None
    assert (entry.id, entry.description) == ("bundle@m", "of a bundle")
    assert again.find_model("farm@m") == again.find_model("bundle@m") == entry
    assert again.find_model("other@m") is None
    await again.remove(loaded.digest[:20])
    assert again.blobs.find(digest_of(WEIGHTS)) is None
    assert Bundles(tmp_path / "bundles", SystemClock()).list_() == []
    with pytest.raises(NotFound, match="there is no bundle"):
        await again.remove(loaded.digest)


async def test_a_blob_of_another_size_is_refused(bundles: Bundles) -> None:
    manifest = a_manifest(WEIGHTS)
    wrong = msgspec.structs.replace(manifest, blobs=(BundledBlob(digest_of(WEIGHTS), 7),))
    await upload(bundles, [WEIGHTS])
    with pytest.raises(Invalid, match="gives 7 bytes"):
        await bundles.load(write_manifest(wrong))
    assert bundles.list_() == []


async def test_blobs_of_two_bundles_go_with_the_last_one(bundles: Bundles) -> None:
    one, two = a_manifest(WEIGHTS), msgspec.structs.replace(a_manifest(WEIGHTS), corral="2")
    await upload(bundles, [WEIGHTS])
    first, second = await bundles.load(write_manifest(one)), await bundles.load(write_manifest(two))
    assert [each.digest for each in bundles.list_()] == [second.digest, first.digest]
    await bundles.remove(second.digest)
    assert bundles.blobs.find(digest_of(WEIGHTS)) is not None
    await bundles.remove(first.digest)
    assert bundles.blobs.find(digest_of(WEIGHTS)) is None


async def test_what_was_uploaded_for_no_bundle_goes_after_a_day(bundles: Bundles) -> None:
    await upload(bundles, [WEIGHTS, b"left behind"])
    await bundles.load(write_manifest(a_manifest(WEIGHTS)))
    old = time.time() - 2 * 86400
    for content in (WEIGHTS, b"left behind"):
        os.utime(bundles.blobs.path(digest_of(content)), (old, old))
    await bundles.sweep()
    assert [blob.digest for blob in bundles.blobs.list_()] == [digest_of(WEIGHTS)]


async def test_a_damaged_manifest_is_ignored_at_the_start(bundles: Bundles, tmp_path: Path) -> None:
    await upload(bundles, [WEIGHTS])
    loaded = await bundles.load(write_manifest(a_manifest(WEIGHTS)))
    path = tmp_path / "bundles" / "manifests" / loaded.digest.removeprefix("sha256:")
    path.write_bytes(path.read_bytes() + b" ")
    assert Bundles(tmp_path / "bundles", SystemClock()).list_() == []


async def test_other_stores_link_its_blobs_and_find_them_again(bundles: Bundles, tmp_path: Path) -> None:
    await upload(bundles, [WEIGHTS])
    digest = digest_of(WEIGHTS)
    store = BlobStore(tmp_path / "blobs", base=bundles.blobs)
    blob = store.find(digest)
    assert blob is not None
    assert blob.path.samefile(bundles.blobs.path(digest))
    assert blob.path.parent == tmp_path / "blobs" / "sha256"
    store.discard(digest)
    assert bundles.blobs.find(digest) is not None
    assert store.get(digest).path.read_bytes() == WEIGHTS
    bundles.blobs.discard(digest)
    assert store.get(digest).path.read_bytes() == WEIGHTS, "what was linked stays"


async def test_a_damaged_blob_of_a_bundle_is_removed_in_both_stores(bundles: Bundles, tmp_path: Path) -> None:
    await upload(bundles, [WEIGHTS])
    digest = digest_of(WEIGHTS)
    store = BlobStore(tmp_path / "blobs", base=bundles.blobs)
    path = store.get(digest).path
    path.write_bytes(b"damaged")
    assert not await store.verify(digest)
    assert store.find(digest) is None


async def test_wheels_of_a_bundle_make_an_environment_without_an_index(bundles: Bundles, tmp_path: Path) -> None:
    names = {"engine-1.0-py3-none-any.whl": ENGINE, "helper-2.1+cpu-py3-none-any.whl": HELPER}
    wheels = tuple(
        Wheel(name, f"http://127.0.0.1:9/{name}", digest_of(data).removeprefix("sha256:"), len(data))
        for name, data in names.items()
    )
    source = Source("pypi", "engine==1.0", "sha256:" + "0" * 64, wheels=wheels)
    await upload(bundles, [WEIGHTS, ENGINE, HELPER])
    await bundles.load(write_manifest(a_manifest(WEIGHTS, ENGINE, HELPER, source=source)))
    build = bundles.find_build(BackendRequest("engine"), KIND)
    assert build is not None
    assert build.variant == "engine-build"
    assert bundles.aliases(["engine-build"]) == {"engine-build": "engine"}
    entry = bundles.find_entry(BackendRequest("Engine"))
    assert entry is not None
    assert entry.request == BackendRequest("engine")
    (listed,) = bundles.list_entries()
    assert (listed["name"], listed["id"]) == ("engine", "bundle@engine")
    named = bundles.find_entry(BackendRequest("engine", gallery="bundle"))
    assert named == entry, "the name of the list is not kept: the bundle may be removed"
    assert bundles.find_variant("engine-build", KIND) == build
    assert bundles.find_variant("engine", KIND) is None
    async with open_site(tmp_path, bundles=bundles) as site:
        (ordered,) = build.sources
        await site.order("barn", ordered)
        async with site.worker("barn") as worker:
            worker.context = replace(worker.context, wheel_tools=WheelTools(WITH_UV, timeout_s=55))
            await worker.install(ordered)
            assert (worker.folder / "installed" / "venv" / "bin" / "engine-serve").is_file()
