"""Models of ModelScope, by name and as the usual hub, against a scripted server of its interface."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from corral.blobs.errors import WrongDigest
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher, FetchLimits
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import open_session
from corral.contract.artifacts import snapshot_of
from corral.contract.installs import PlanModel
from corral.contract.models import ModelFile, read_definition
from corral.controller.files.file_resolver import FileResolver, ResolverSettings
from corral.controller.files.hubs.hub import HubSettings
from corral.controller.files.images import Images
from corral.controller.files.packages import Packages
from corral.controller.files.snapshots import Snapshots, files_of
from corral.controller.install.planner import InstallPlanner
from corral.controller.install.remote_header import HeaderReader
from corral.controller.scheduler.world import Build, BuildState, World
from corral.kit.errors import Denied, Failed, Invalid, NotFound
from tests.support.gguf_files import LLAMA, TOKENS, gguf
from tests.support.hub import FakeHub, Repository
from tests.support.scheduling import cpu_node, gpu_node, world

HEAD = gguf(LLAMA | TOKENS)
Q4, Q8 = HEAD + b"\0" * 5000, HEAD + b"\1" * 9000
NAME = "Qwen/Tiny-GGUF"


@dataclass
class Site:
    session: aiohttp.ClientSession
    hub: FakeHub
    blobs: BlobStore
    token: str = ""
    usual: bool = False
    builds: Any = None

    async def world(self, backends: Collection[str], *, wait_s: float | None = None) -> World:
        nodes = [cpu_node("attic", ram_gib=16)]
        return world(nodes if self.builds is None else [gpu_node("card", builds=self.builds)])

    @property
    def settings(self) -> HubSettings:
        return HubSettings(
            "http://127.0.0.1:1",
            "hf_secret",
            ask_s=5.0,
            wait_s=0.01,
            modelscope_url=self.hub.url,
            modelscope_token=self.token,
            prefers_modelscope=self.usual,
        )

    async def plan(self, source: str, **more: Any) -> Any:
        reader = HeaderReader(ask_s=5.0, wait_s=0.01, first_bytes=4096)
        planner = InstallPlanner(self.session, self.settings, self, reader=reader)
        return await planner.plan(PlanModel(source, **more))

    @property
    def resolver(self) -> FileResolver:
        unused: Any = None
        packages = Packages(self.session, unused, unused, platform="linux/amd64", python="3.11")
        return FileResolver(
            self.session, packages, Images(unused, platform="linux/amd64"), ResolverSettings((), self.settings)
        )

    async def fetch(self, file: ModelFile) -> bytes:
        found = await self.resolver.find(file)
        blob = await found.fetch(self.blobs, ExpectedBlob(found.digest, found.size_bytes), lambda _: None)
        return blob.path.read_bytes()


@pytest.fixture
async def site(tmp_path: Any) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(FakeHub())
        files = {"README.md": b"# Tiny", "sub/tiny-Q4_K_M.gguf": Q4, "tiny-Q8_0.gguf": Q8, ".gitattributes": b"x"}
        hub.repositories[NAME] = Repository(files)
        session = await stack.enter_async_context(open_session(inside=True))
        yield Site(session, hub, BlobStore(tmp_path / "blobs", Fetcher(FetchLimits(tries=3, first_wait_s=0.01))))


@pytest.mark.parametrize(
    "source",
    [f"modelscope://{NAME}", f"ModelScope://{NAME}@master", "{url}/models/Qwen/Tiny-GGUF/files", f"hf://{NAME}"],
)
async def test_a_repository_becomes_a_definition_with_hashes(site: Site, source: str) -> None:
    site.usual = source.startswith("hf://")
    plan = await site.plan(source.format(url=site.hub.url))
    [file] = read_definition(plan.definition).files
    assert file.uri == f"modelscope://{NAME}@master/sub/tiny-Q4_K_M.gguf"
    assert (file.sha256, file.size_bytes) == (hashlib.sha256(Q4).hexdigest(), len(Q4))
    assert plan.source == f"modelscope://{NAME}@master:Q4_K_M"
    assert plan.definition["urls"] == [f"{site.hub.url}/models/{NAME}"]
    assert await site.fetch(file) == Q4


async def test_one_file_and_what_is_not_there(site: Site) -> None:
    page = f"{site.hub.url}/models/{NAME}/file/view/master/tiny-Q8_0.gguf?status=2"
    for source in (
        f"modelscope://{NAME}/tiny-Q8_0.gguf",
        page,
        f"{site.hub.url}/models/{NAME}/resolve/master/tiny-Q8_0.gguf",
    ):
        assert (await site.plan(source)).source == f"modelscope://{NAME}@master/tiny-Q8_0.gguf"
    with pytest.raises(NotFound, match=r"has no file other\.gguf; it has sub/tiny-Q4_K_M\.gguf, tiny-Q8_0\.gguf"):
        await site.plan(f"modelscope://{NAME}/other.gguf")
    with pytest.raises(NotFound, match="answered 404"):
        await site.plan("modelscope://Qwen/nothing")
    with pytest.raises(NotFound, match="answered 404"):
        await site.plan(f"modelscope://{NAME}@v9")
    with pytest.raises(Invalid, match="is not a GGUF file"):
        await site.plan(f"modelscope://{NAME}/README.md")


async def test_a_private_repository_names_the_setting_and_the_token_goes_nowhere_else(site: Site) -> None:
    site.hub.repositories[NAME].token = "ms_secret"
    with pytest.raises(Denied, match="--modelscope-token"):
        await site.plan(f"modelscope://{NAME}")
    site.token = "ms_secret"
    [file] = read_definition((await site.plan(f"modelscope://{NAME}:Q8_0")).definition).files
    assert await site.fetch(file) == Q8
    shown = {header for path, header in site.hub.shown if path.startswith("/api/")}
    assert shown == {"", "Bearer ms_secret"}, "and never the token of the other hub"


async def test_a_busy_hub_is_asked_again(site: Site) -> None:
    site.hub.limited = 2
    assert (await site.plan(f"modelscope://{NAME}")).fits


async def test_a_file_that_changed_is_refused_with_both_hashes(site: Site) -> None:
    [file] = read_definition((await site.plan(f"modelscope://{NAME}:Q8_0")).definition).files
    site.hub.repositories[NAME].files["tiny-Q8_0.gguf"] = HEAD + b"\2" * 9000
    with pytest.raises(WrongDigest, match=hashlib.sha256(Q8).hexdigest()):
        await site.fetch(file)


async def test_without_a_hash_the_hub_tells_it(site: Site) -> None:
    found = await site.resolver.find(ModelFile("w", f"modelscope://{NAME}/tiny-Q8_0.gguf"))
    assert found.digest == f"sha256:{hashlib.sha256(Q8).hexdigest()}"
    with pytest.raises(NotFound, match=r"modelscope://Qwen/Tiny-GGUF/no one\.gguf answered 404"):
        await site.resolver.find(ModelFile("w", f"modelscope://{NAME}/no%20one.gguf"))


async def test_as_the_usual_hub_it_has_the_files_of_other_definitions(site: Site) -> None:
    site.usual = True
    digest, commit = hashlib.sha256(Q8).hexdigest(), "c0ffee" + "0" * 34
    assert await site.fetch(ModelFile("w", f"huggingface://{NAME}/tiny-Q8_0.gguf")) == Q8
    assert await site.fetch(ModelFile("w", f"hf://{NAME}@main/tiny-Q8_0.gguf", digest)) == Q8
    assert await site.fetch(ModelFile("w", f"huggingface://{NAME}@{commit}/tiny-Q8_0.gguf", digest)) == Q8
    with pytest.raises(NotFound, match="without a sha256"):
        await site.fetch(ModelFile("w", f"huggingface://{NAME}@{commit}/tiny-Q8_0.gguf"))


async def test_whole_repositories(site: Site) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"s" * 5000, "onnx/model.onnx": b"o" * 2000}
    site.hub.repositories["Qwen/Tiny"] = Repository(files)
    site.builds = {"vllm": Build(BuildState.INSTALLABLE)}
    plan = await site.plan("modelscope://Qwen/Tiny")
    assert plan.definition["artifacts"][0]["source"]["type"] == "modelscope"
    definition = read_definition(plan.definition)
    [wanted] = definition.snapshots
    snapshots = Snapshots(site.blobs, site.resolver.hubs)
    row = await snapshots.learn(definition.name, wanted, None)
    assert row.resolved == "modelscope://Qwen/Tiny@master"
    found = snapshots.known(wanted, row)
    assert found is not None
    assert {file.path: await site.fetch(file) for file in found} == {
        f"Qwen/Tiny/{path}": content for path, content in files.items() if not path.startswith("onnx/")
    }
    other = snapshot_of("modelscope://Qwen/Tiny@v1", "folder")
    assert other is not None
    assert (other.folder, other.revision, other.is_modelscope) == ("folder", "v1", True)
    assert files_of(other, await site.resolver.hubs.modelscope.list_("Qwen/Tiny", ""))[0].uri.startswith(
        "modelscope://"
    )


async def test_lists_that_cannot_be_used(site: Site) -> None:
    site.hub.repositories["Qwen/huge"] = Repository({f"f{number}": b"x" for number in range(3000)})
    with pytest.raises(Invalid, match="3000 files or more"):
        await site.plan("modelscope://Qwen/huge")
    site.hub.repositories["Qwen/empty"] = Repository({})
    with pytest.raises(NotFound, match="no files"):
        await site.plan("modelscope://Qwen/empty")
    site.hub.repositories["Qwen/out"] = Repository({"/etc/x.gguf": b"x" * 10})
    with pytest.raises(Invalid, match="leads out of its folder"):
        await site.plan("modelscope://Qwen/out")
    site.hub.answer = '{"Code": 500, "Success": false, "Message": "under maintenance"}'
    with pytest.raises(Failed, match="does not list Qwen/out: under maintenance"):
        await site.plan("modelscope://Qwen/out")
    site.hub.answer = "<html>"
    with pytest.raises(Failed, match="cannot be read"):
        await site.plan("modelscope://Qwen/out")
