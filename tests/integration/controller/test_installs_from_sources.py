"""Plans of installs against a hub and servers that answer in every way they can."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from corral.blobs.transfer.remote import open_session
from corral.contract.catalogue import InstallModel
from corral.contract.gguf import GgufHeader
from corral.contract.installs import LocalFile, PlanModel
from corral.contract.models import read_definition
from corral.controller.files.hubs.hub import HubSettings
from corral.controller.install.planner import InstallPlanner
from corral.controller.install.remote_header import HeaderReader
from corral.controller.scheduler.world import Build, BuildState, Node, World
from corral.kit.errors import Denied, Invalid, NoCapacity, NotFound, Unreachable
from tests.support.gguf_files import LLAMA, TOKENS, gguf
from tests.support.hub import FakeHub, Repository
from tests.support.scheduling import cpu_node, gpu_node, world

TEMPLATE = {"tokenizer.chat_template": "{{ messages }}" * 100}
HEAD = gguf(LLAMA | TOKENS | TEMPLATE)
LONG_HEAD = gguf(LLAMA | {"tokenizer.ggml.tokens": [f"token{number}" for number in range(2000)]} | TEMPLATE)
COMMIT = "c0ffee" + "0" * 34


def weights(head: bytes, size: int) -> bytes:
    return head + b"\0" * (size - len(head))


SMALL = {
    "README.md": b"# A model",
    "Tiny Model-Q8_0.gguf": weights(HEAD, 30_000),
    "Tiny Model-Q4_K_M.gguf": weights(HEAD, 20_000),
    "sub/Tiny Model-F16-00001-of-00002.gguf": weights(HEAD, 40_000),
    "sub/Tiny Model-F16-00002-of-00002.gguf": b"\1" * 20_000,
}


@dataclass
class Site:
    session: aiohttp.ClientSession
    hub: FakeHub
    nodes: list[Node] = field(default_factory=lambda: [cpu_node("attic", ram_gib=16)])
    token: str = ""
    first_bytes: int = 4096
    asked: list[Collection[str]] = field(default_factory=list)

    async def world(self, backends: Collection[str], *, wait_s: float | None = None) -> World:
        self.asked.append(backends)
        return world(self.nodes)

    @property
    def planner(self) -> InstallPlanner:
        settings = HubSettings(self.hub.url, self.token, wait_s=0.01)
        reader = HeaderReader(ask_s=5.0, wait_s=0.01, first_bytes=self.first_bytes)
        return InstallPlanner(self.session, settings, self, reader=reader)

    async def plan(self, source: str, **more: Any) -> Any:
        return await self.planner.plan(PlanModel(source, **more))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(FakeHub())
        hub.repositories["org/Tiny-Model-GGUF"] = Repository(dict(SMALL))
        yield Site(await stack.enter_async_context(open_session()), hub)


async def test_a_repository_becomes_a_definition_at_its_commit(site: Site) -> None:
    plan = await site.plan("hf://org/Tiny-Model-GGUF")
    definition = read_definition(plan.definition)
    assert (definition.name, definition.backend, definition.context_size) == ("tiny-model", "llama-cpp", 8192)
    [file] = definition.files
    assert file.path == "Tiny Model-Q4_K_M.gguf"
    assert file.uri == f"huggingface://org/Tiny-Model-GGUF@{COMMIT}/Tiny%20Model-Q4_K_M.gguf"
    assert (file.size_bytes, len(file.sha256)) == (20_000, 64)
    assert plan.definition["template"] == {"use_tokenizer_template": True}
    assert plan.source == f"hf://org/Tiny-Model-GGUF@{COMMIT}:Q4_K_M"
    assert [(each.quant, each.chosen) for each in plan.choices] == [("F16", False), ("Q8_0", False), ("Q4_K_M", True)]
    assert plan.text.startswith("Q4_K_M, 19.5 KiB: fits on attic (RAM: 15.2 GiB free")
    assert plan.fits
    assert site.asked == [("llama-cpp",)]
    fetched = [path for path in site.hub.asked if path.startswith("/cdn/")]
    assert len(fetched) == 1, "of one file, and only its beginning"


async def test_an_accelerator_changes_the_choice(site: Site) -> None:
    site.nodes.append(gpu_node("card"))
    plan = await site.plan("hf://org/Tiny-Model-GGUF")
    assert plan.text.startswith("Q8_0, 29.3 KiB: fits on card (GPU 0")


@pytest.mark.parametrize("source", ["hf://org/Tiny-Model-GGUF:f16", "hf://org/Tiny-Model-GGUF@main:F16"])
async def test_the_callers_choice_and_parts(site: Site, source: str) -> None:
    plan = await site.plan(source, name="mine", overrides={"context_size": 1024, "parallel": 3})
    definition = read_definition(plan.definition)
    assert [file.path.rpartition("/")[2] for file in definition.files] == [
        "Tiny Model-F16-00001-of-00002.gguf",
        "Tiny Model-F16-00002-of-00002.gguf",
    ]
    assert definition.weights == "sub/Tiny Model-F16-00001-of-00002.gguf"
    assert (definition.name, definition.context_size, definition.parallel) == ("mine", 1024, 3)


async def test_one_file(site: Site) -> None:
    plan = await site.plan("hf://org/Tiny-Model-GGUF/Tiny Model-Q8_0.gguf")
    assert (plan.definition["name"], len(plan.choices)) == ("tiny-model", 1)
    assert plan.source == f"hf://org/Tiny-Model-GGUF@{COMMIT}/Tiny Model-Q8_0.gguf"
    with pytest.raises(NotFound, match=r"has no file nothing.gguf; it has Tiny Model-Q4_K_M.gguf"):
        await site.plan("hf://org/Tiny-Model-GGUF/nothing.gguf")


async def test_a_quantisation_that_is_not_there(site: Site) -> None:
    with pytest.raises(NotFound, match=r"has no Q5_K_M; it has F16, Q8_0, Q4_K_M"):
        await site.plan("hf://org/Tiny-Model-GGUF", quant="Q5_K_M")


async def test_a_repository_of_several_models_wants_a_file(site: Site) -> None:
    site.hub.repositories["org/many"] = Repository({"a-Q4_0.gguf": SMALL["README.md"], "b-Q4_0.gguf": b"x"})
    with pytest.raises(Invalid, match=r"has several models; name a file: hf://org/many/a-Q4_0.gguf"):
        await site.plan("hf://org/many")


async def test_a_gated_repository_names_the_setting(site: Site) -> None:
    site.hub.repositories["org/Tiny-Model-GGUF"].token = "hf_secret"
    with pytest.raises(Denied, match="--huggingface-token"):
        await site.plan("hf://org/Tiny-Model-GGUF")
    site.token = "hf_secret"
    assert (await site.plan("hf://org/Tiny-Model-GGUF")).fits
    shown = [header for path, header in site.hub.shown if path.startswith("/org/")]
    assert shown == ["Bearer hf_secret"], "the header of a file is asked for with the token"


async def test_an_unknown_revision(site: Site) -> None:
    with pytest.raises(NotFound):
        await site.plan("hf://org/Tiny-Model-GGUF@v9")


async def test_a_hub_that_limits_is_asked_again_when_it_says(site: Site) -> None:
    site.hub.limited = 2
    assert (await site.plan("hf://org/Tiny-Model-GGUF")).fits
    site.hub.limited, site.hub.retry_after = 100, "0"
    with pytest.raises(Unreachable, match="429"):
        await site.plan("hf://org/Tiny-Model-GGUF")


async def test_a_vocabulary_longer_than_the_first_range(site: Site) -> None:
    site.hub.repositories["org/x"] = Repository({"x-Q4_0.gguf": weights(LONG_HEAD, 100_000)})
    plan = await site.plan("hf://org/x")
    assert plan.definition["known_usecases"] == ["chat", "completion"]
    assert len([path for path in site.hub.asked if path.startswith("/cdn/")]) > 2


async def test_a_file_that_changes_between_two_ranges_is_read_again(site: Site) -> None:
    site.hub.repositories["org/x"] = Repository({"x-Q4_0.gguf": weights(LONG_HEAD, 100_000)})
    site.hub.tags = ['"old"', '"new"', '"new"', '"new"', '"new"', '"new"']
    assert (await site.plan("hf://org/x")).fits
    site.hub.tags = [f'"{number}"' for number in range(100)]
    with pytest.raises(Unreachable, match="changes while it is read"):
        await site.plan("hf://org/x")


async def test_a_server_without_ranges(site: Site) -> None:
    site.hub.knows_ranges = False
    site.hub.repositories["org/x"] = Repository({"x-Q4_0.gguf": weights(LONG_HEAD, 100_000)})
    assert (await site.plan("hf://org/x")).definition["known_usecases"] == ["chat", "completion"]


async def test_a_file_that_is_not_gguf_is_refused(site: Site) -> None:
    site.hub.repositories["org/x"] = Repository({"x-Q4_0.gguf": b"<html>" * 1000})
    with pytest.raises(Invalid, match="not a GGUF file"):
        await site.plan("hf://org/x")
    site.hub.repositories["org/x"] = Repository(
        {"x-Q4_0.gguf": weights(gguf({"general.type": "adapter"} | LLAMA | TOKENS), 5000)}
    )
    with pytest.raises(Invalid, match="an adapter: install the model that it belongs to"):
        await site.plan("hf://org/x")


async def test_a_name_that_leads_out_of_the_folder_is_refused(site: Site) -> None:
    site.hub.repositories["org/x"] = Repository({"/etc/x-Q4_0.gguf": b"x" * 2000})
    with pytest.raises(Invalid, match="leads out of its folder"):
        await site.plan("hf://org/x")
    site.hub.repositories["org/x"] = Repository({"../../x-Q4_0.gguf": b"x" * 2000})
    with pytest.raises(NotFound, match="there are no files in org/x"):
        await site.plan("hf://org/x")


async def test_names_with_spaces_and_other_alphabets(site: Site) -> None:
    site.hub.repositories["org/x"] = Repository({"mein Größe模型-Q4_0.gguf": weights(HEAD, 5000)})
    plan = await site.plan("hf://org/x/mein Größe模型-Q4_0.gguf")
    assert plan.definition["name"] == "mein-größe模型"
    assert "%E6%A8%A1" in plan.definition["download_files"][0]["uri"]


async def test_nothing_fits_says_what_is_needed_and_where_it_lacks(site: Site) -> None:
    site.nodes = [cpu_node("tiny", ram_gib=0.1)]
    with pytest.raises(NoCapacity, match=r"the smallest, Q4_K_M, 19\.5 KiB, needs .* tiny: needs .*--quant"):
        await site.plan("hf://org/Tiny-Model-GGUF")
    forced = await site.plan("hf://org/Tiny-Model-GGUF", quant="Q4_K_M")
    assert not forced.fits
    assert any("no node can run it now: tiny" in note for note in forced.notes)


async def test_a_fleet_without_nodes_gets_a_plan_all_the_same(site: Site) -> None:
    site.nodes = []
    plan = await site.plan("hf://org/Tiny-Model-GGUF")
    assert (plan.fits, plan.choices[-1].chosen) == (False, True)
    assert "there is no node yet" in plan.notes[0]


SAFETENSORS = {"config.json": b"{}", "model.safetensors": b"x" * 5000, "pytorch_model.bin": b"y" * 5000}


async def test_safetensors_go_to_an_engine_that_the_fleet_has(site: Site) -> None:
    site.hub.repositories["org/Big"] = Repository(SAFETENSORS)
    builds = {"vllm": Build(BuildState.INSTALLABLE, devices="many"), "mlx-lm": Build(BuildState.MISSING, "metal only")}
    site.nodes = [gpu_node("card", builds=builds)]
    plan = await site.plan("hf://org/Big")
    definition = read_definition(plan.definition)
    assert (definition.name, definition.backend) == ("big", "vllm")
    assert [(each.repo, each.revision) for each in definition.snapshots] == [("org/Big", COMMIT)]
    assert plan.text == "vllm, 4.9 KiB: fits on card"
    mac = cpu_node(
        "mac", builds={"vllm": Build(BuildState.MISSING, "CUDA only"), "mlx-lm": Build(BuildState.INSTALLABLE)}
    )
    site.nodes = [mac]
    assert (await site.plan("hf://org/Big")).definition["backend"] == "mlx-lm"
    site.nodes = [cpu_node("attic", builds={"vllm": Build(BuildState.MISSING, "CUDA only")})]
    with pytest.raises(NoCapacity, match=r"vllm on attic: no build of vllm: CUDA only"):
        await site.plan("hf://org/Big")


async def test_a_repository_that_nothing_runs(site: Site) -> None:
    site.hub.repositories["org/onnx"] = Repository({"model.onnx": b"x" * 5000})
    with pytest.raises(NotFound, match=r"no GGUF file and no safetensors.*org/onnx|onnx-GGUF"):
        await site.plan("hf://org/onnx")


async def test_a_file_anywhere(site: Site) -> None:
    source = f"{site.hub.url}/cdn/org/Tiny-Model-GGUF/sub/Tiny%20Model-F16-00001-of-00002.gguf?key=secret"
    site.hub.url = "http://127.0.0.1:9"  # another host than the hub
    plan = await site.plan(source)
    [file] = plan.definition["download_files"]
    assert (file["filename"], file["uri"], file["size"]) == ("Tiny Model-F16-00001-of-00002.gguf", source, 40_000)
    assert "secret" not in plan.source


async def test_a_redirect_to_a_file_is_followed(site: Site) -> None:
    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPFound(f"{site.hub.url}/cdn/org/Tiny-Model-GGUF/Tiny%20Model-Q8_0.gguf")

    app = web.Application()
    app.router.add_get("/{name}", elsewhere)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        plan = await site.plan(f"http://127.0.0.1:{runner.addresses[0][1]}/x.gguf")
    finally:
        await runner.cleanup()
    assert (plan.definition["name"], plan.choices[0].size_bytes) == ("x", 30_000)


async def test_a_missing_file_and_a_server_that_is_not_there(site: Site) -> None:
    missing, site.hub.url = f"{site.hub.url}/cdn/x.gguf", "http://127.0.0.1:9"
    with pytest.raises(NotFound, match="404"):
        await site.plan(missing)
    with pytest.raises(Unreachable, match="cannot be reached"):
        await site.plan("http://127.0.0.1:1/x.gguf")


async def test_an_install_request_is_resolved_once(site: Site) -> None:
    found = await site.planner.resolve(
        InstallModel(source="hf://org/Tiny-Model-GGUF", quant="q8_0", name="mine", overrides={"parallel": 2})
    )
    assert (found.definition["name"], found.definition["parallel"], found.overrides) == ("mine", 2, {})
    assert found.source == f"hf://org/Tiny-Model-GGUF@{COMMIT}:Q8_0"
    with pytest.raises(Invalid, match="not both"):
        await site.planner.resolve(InstallModel(model="x", source="hf://a/b"))


HEADER = GgufHeader(3, "llama", {"context_length": 2048}, chat_template=True)


async def test_files_of_the_callers_machine(site: Site) -> None:
    file = LocalFile("My Model.Q4_0.gguf", 1000, "ab" * 32)
    plan = await site.planner.plan(PlanModel(files=(file,), header=HEADER))
    definition = read_definition(plan.definition)
    assert (definition.name, definition.context_size) == ("my-model", 2048)
    assert definition.files[0].uri == f"upload://{'ab' * 32}/My%20Model.Q4_0.gguf"
    assert definition.files[0].sha256 == "ab" * 32


@pytest.mark.parametrize(
    "file",
    [
        LocalFile("../x.gguf", 1, "ab" * 32),
        LocalFile("a/x.gguf", 1, "ab" * 32),
        LocalFile("x.txt", 1, "ab" * 32),
        LocalFile("x.gguf", 0, "ab" * 32),
        LocalFile("x.gguf", 1, "../" * 10),
    ],
    ids=lambda file: f"{file.name} {file.sha256[:4]}",
)
async def test_files_that_are_none_are_refused(site: Site, file: LocalFile) -> None:
    with pytest.raises(Invalid):
        await site.planner.plan(PlanModel(files=(file,), header=HEADER))
    with pytest.raises(Invalid, match=re.escape("give either a source or files")):
        await site.planner.plan(PlanModel())
