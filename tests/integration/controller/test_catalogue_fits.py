"""The built-in models as `corral models available` lists them: sizes of a scripted hub, nodes by the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from corral.blobs.transfer.remote import open_session
from corral.contract.catalogue import AvailableModel
from corral.contract.models import Definition, ModelFile, read_definition
from corral.controller.files.file_resolver import FileResolver, ResolvedFile, ResolverSettings
from corral.controller.files.hubs.hub import HubSettings
from corral.controller.install.catalogue_fits import CatalogueFits, SizeLookups, built_in_definitions
from corral.controller.models.views import available_view
from corral.controller.scheduler.world import Node, World
from corral.gallery.models.entries import read_built_in_models
from corral.kit.clock import SystemClock
from corral.kit.errors import Unreachable
from corral.kit.tasks import background
from tests.support.hub import FakeHub, Repository
from tests.support.scheduling import cpu_node, world
from tests.support.waiting import DEADLINE_S


class Nodes:
    def __init__(self, *nodes: Node) -> None:
        self.nodes = nodes
        self.backends: list[Collection[str]] = []

    async def world(self, backends: Collection[str], *, wait_s: float | None = None) -> World:
        self.backends.append(backends)
        return world(list(self.nodes))


def definition(name: str, *files: dict[str, Any]) -> Definition:
    return read_definition(
        {"name": name, "backend": "llama-cpp", "parameters": {"model": "a.gguf"}, "download_files": list(files)}
    )


def entry(name: str) -> AvailableModel:
    return AvailableModel(name=name, id=f"corral@{name}", gallery="corral", installed=False)


@asynccontextmanager
async def lookups(hub: FakeHub) -> AsyncIterator[SizeLookups]:
    async with open_session() as session:
        found = SizeLookups(resolver(session, hub).find, SystemClock())
        async with background(found.run()):
            yield found


def resolver(session: aiohttp.ClientSession, hub: FakeHub) -> FileResolver:
    settings = ResolverSettings(hub=HubSettings(hub.url, wait_s=0.01), ask_s=5.0)
    return FileResolver(session, None, None, settings)  # type: ignore[arg-type]


async def test_a_model_fits_where_its_files_fit_and_the_hub_tells_their_size_once() -> None:
    weights = {"a.gguf": b"\0" * 5000, "mmproj.gguf": b"\1" * 3000}
    async with FakeHub() as hub:
        hub.repositories["org/model"] = Repository(weights)
        files = [{"filename": name, "uri": f"huggingface://org/model/{name}"} for name in weights]
        fleet = Nodes(cpu_node("attic", ram_gib=16), cpu_node("barn", ram_gib=0.1))
        async with lookups(hub) as sizes:
            fits = CatalogueFits(fleet, sizes, definitions={"corral@m": definition("m", *files)}, wait_s=10.0)
            (shown,) = await fits.add_to([entry("m")])
            assert (shown.size_bytes, shown.size, shown.fits_on) == (8000, "7.8 KiB", ("attic",))
            assert shown.fit_note == ""
            asked = list(hub.asked)
            assert await fits.add_to([entry("m")]) == [shown]
            assert hub.asked == asked, "a size is looked up once"
            assert fleet.backends[-1] == ["llama-cpp"]


async def test_a_declared_size_is_not_looked_up_and_a_model_that_is_too_large_says_why() -> None:
    large = {"filename": "a.gguf", "uri": "huggingface://org/model/a.gguf", "size": 90 << 30}
    async with FakeHub() as hub, lookups(hub) as sizes:
        fits = CatalogueFits(
            Nodes(cpu_node("attic", ram_gib=16)), sizes, definitions={"corral@m": definition("m", large)}, wait_s=10.0
        )
        other = AvailableModel(name="x", id="localai@x", gallery="localai", installed=False)
        shown, untouched = await fits.add_to([entry("m"), other])
        assert shown.fits_on == ()
        assert shown.fit_note.startswith("fits on no node: attic: ")
        assert untouched == other
        assert hub.asked == []


async def test_a_hub_that_does_not_answer_delays_the_list_once_and_hides_nothing() -> None:
    asked: list[str] = []
    both_asked = asyncio.Event()

    async def find(file: ModelFile) -> ResolvedFile:
        asked.append(file.uri)
        if len(asked) == 2:
            both_asked.set()
        await asyncio.sleep(0.2)
        raise Unreachable("no such host")

    sizes = SizeLookups(find, SystemClock())
    files = [{"filename": f"{name}.gguf", "uri": f"https://hub/{name}.gguf"} for name in "ab"]
    async with background(sizes.run()):
        fits = CatalogueFits(Nodes(), sizes, definitions={"corral@m": definition("m", *files)}, wait_s=0.05)
        (shown,) = await fits.add_to([entry("m")])
        assert (shown.size_bytes, shown.fits_on) == (0, ())
        assert shown.fit_note == "its size is not known before it is fetched"
        async with asyncio.timeout(DEADLINE_S):
            await both_asked.wait()
        assert await fits.add_to([entry("m")]) == [shown]
        assert len(asked) == 2, "a silent server is not asked at each list"


def test_every_built_in_model_has_a_definition_with_hashes_and_a_backend_of_ours_or_localai() -> None:
    found = built_in_definitions()
    entries = {each.id: each for each in read_built_in_models().entries}
    assert found.keys() == entries.keys()
    assert 20 <= len(found) <= 30
    for id, each in found.items():
        assert each.backend in ("llama-cpp", "whisper", "kokoros"), id
        assert each.files, id
        assert all(len(file.sha256) == 64 for file in each.files), id
        assert each.weights in {file.path for file in each.files}, id
        shown = available_view(entries[id], ())
        assert shown.description.endswith("."), id
    uses = {use for each in found.values() for use in each.whole["known_usecases"]}
    assert {"chat", "vision", "embeddings", "rerank", "transcript", "tts"} <= uses
