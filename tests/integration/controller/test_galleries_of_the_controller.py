"""The galleries as the controller asks them: a real index from a file, a real registry, nothing at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from corral.blobs.oci.registry import RegistrySettings
from corral.contract.messages.backends import NodeBackend
from corral.controller.backends.catalogue import Catalogue, MachineKind, NodeInventory
from corral.controller.backends.galleries import Galleries, open_galleries
from corral.controller.backends.plan import NoBuild
from corral.gallery.backends.factory import GalleryOptions
from corral.gallery.galleries import Gallery
from corral.gallery.index_cache import LibraryOptions
from corral.kit.clock import SystemClock
from corral.kit.errors import Invalid, NotFound, Unavailable
from corral.store.records import BackendRequest, TargetBuild
from tests.support.image_registry import ImageRegistry, MadeImage, layer, make_image, push_image, run_file
from tests.support.image_registry import running_registry as start_registry

AMD64, ARM64 = MachineKind("default", "linux/amd64", "3.11"), MachineKind("default", "linux/arm64", "3.11")
NVIDIA = MachineKind("nvidia-cuda-12", "linux/amd64", "3.11")
NOWHERE = "http://127.0.0.1:1/index.yaml"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageRegistry]:
    with start_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


def an_image(text: str) -> MadeImage:
    return make_image({"linux/amd64": [layer({"run.sh": run_file(text)})]})


def write_index(folder: Path, host: str) -> Gallery:
    (folder / "farm.yaml").write_text(
        f"""
- name: plough
  capabilities: {{default: cpu-plough, nvidia: cuda-plough}}
- name: cpu-plough
  alias: plough
  uri: oci://{host}/plough:latest-cpu
- name: cuda-plough
  alias: plough
  uri: oci://{host}/plough:latest-cuda
- name: llama-cpp
  uri: oci://{host}/plough:latest-cpu
- name: rake
  uri: oci://{host}/rake:gone
- name: spade
  uri: https://example.com/spade.tar.gz
  sha256: {"a" * 64}
  description: digs
  tags: [garden]
