"""Which files of models leave the controller's disk: those of deleted models, and the least recently used."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from corral.blobs.errors import NoSpace
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.controller.files.model_cache import ModelCacheLimits
from corral.store.tables import models
from tests.support.model_file_site import DIGEST, WEIGHTS, Site, listed, site

__all__ = ["site"]  # a fixture


def age(path: Path, seconds: float) -> None:
    os.utime(path, (path.stat().st_mtime - seconds,) * 2)


async def test_files_of_deleted_models_are_swept(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files()
    await files.ensure(definition)
    path = files.find(DIGEST)
    assert path is not None
    os.utime(path, (1, 1))
    await files.sweep()
    assert path.exists()
    async with site.store.write() as tx:
        await models.delete(tx, "m")
    await files.sweep()
    assert not path.exists()


async def test_a_cleanup_after_a_deletion_frees_the_space_at_once(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files()
    await files.ensure(definition)
    uploaded = await site.blobs.write("", lambda: iter([b"uploaded"]), ExpectedBlob(""), "a file without a model yet")
    assert await files.collect(dry_run=False) == []
    async with site.store.write() as tx:
        await models.delete(tx, "m")
    (dry,) = await files.collect(dry_run=True)
    assert (dry.files, dry.size_bytes) == (1, len(WEIGHTS))
    assert files.find(DIGEST) is not None
    assert await files.collect(dry_run=False) == [dry]
    assert files.find(DIGEST) is None
    assert uploaded.path.exists()


async def test_above_the_limit_the_file_not_requested_for_longest_goes_and_comes_back(site: Site) -> None:
    contents = {name: os.urandom(1000) for name in ("a", "b", "c")}
    definitions = {}
    for name, content in contents.items():
        uri = site.server.put(f"/{name}", content, etag=f'"{name}"')
        definitions[name] = await site.install(name=name, **listed((name, uri)))
    files = site.files(limits=ModelCacheLimits(max_bytes=2500))
    digests = {name: "sha256:" + hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    for name in ("a", "b"):
        await files.ensure(definitions[name])
    age(site.blobs.path(digests["a"]), 2000.0)
    age(site.blobs.path(digests["b"]), 3000.0)
    assert site.cache.find(digests["b"]) is not None  # a node requests it: `a` is the older one from now on
    await files.ensure(definitions["c"])
    assert [name for name in contents if site.blobs.find(digests[name])] == ["b", "c"]
    (again,) = await files.ensure(definitions["a"])
    assert again.digest == digests["a"]
    assert [name for name in contents if site.blobs.find(digests[name])] == ["a", "b", "c"], "all are in use: above it"
    for name in contents:
        age(site.blobs.path(digests[name]), 700.0 + ord(name))
    with site.blobs.hold(digests["c"]):
        await site.cache.run_once()
    assert [name for name in contents if site.blobs.find(digests[name])] == ["a", "c"], "the oldest one is held"


async def test_with_a_limit_a_full_disk_takes_files_that_can_be_fetched_again(site: Site) -> None:
    first, second = os.urandom(1000), os.urandom(1000)
    a = await site.install(name="a", **listed(("a", site.server.put("/a", first, etag='"a"'))))
    b = await site.install(name="b", **listed(("b", site.server.put("/b", second, etag='"b"'))))
    uploaded = f"upload://{hashlib.sha256(WEIGHTS).hexdigest()}/u.gguf"
    sha256 = {"sha256": hashlib.sha256(WEIGHTS).hexdigest()}
    u = await site.install(name="u", **listed(("u.gguf", uploaded), **sha256))
    await site.files().ensure(a)
    await site.blobs.write("u", lambda: iter([WEIGHTS]), ExpectedBlob(DIGEST), "u.gguf")
    for path in (site.blobs.path("sha256:" + hashlib.sha256(first).hexdigest()), site.blobs.path(DIGEST)):
        age(path, 2000.0)
    site.free = 500
    with pytest.raises(NoSpace):  # nobody allowed to remove files of models
        await site.files().ensure(b)
    site.measure = lambda: 500 + 1000 * (2 - len(site.blobs.list_()))
    files = site.files(limits=ModelCacheLimits(max_bytes=1 << 40))
    await files.ensure(b)
    assert not await files.are_here(a)
    assert await files.are_here(u), "an uploaded file has no other source"


async def test_a_file_that_the_worker_of_this_machine_has_too_is_not_counted(site: Site) -> None:
    definition = await site.install(**listed(("w", site.server.put("/w", WEIGHTS, etag='"1"'))))
    files = site.files(limits=ModelCacheLimits(max_bytes=10))
    await files.ensure(definition)
    path = site.blobs.path(DIGEST)
    age(path, 2000.0)
    os.link(path, site.folder / "worker")
    await site.cache.run_once()
    assert path.exists(), "its removal would free nothing"
    (site.folder / "worker").unlink()
    await site.cache.run_once()
    assert not path.exists()
