"""What is known of backends that are installed: how they run, if a gallery says so, and never by asking a registry."""

from __future__ import annotations

import msgspec

from corral.contract.manifest import Manifest
from corral.controller.backends.catalogue import MachineKind
from corral.controller.replicas.builds import Builds
from corral.controller.scheduler.world import Build, BuildState
from corral.kit.clock import SystemClock
from corral.kit.errors import Unavailable
from corral.store.records import TargetBuild
from tests.support.scripted_catalogue import ScriptedCatalogue
from tests.support.waiting import until

KIND = MachineKind("nvidia", "linux/amd64", "3.11")


async def test_how_an_installed_backend_runs_is_read_in_the_gallery() -> None:
    catalogue = ScriptedCatalogue()
    known = catalogue.builds["vllm"]["nvidia"]
    assert isinstance(known, TargetBuild)
    catalogue.builds["vllm"]["nvidia"] = msgspec.structs.replace(known, manifest=Manifest(devices="many"))
    found: list[bool] = []
    async with Builds(catalogue, SystemClock(), on_found=lambda: found.append(True)) as builds:
        assert builds.installed("vllm", KIND) == Build(BuildState.INSTALLED), "used at once"
        assert not builds.is_looking_up("vllm")
        await until(lambda: found, "what the gallery says")
        assert builds.installed("vllm", KIND) == Build(BuildState.INSTALLED, devices="many")
    assert catalogue.asked == []


async def test_a_gallery_that_is_away_takes_nothing_from_an_installed_backend() -> None:
    catalogue = ScriptedCatalogue()
    catalogue.builds["vllm"]["nvidia"] = Unavailable("the registry does not answer")
    async with Builds(catalogue, SystemClock(), on_found=lambda: None) as builds:
        builds.installed("vllm", KIND)
        await until(lambda: not builds.running(), "end of the look")
        assert builds.installed("vllm", KIND) == Build(BuildState.INSTALLED)
