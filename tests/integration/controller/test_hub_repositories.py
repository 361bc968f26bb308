"""Whole repositories of the hub as a model's files: listed, chosen from, fetched as they lie there, and pinned."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corral.blobs.disk import DiskSpace
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher, FetchLimits
from corral.blobs.transfer.remote import open_session
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition, read_definition
from corral.controller.access.signing import open_ingress_tokens
from corral.controller.files.blob_listener import ControllerBlobUrls
from corral.controller.files.file_resolver import FileResolver, ResolverSettings
from corral.controller.files.hubs.hub import HubSettings
from corral.controller.files.model_files import FileRetention, ModelFiles
from corral.kit.clock import SystemClock
from corral.kit.errors import Denied, NotFound
from corral.store import Store, open_store
from corral.store.tables import models
from corral.store.tables.models import StoredModel
from tests.support.hub import FakeHub, Repository
from tests.support.sqlite import sqlite_url

WEIGHTS = os.urandom(300_000)
FILES = {
    ".gitattributes": b"* text",
    "README.md": b"# A model",
    "config.json": b'{"model_type": "tiny"}',
    "empty.txt": b"",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
    "onnx/model.onnx": WEIGHTS[:5000],
    "with space/añ@b.txt": b"odd",
}


@dataclass
class Site:
    folder: Path
    store: Store
    session: aiohttp.ClientSession
    hub: FakeHub
    token: str = ""

    async def files(self, folder: str = "blobs") -> ModelFiles:
        """Another `folder` is another controller."""
        clock = SystemClock()
        settings = ResolverSettings(hub=HubSettings(self.hub.url, self.token, wait_s=0.01))
        return ModelFiles(
            self.store,
            BlobStore(self.folder / folder, Fetcher(FetchLimits(tries=2, first_wait_s=0.01))),
            FileResolver(self.session, None, None, settings),  # type: ignore[arg-type]
            await open_ingress_tokens(self.store, clock),
            clock,
            blob_urls=ControllerBlobUrls(self.store, clock, own="", live_for_s=1.0, every_s=1.0),
            credential_of=lambda _node_id: "",
            disk=DiskSpace(reserve_bytes=0),
            retention=FileRetention(folder=self.folder / "models", unused_s=0.0),
        )

    async def install(self, **words: Any) -> Definition:
        definition = read_definition({"name": "m", "backend": "tiny"} | words)
        async with self.store.write() as tx:
            now = await tx.now()
            await models.put(
                tx,
                StoredModel(
                    id=definition.name,
                    definition=definition.whole,
                    revision=definition.revision,
                    origin="person",
                    created_at=now,
                    updated_at=now,
                ),
            )
        return definition


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(FakeHub())
        hub.repositories["org/tiny"] = Repository(dict(FILES))
        store = await stack.enter_async_context(open_store(sqlite_url(tmp_path)))
        session = await stack.enter_async_context(open_session(inside=True))
        (tmp_path / "models").mkdir()
        yield Site(tmp_path, store, session, hub)


def laid_out(files: tuple[ReplicaFile, ...]) -> list[str]:
    """Below the model's set."""
    assert all(file.path.startswith("m/") and file.digest and file.size_bytes for file in files)
    return sorted("/".join(file.path.split("/")[2:]) for file in files)


WHOLE = [
    "org/tiny/README.md",
    "org/tiny/config.json",
    "org/tiny/model-00001-of-00002.safetensors",
    "org/tiny/model-00002-of-00002.safetensors",
    "org/tiny/onnx/model.onnx",
    "org/tiny/with space/añ@b.txt",
]


