"""LocalAI workers beside ours: which builds they would find, and where gateways ask their processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from corral.contract.http import Target
from corral.contract.manifest import Manifest
from corral.contract.view import FleetView, ViewModel, ViewNode, ViewReplica
from corral.controller.backends.catalogue import CatalogueEntry, MachineKind
from corral.controller.backends.plan import NoBuild
from corral.controller.replicas.builds import Builds
from corral.gateway.routing.in_flight import InFlight
from corral.gateway.routing.pick import Policy
from corral.gateway.routing.prefixes import PrefixIndex
from corral.gateway.routing.replicas import ModelQueue, ModelRoute, place_replicas
from corral.kit.clock import SystemClock
from corral.kit.errors import NotFound, Unavailable
from corral.store.records import BackendRequest, TargetBuild
from tests.support.scripted_catalogue import ScriptedCatalogue, build
from tests.support.waiting import until

KIND = MachineKind("nvidia-cuda-12")


class TwoGalleries(ScriptedCatalogue):
    """One cannot be read; the other has some names of the built-in one for builds of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.theirs: dict[str, TargetBuild | NoBuild] = {
            "llama-cpp": build("cuda12-llama-cpp"),
            "wheels": msgspec.structs.replace(build("wheels"), manifest=Manifest(protocol="openai", command=("x",))),
            "metal-only": NoBuild("no build for nvidia-cuda-12"),
        }
        self.broken = False

    def galleries(self) -> Sequence[dict[str, Any]]:
        return [{"name": "broken", "url": "x"}, {"name": "localai", "url": "y"}]

    async def look_up(self, asked: BackendRequest) -> CatalogueEntry:
        if asked.gallery == "broken" and self.broken:
            raise Unavailable("nobody can read it")
        if asked.gallery == "localai" and asked.backend in self.theirs:
            return CatalogueEntry(asked.backend, request=asked)
        if asked.gallery:
            raise NotFound(f"{asked.gallery} has no {asked.backend}")
        return await super().look_up(asked)

    async def resolve(self, asked: BackendRequest, kind: MachineKind, /) -> TargetBuild | NoBuild:
        return self.theirs[asked.backend] if asked.gallery else await super().resolve(asked, kind)


@pytest.mark.parametrize(
    ("backend", "broken", "state", "reason"),
    [
        ("llama-cpp", False, "installable", ""),
        ("llama-cpp", True, "installable", ""),  # another gallery has it
        ("wheels", False, "missing", "gRPC only"),
        ("metal-only", False, "missing", "no build for nvidia-cuda-12"),
        ("vllm", False, "missing", "no gallery that a LocalAI worker can read"),  # ours has it, and theirs not
        ("vllm", True, "unknown", "nobody can read it"),
    ],
)
async def test_a_localai_worker_finds_what_its_galleries_have(
    backend: str, broken: bool, state: str, reason: str
) -> None:
    catalogue = TwoGalleries()
    catalogue.broken = broken
    found: list[bool] = []
    async with Builds(catalogue, SystemClock(), on_found=lambda: found.append(True)) as builds:
        builds.for_localai(backend, KIND)
        await until(lambda: bool(found), "what the galleries say")
        known = builds.for_localai(backend, KIND)
        assert known.state.value == state
        assert reason in known.reason
        assert builds.for_corral(backend, KIND).state.value == "looking", "ours is another question"


def test_processes_of_nodes_without_an_ingress_are_asked_at_the_controller() -> None:
    controller = Target(unix_path="/run/controller.sock")
    nodes = (
        ViewNode("n1", "ours", "healthy", "http://10.0.0.1:50050", "t1"),
        ViewNode("n2", "theirs", "healthy", "", "t2", via_controller=True),
    )
    replicas = (ViewReplica("p1", "n1", "m", 0, "r"), ViewReplica("p/2", "n2", "m", 0, "r"))
    model = ViewModel("m", revision="r")
    way = ModelRoute(model, Policy(), ModelQueue(lambda: None), PrefixIndex(ttl_s=1, half_life_s=1))
    place_replicas(FleetView(nodes=nodes, models=(model,), replicas=replicas), {"m": way}, InFlight(), controller)
    routes = [replica.route(b"/v1/chat/completions", "m") for replica in way.replicas]
    assert [(route.target, route.path, route.ingress_token) for route in routes] == [
        (Target("10.0.0.1", 50050), b"/replicas/p1/v1/chat/completions", b"t1"),
        (controller, b"/replicas/p%2F2/v1/chat/completions", b"t2"),
    ]