"""
    )
    return Gallery("farm", f"file://{folder}/farm.yaml")


@asynccontextmanager
async def opened(folder: Path, *galleries: Gallery, **options: Any) -> AsyncIterator[Galleries]:
    chosen = GalleryOptions(
        galleries=galleries,
        base_folder=folder,
        cache_folder=folder / "cache",
        library=LibraryOptions(candidate_s=5),
        **options,
    )
    async with open_galleries(chosen, RegistrySettings(tries=1), clock=SystemClock(), env={}) as found:
        yield found


async def test_it_is_what_the_controller_asks_for(tmp_path: Path) -> None:
    async with opened(tmp_path) as galleries:
        fits: Catalogue = galleries
        assert fits is galleries


async def test_a_backend_comes_to_another_build_on_each_kind_of_machine(
    tmp_path: Path, registry: ImageRegistry
) -> None:
    cpu, cuda = an_image("cpu"), an_image("cuda")
    push_image(registry.url, "plough", "latest-cpu", cpu)
    push_image(registry.url, "plough", "latest-cuda", cuda)
    async with opened(tmp_path, write_index(tmp_path, registry.host)) as galleries:
        listed = await galleries.look_up(BackendRequest("Plough"))
        assert (listed.name, listed.hardware_specific) == ("plough", False)
        assert listed.request == BackendRequest("plough")
        there = await galleries.resolve(BackendRequest("plough"), AMD64)
        assert isinstance(there, TargetBuild)
        assert (there.variant, there.alias, there.digest) == ("cpu-plough", "plough", cpu.digest)
        assert there.size_bytes == len(cpu.layers["linux/amd64"][0])
        assert there.gallery_url == f"file://{tmp_path}/farm.yaml"
        assert there.sources[0].kind == "oci"
        on_gpu = await galleries.resolve(BackendRequest("plough"), NVIDIA)
        assert isinstance(on_gpu, TargetBuild)
        assert (on_gpu.variant, on_gpu.digest) == ("cuda-plough", cuda.digest)
        assert await galleries.resolve(BackendRequest("plough"), ARM64) == NoBuild("no linux/arm64 build")
        silent = await galleries.resolve(BackendRequest("plough"), MachineKind("", "", ""))
        assert isinstance(silent, TargetBuild)
        assert silent.variant == "cpu-plough", "a LocalAI worker does not say what it runs on"


async def test_builds_for_one_kind_of_machine_and_the_entry_that_chooses_among_them(tmp_path: Path) -> None:
    async with opened(tmp_path, write_index(tmp_path, "registry.test")) as galleries:
        listed = await galleries.look_up(BackendRequest("cuda-plough"))
        assert (listed.hardware_specific, listed.meta_alternative) == (True, "plough")


async def test_a_gallery_that_was_named_is_kept_with_the_request(tmp_path: Path) -> None:
    async with opened(tmp_path, write_index(tmp_path, "registry.test")) as galleries:
        assert (await galleries.look_up(BackendRequest("llama-cpp"))).request == BackendRequest("llama-cpp")
        listed = await galleries.look_up(BackendRequest("farm@llama-cpp"))
        assert (listed.name, listed.request) == ("llama-cpp", BackendRequest("llama-cpp", gallery="farm"))
        assert listed.request is not None
        spade = await galleries.resolve(BackendRequest("spade", gallery="farm"), AMD64)
        assert isinstance(spade, TargetBuild)
        assert spade.digest == "sha256:" + "a" * 64
        with pytest.raises(NotFound, match="no gallery is called 'barn'"):
            await galleries.look_up(BackendRequest("barn@llama-cpp"))


async def test_an_unknown_name_comes_with_near_ones(tmp_path: Path) -> None:
    async with opened(tmp_path, write_index(tmp_path, "registry.test")) as galleries:
        with pytest.raises(NotFound, match="did you mean plough"):
            await galleries.look_up(BackendRequest("plogh"))


async def test_a_gallery_that_is_away_costs_its_own_entries_only(tmp_path: Path) -> None:
    async with opened(tmp_path, Gallery("localai", NOWHERE)) as galleries:
        assert (await galleries.look_up(BackendRequest("llama-cpp"))).name == "llama-cpp"
        assert {entry["name"] for entry in await galleries.available([AMD64[:2]])} >= {"llama-cpp", "mock"}
        assert list(galleries.unread()) == ["localai"]
        with pytest.raises(NotFound, match=r"the gallery localai could not be read.*did you mean llama-cpp"):
            await galleries.look_up(BackendRequest("lama-cpp"))
        with pytest.raises(Unavailable, match="the gallery localai could not be read"):
            await galleries.look_up(BackendRequest("zzz"))
        with pytest.raises(Unavailable):
            await galleries.resolve(BackendRequest("zzz"), AMD64)


async def test_a_registry_that_is_away_can_be_asked_again_and_an_image_that_is_gone_not(
    tmp_path: Path, registry: ImageRegistry
) -> None:
    async with opened(tmp_path, write_index(tmp_path, registry.host)) as galleries:
        gone = await galleries.resolve(BackendRequest("rake"), AMD64)
        assert isinstance(gone, NoBuild)
    async with opened(tmp_path, write_index(tmp_path, "127.0.0.1:1")) as galleries:
        with pytest.raises(Unavailable):
            await galleries.resolve(BackendRequest("rake"), AMD64)


async def test_installs_from_a_uri(tmp_path: Path, registry: ImageRegistry) -> None:
    push_image(registry.url, "mine", "1", an_image("mine"))
    uri = f"oci://{registry.host}/mine:1"
    async with opened(tmp_path) as galleries:
        with pytest.raises(Invalid, match="needs a name"):
            await galleries.look_up(BackendRequest("", uri))
        listed = await galleries.look_up(BackendRequest("mine", uri, alias="own"))
        assert (listed.name, listed.request) == ("mine", BackendRequest("mine", uri, alias="own"))
        found = await galleries.resolve(BackendRequest("mine", uri, alias="own"), AMD64)
        assert isinstance(found, TargetBuild)
        assert (found.variant, found.alias) == ("mine", "own")
        archive = await galleries.look_up(BackendRequest("", "https://example.com/tool.tar.gz"))
        assert archive.request == BackendRequest("tool", "https://example.com/tool.tar.gz")


async def test_a_request_may_bring_its_own_galleries(tmp_path: Path) -> None:
    own = write_index(tmp_path, "registry.test")
    brought = f'[{{"name":"own","url":"{own.url}"}}]'
    async with opened(tmp_path) as galleries:
        with pytest.raises(NotFound):
            await galleries.look_up(BackendRequest("spade"))
        assert (await galleries.look_up(BackendRequest("spade", galleries=brought))).name == "spade"
        assert isinstance(await galleries.resolve(BackendRequest("spade", galleries=brought), AMD64), TargetBuild)
        assert (await galleries.look_up(BackendRequest("mock", galleries="{nonsense"))).name == "mock", (
            "ignored, as written"
        )


async def test_what_is_available_goes_by_the_machines_there_are(tmp_path: Path) -> None:
    async with opened(tmp_path, write_index(tmp_path, "registry.test")) as galleries:
        here = {entry["id"]: entry for entry in await galleries.available([AMD64[:2]])}
        assert "farm@cpu-plough" in here
        assert "farm@cuda-plough" not in here
        assert here["farm@spade"] == {
            "name": "spade",
            "uri": "https://example.com/spade.tar.gz",
            "description": "digs",
            "tags": ["garden"],
            "gallery": {"name": "farm", "url": f"file://{tmp_path}/farm.yaml"},
            "id": "farm@spade",
            "is_meta": False,
        }
        assert here["farm@plough"]["is_meta"] is True
        everything = {entry["id"] for entry in await galleries.available([])}
        assert "farm@cuda-plough" in everything, "without a machine to choose for, all there is"


async def test_the_built_in_gallery_is_not_listed(tmp_path: Path) -> None:
    async with opened(tmp_path, Gallery("localai", NOWHERE, ("github:a/b/c.yaml",))) as galleries:
        assert galleries.galleries() == [{"name": "localai", "url": NOWHERE, "mirrors": ("github:a/b/c.yaml",)}]


async def test_localai_workers_are_told_only_of_the_gallery_that_has_the_entry(tmp_path: Path) -> None:
    farm, away = write_index(tmp_path, "registry.test"), Gallery("away", NOWHERE)
    (tmp_path / "other.yaml").write_text(
        "- {name: rake, uri: oci://registry.test/rake:2}\n- {name: hoe, uri: oci://x/y:1}"
    )
    other = Gallery("other", f"file://{tmp_path}/other.yaml")

    def shown(*chosen: Gallery) -> list[dict[str, Any]]:
        return [{"name": gallery.name, "url": gallery.url} for gallery in chosen]

    async with opened(tmp_path, farm, other) as galleries:
        assert await galleries.galleries_with(BackendRequest("hoe")) == shown(other)
        assert await galleries.galleries_with(BackendRequest("rake")) == shown(farm), "the first that has it"
        assert await galleries.galleries_with(BackendRequest("rake", gallery="other")) == shown(other)
        assert await galleries.galleries_with(BackendRequest("llama-cpp")) == shown(farm), (
            "not the built-in entry of that name"
        )
        assert await galleries.galleries_with(BackendRequest("mock")) == [], "only the built-in gallery has it"
    async with opened(tmp_path, away, farm) as galleries:
        assert await galleries.galleries_with(BackendRequest("rake")) == shown(farm)
        assert await galleries.galleries_with(BackendRequest("hoe")) == shown(away), "it may be in there"


async def test_a_build_for_a_localai_worker_is_one_of_a_gallery_it_can_read(
    tmp_path: Path, registry: ImageRegistry
) -> None:
    push_image(registry.url, "plough", "latest-cpu", an_image("cpu"))
    localai = MachineKind("default", "", "")
    async with opened(tmp_path, write_index(tmp_path, registry.host)) as galleries:
        theirs = await galleries.resolve(BackendRequest("llama-cpp"), localai)
        assert isinstance(theirs, TargetBuild)
        assert theirs.gallery_url == f"file://{tmp_path}/farm.yaml"
        nothing = await galleries.resolve(BackendRequest("mock"), localai)
        assert nothing == NoBuild("no gallery that a LocalAI worker can read has it")
    async with opened(tmp_path, Gallery("away", NOWHERE)) as galleries:
        with pytest.raises(Unavailable, match="the gallery away could not be read"):
            await galleries.resolve(BackendRequest("llama-cpp"), localai)


async def test_the_name_that_builds_share_is_known_by_build(tmp_path: Path) -> None:
    nobody = Gallery("away", NOWHERE)
    async with opened(tmp_path, write_index(tmp_path, "registry.example"), nobody) as galleries:
        names = ["cpu-plough", "cuda-plough", "plough", "rake", "never-heard-of"]
        assert await galleries.aliases(names) == {"cpu-plough": "plough", "cuda-plough": "plough"}


async def test_what_is_newer_than_what_the_nodes_have(tmp_path: Path, registry: ImageRegistry) -> None:
    first, second = an_image("first"), an_image("second")
    push_image(registry.url, "plough", "latest-cpu", first)
    gallery = write_index(tmp_path, registry.host)

    def inventory(name: str, digest: str) -> NodeInventory:
        row = NodeBackend("cpu-plough", False, False, digest=digest, gallery_url=gallery.url)
        return NodeInventory(f"id-of-{name}", name, "default", "linux/amd64", (row,), "3.11")

    fleet = [inventory("barn", first.digest), inventory("shed", first.digest)]
    async with opened(tmp_path, gallery) as galleries:
        assert await galleries.upgrades([]) == {}
        assert await galleries.upgrades(fleet) == {}
        push_image(registry.url, "plough", "latest-cpu", second)
        assert await galleries.upgrades(fleet) == {}, "asked a moment ago"
        await galleries.refresh()
        assert list(await galleries.upgrades(fleet)) == ["cpu-plough"]
    async with opened(tmp_path, gallery) as galleries:
        found = (await galleries.upgrades(fleet))["cpu-plough"]
        assert (found.installed_digest, found.available_digest) == (first.digest, second.digest)
        drifting = (await galleries.upgrades([*fleet, inventory("mill", "sha256:other")]))["cpu-plough"]
        assert [drift.node_name for drift in drifting.node_drift] == ["mill"]


async def test_who_asks_for_an_upgrade_gets_what_was_published_a_moment_ago(
    tmp_path: Path, registry: ImageRegistry
) -> None:
    first, second = an_image("one"), an_image("two")
    push_image(registry.url, "plough", "latest-cpu", first)
    async with opened(tmp_path, write_index(tmp_path, registry.host)) as galleries:
        before = await galleries.resolve(BackendRequest("plough"), AMD64)
        push_image(registry.url, "plough", "latest-cpu", second)
        index = tmp_path / "farm.yaml"
        index.write_text(index.read_text().replace("- name: cpu-plough\n", "- name: cpu-plough\n  version: '2'\n"))
        galleries.forget_sources()
        after = await galleries.resolve(BackendRequest("plough"), AMD64)
    assert isinstance(before, TargetBuild)
    assert isinstance(after, TargetBuild)
    assert (before.digest, after.digest) == (first.digest, second.digest)
    assert (before.version, after.version) == ("", "2")


async def test_what_is_written_to_a_file_gallery_is_seen_at_once(tmp_path: Path) -> None:
    gallery = write_index(tmp_path, "registry.test")
    async with opened(tmp_path, gallery) as galleries:
        await galleries.look_up(BackendRequest("spade"))
        (tmp_path / "farm.yaml").write_text("- {name: hoe, uri: 'https://example.com/h.tar.gz'}\n")
        assert (await galleries.look_up(BackendRequest("hoe"))).name == "hoe"