@pytest.mark.parametrize(
    "words",
    [
        {"parameters": {"model": "huggingface://org/tiny"}},
        {"parameters": {"model": "org/tiny"}, "backend": "vllm"},
        {"artifacts": [{"source": {"type": "huggingface", "repo": "org/tiny"}}]},
    ],
)
async def test_all_of_it_in_the_order_it_has_there(site: Site, words: dict[str, Any]) -> None:
    definition = await site.install(**words)
    files = await site.files()
    assert await files.needs_files(definition)
    assert not await files.are_here(definition)
    got = await files.ensure(definition)
    assert laid_out(got) == WHOLE
    for file in got:
        found = files.find(file.digest)
        assert found is not None
        name = file.path.split("/", 4)[4]
        assert found.read_bytes() == FILES[name], name
    asked = len(site.hub.asked)
    assert await files.are_here(definition)
    assert await files.known(definition) == got
    assert await files.ensure(definition) == got
    assert len(site.hub.asked) == asked, "once fetched, nobody is asked"
    await files.sweep()
    assert await files.are_here(definition), "what a model is made of is kept, its list included"


async def test_only_what_the_patterns_leave(site: Site) -> None:
    source = {"repo": "org/tiny", "allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": ["*-00002-*"]}
    definition = await site.install(artifacts=[{"source": source}], parameters={"model": "tiny"})
    files = await site.files()
    assert laid_out(await files.ensure(definition)) == ["tiny/config.json", "tiny/model-00001-of-00002.safetensors"]
    definition = await site.install(artifacts=[{"source": source | {"allow_patterns": ["*.gguf"]}}])
    with pytest.raises(NotFound, match="no file of org/tiny"):
        await files.ensure(definition)


async def test_beside_other_files_and_in_a_folder_of_its_own(site: Site) -> None:
    listed = [
        {"filename": "one.json", "uri": "huggingface://org/tiny/config.json"},
        {"filename": "tokens", "uri": "huggingface://org/tiny@v1"},
    ]
    site.hub.repositories["org/tiny"].branches["v1"] = site.hub.repositories["org/tiny"].commit
    files = await site.files()
    got = laid_out(await files.ensure(await site.install(download_files=listed)))
    assert got == sorted(["one.json", *(path.replace("org/tiny", "tokens") for path in WHOLE)])


async def test_what_it_was_it_stays(site: Site) -> None:
    definition = await site.install(parameters={"model": "huggingface://org/tiny"})
    got = await (await site.files()).ensure(definition)
    before = site.hub.repositories["org/tiny"]
    after = Repository({"config.json": b"{}"}, commit="d" * 40, branches={before.commit: before.commit})
    site.hub.repositories["org/tiny"] = Repository(before.files, before.commit, branches={"next": "x"})
    other = await site.files("other")
    assert not await other.are_here(definition), "another controller's disk is another disk"
    assert await other.ensure(definition) == got
    assert f"/api/models/org/tiny/revision/{before.commit}?blobs=true" in site.hub.asked
    site.hub.repositories["org/tiny"] = Repository(after.files, after.commit)  # and the old commit is gone
    third = await site.files("third")
    assert laid_out(await third.ensure(definition)) == ["org/tiny/config.json"]


async def test_the_token_goes_to_the_hub_only(site: Site) -> None:
    site.hub.repositories["org/tiny"].token = "secret"
    definition = await site.install(parameters={"model": "huggingface://org/tiny"})
    with pytest.raises(Denied, match="--huggingface-token"):
        await (await site.files()).ensure(definition)
    site.token = "secret"
    site.hub.busy = 1  # and is asked again
    assert laid_out(await (await site.files()).ensure(definition)) == WHOLE
    assert {shown for path, shown in site.hub.shown if path.startswith("/api/")} == {"", "Bearer secret"}


async def test_files_beside_the_controller_win_over_a_name_on_the_hub(site: Site) -> None:
    own = site.folder / "models" / "org" / "tiny"
    own.mkdir(parents=True)
    (own / "config.json").write_text("mine")
    definition = await site.install(parameters={"model": "org/tiny"}, backend="vllm")
    files = await site.files()
    assert await files.needs_files(definition)
    with pytest.raises(Denied):  # this controller opens no folder; but it was the folder that was looked into
        await files.ensure(definition)
    assert site.hub.asked == []
