"""From a name and a machine to exact sources, or a refusal with its reasons."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from corral.contract.codec import decode, encode
from corral.contract.sources import ImageIndex, PlatformImage, TextFile, Wheel
from corral.gallery.backends.entries import read_index
from corral.gallery.backends.library import BackendLibrary
from corral.gallery.backends.locator import BuildLocator, LocatorOptions
from corral.gallery.backends.resolution import Machine, ResolvedBackend, Unresolved
from corral.gallery.backends.resolver import Resolver
from corral.gallery.backends.upgrades import AvailableBuild
from corral.gallery.galleries import BUILT_IN, Gallery, Verification
from corral.gallery.pypi.lock import Lock, NoWheels, digest_of_lock
from corral.kit.errors import CorralError, Failed, NotFound, Unreachable
from tests.support.manual_clock import ManualClock

OWN = b"""
- &engine
  name: engine
  alias: engine
  capabilities: {default: engine-pypi, nvidia: g@cuda12-engine, nvidia-l4t: g@l4t-engine}
- <<: *engine
  name: engine-pypi
  uri: pypi://engine
  corral: {protocol: openai, command: [python, serve.py, "{port}"], files: {serve.py: "print()"}}
"""
THEIRS = b"""
- name: cuda12-engine
  uri: quay.io/o/backends:latest-cuda12-engine
  mirrors: [o/backends:latest-cuda12-engine]
- {name: l4t-engine, uri: "quay.io/o/backends:latest-l4t-engine"}
- {name: archive, uri: "https://a.example/x.tar.gz", sha256: "%s", mirrors: ["https://b.example/x.tar.gz", "oci://b/x:1"]}
- {name: loose, uri: "https://a.example/y.tar.gz", version: "3"}
""" % (b"c" * 64)
PRIMARY = "quay.io/o/backends:latest-cuda12-engine"
MIRROR = "docker.io/o/backends:latest-cuda12-engine"
BRANCH = "quay.io/o/backends:master-cuda12-engine"
DIGEST = "sha256:" + "d" * 64
CPU = Machine("default", "linux/amd64", "3.11")
GPU = Machine("nvidia-cuda-12", "linux/amd64", "3.11")
ARM_GPU = Machine("nvidia-l4t-cuda-12", "linux/arm64", "3.11")
WHEELS = (Wheel("engine-2-py3-none-any.whl", "https://i/engine-2-py3-none-any.whl", "a" * 64, 0, "engine", "2"),)


def index(*platforms: str, digest: str = DIGEST) -> ImageIndex:
    return ImageIndex(digest, tuple(PlatformImage(platform, f"sha256:{platform}", 1000) for platform in platforms))


class FakeRegistry:
    def __init__(self) -> None:
        self.known: dict[str, ImageIndex | CorralError] = {}
        self.requests: list[str] = []

    async def look_up(self, reference: str) -> ImageIndex:
        self.requests.append(reference)
        await asyncio.sleep(0)
        answer = self.known.get(reference, NotFound(f"there is no {reference}"))
        if isinstance(answer, CorralError):
            raise answer
        return answer


class FakeLocker:
    def __init__(self) -> None:
        self.fault: CorralError | None = None
        self.requests: list[tuple[str, str, str]] = []

    async def lock(self, requirement: str, *, platform: str, python: str) -> Lock:
        self.requests.append((requirement, platform, python))
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        return Lock("engine==2", "2", python, WHEELS)

    async def lock_pinned(self, requirements: str, *, platform: str, python: str) -> tuple[Wheel, ...]:
        return (await self.lock(requirements, platform=platform, python=python)).wheels


async def fill_sizes(wheels: Sequence[Wheel]) -> tuple[Wheel, ...]:
    return tuple(msgspec.structs.replace(wheel, size=77) for wheel in wheels)


class FakeWeb:
    def __init__(self) -> None:
        self.down = False

    async def fetch(self, url: str) -> bytes:
        if self.down:
            raise Unreachable("down")
        return THEIRS


class Setup:
    def __init__(self, verification: Verification | None = None, **options: object) -> None:
        self.images, self.wheels, self.web, self.clock = FakeRegistry(), FakeLocker(), FakeWeb(), ManualClock()
        gallery = Gallery("g", "https://g/index.yaml", (), verification)
        library = BackendLibrary(
            [gallery], self.web.fetch, clock=self.clock, built_in=lambda: read_index(BUILT_IN, OWN)
        )
        chosen = LocatorOptions(own_python="3.12", **options)  # type: ignore[arg-type]
        self.resolver = Resolver(
            library, BuildLocator(self.images, self.wheels, clock=self.clock, fill_sizes=fill_sizes, options=chosen)
        )

    async def resolved(self, name: str, machine: Machine) -> ResolvedBackend:
        got = await self.resolver.resolve(name, machine)
        assert isinstance(got, ResolvedBackend), got
        return got

    async def refused(self, name: str, machine: Machine) -> Unresolved:
        got = await self.resolver.resolve(name, machine)
        assert isinstance(got, Unresolved), got
        return got


@pytest.fixture
def setup() -> Setup:
    return Setup()


async def test_wheels(setup: Setup) -> None:
    got = await setup.resolved("Engine", CPU)
    assert (got.backend, got.variant, got.alias, got.version) == ("Engine", "engine-pypi", "engine", "2")
    assert got.gallery_url == "builtin://index.yaml"
    assert got.reason == "the build for default"
    (source,) = got.sources
    assert (source.kind, source.uri, source.platform, source.python) == ("pypi", "engine==2", "linux/amd64", "3.11")
    assert source.wheels[0].size == got.size_bytes == 77
    assert source.files == (TextFile("serve.py", "print()"),)
    assert got.digest == source.digest == digest_of_lock(WHEELS, source.files)
    assert got.manifest is not None
    assert got.manifest.protocol == "openai"


async def test_a_machine_that_does_not_say_its_python_is_taken_to_have_ours(setup: Setup) -> None:
    await setup.resolved("engine", Machine("default", "linux/amd64"))
    assert setup.wheels.requests == [("engine", "linux/amd64", "3.12")]


async def test_an_image_with_its_mirrors(setup: Setup) -> None:
    setup.images.known = {PRIMARY: index("linux/amd64", "linux/arm64/v8")}
    got = await setup.resolved("engine", GPU)
    assert got.variant == "cuda12-engine"
    assert got.gallery_url == "https://g/index.yaml"
    assert got.manifest is None
    assert [(s.kind, s.uri, s.digest, s.size, s.platform) for s in got.sources] == [
        ("oci", PRIMARY, DIGEST, 1000, "linux/amd64"),
        ("oci", MIRROR, DIGEST, 1000, "linux/amd64"),
    ]
    assert got.digest == DIGEST
    assert setup.images.requests == [PRIMARY]


async def test_an_entry_is_chosen_without_asking_any_registry(setup: Setup) -> None:
    chosen = [await setup.resolver.choose("engine", machine) for machine in (CPU, GPU)]
    assert [entry and entry.name for entry in chosen] == ["engine-pypi", "cuda12-engine"]
    assert await setup.resolver.choose("nobody", CPU) is None
    assert (setup.images.requests, setup.wheels.requests) == ([], [])


async def test_a_mirror_stands_in_for_the_primary(setup: Setup) -> None:
    setup.images.known = {PRIMARY: Unreachable("down"), MIRROR: index("linux/amd64")}
    got = await setup.resolved("engine", GPU)
    assert [source.uri for source in got.sources] == [MIRROR, PRIMARY]


async def test_the_branchs_build_when_there_is_no_release(setup: Setup) -> None:
    setup.images.known = {BRANCH: index("linux/amd64", digest="sha256:branch")}
    got = await setup.resolved("engine", GPU)
    assert [(source.uri, source.digest) for source in got.sources] == [(BRANCH, "sha256:branch")]
    assert setup.images.requests == [PRIMARY, MIRROR, BRANCH]


async def test_a_hiccup_does_not_turn_a_release_into_a_development_build(setup: Setup) -> None:
    setup.images.known = {PRIMARY: Unreachable("the registry is down"), BRANCH: index("linux/amd64")}
    got = await setup.refused("engine", GPU)
    assert got.reason == "the registry is down"
    assert not got.permanent
    assert BRANCH not in setup.images.requests


async def test_development_builds_can_be_preferred() -> None:
    setup = Setup(prefer_development=True)
    setup.images.known = {PRIMARY: index("linux/amd64"), BRANCH: index("linux/amd64", digest="sha256:branch")}
    assert (await setup.resolved("engine", GPU)).digest == "sha256:branch"
    del setup.images.known[BRANCH]
    setup.clock.advance(61)
    assert (await setup.resolved("engine", GPU)).digest == DIGEST


async def test_a_build_that_is_not_there_for_the_platform_is_passed_over(setup: Setup) -> None:
    setup.images.known = {
        "quay.io/o/backends:latest-l4t-engine": index("linux/amd64"),
        PRIMARY: index("linux/amd64"),
    }
    got = await setup.resolved("engine", ARM_GPU)
    assert got.variant == "engine-pypi"
    assert got.tried == (
        "nvidia-l4t → l4t-engine: no linux/arm64 build",
        "nvidia → cuda12-engine: no linux/arm64 build",
        "default → engine-pypi: chosen",
    )


async def test_no_build_for_the_platform_at_all(setup: Setup) -> None:
    setup.wheels.fault = NoWheels("engine has no wheels for linux/arm64 and Python 3.11")
    got = await setup.refused("engine", Machine("default", "linux/arm64"))
    assert (got.reason, got.permanent) == ("no linux/arm64 build", True)
    assert got.tried == ("default → engine-pypi: no linux/arm64 build",)


async def test_an_image_that_does_not_exist(setup: Setup) -> None:
    got = await setup.refused("l4t-engine", ARM_GPU)
    assert "there is no quay.io/o/backends:latest-l4t-engine" in got.reason
    assert got.permanent


async def test_a_gpu_machine_gets_the_cpu_build_and_says_why_when_the_gallery_is_away(setup: Setup) -> None:
    setup.web.down = True
    got = await setup.resolved("engine", GPU)
    assert got.variant == "engine-pypi"
    assert got.reason == (
        "no build for nvidia-cuda-12 itself, default is the nearest; "
        "nvidia → g@cuda12-engine: the gallery g could not be read: down"
    )


async def test_unknown_backends(setup: Setup) -> None:
    got = await setup.refused("enigne", CPU)
    assert got.nearest[0] == "engine"
    assert got.permanent
    fresh = Setup()
    fresh.web.down = True
    away = await fresh.refused("archive", CPU)
    assert not away.permanent  # it may be in the gallery that could not be read


async def test_a_locker_that_fails_is_tried_again_later(setup: Setup) -> None:
    setup.wheels.fault = Failed("uv did not end within 300 s")
    got = await setup.refused("engine", CPU)
    assert (got.reason, got.permanent) == ("uv did not end within 300 s", False)


async def test_archives(setup: Setup) -> None:
    got = await setup.resolved("archive", CPU)
    assert [(s.kind, s.uri, s.digest) for s in got.sources] == [
        ("http", "https://a.example/x.tar.gz", "sha256:" + "c" * 64),
        ("http", "https://b.example/x.tar.gz", "sha256:" + "c" * 64),
    ]
    loose = await setup.resolved("loose", CPU)
    assert (loose.version, loose.digest) == ("3", "")


@pytest.mark.parametrize("name", ["cuda12-engine", "loose"])
async def test_integrity_can_be_required(name: str) -> None:
    strict = Setup(require_integrity=True)
    strict.images.known = {PRIMARY: index("linux/amd64")}
    got = await strict.refused(name, GPU)
    assert "integrity is required" in got.reason
    assert got.permanent
    await strict.resolved("archive", GPU)
    await strict.resolved("engine-pypi", CPU)


async def test_signatures_that_are_demanded_and_cannot_be_checked() -> None:
    setup = Setup(Verification(issuer="https://issuer.example"))
    setup.images.known = {PRIMARY: index("linux/amd64")}
    got = await setup.refused("engine", GPU)
    assert "requires signatures" in got.reason
    assert got.permanent


async def test_a_fleet_costs_one_question_per_kind_of_machine(setup: Setup) -> None:
    setup.images.known = {PRIMARY: index("linux/amd64")}
    fleet = [CPU] * 500 + [GPU] * 500 + [Machine("nvidia-cuda-13", "linux/amd64", "3.11")] * 10
    got = await setup.resolver.resolve_all("engine", fleet)
    assert {machine.capability: each.variant for machine, each in got.items() if isinstance(each, ResolvedBackend)} == {
        "default": "engine-pypi",
        "nvidia-cuda-12": "cuda12-engine",
        "nvidia-cuda-13": "cuda12-engine",
    }
    assert len(setup.wheels.requests) == 1
    assert setup.images.requests == [PRIMARY]


async def test_answers_are_used_again_for_a_minute(setup: Setup) -> None:
    await setup.resolved("engine", CPU)
    setup.clock.advance(59)
    await setup.resolved("engine", CPU)
    assert len(setup.wheels.requests) == 1
    setup.clock.advance(2)
    await setup.resolved("engine", CPU)
    assert len(setup.wheels.requests) == 2


async def test_failures_are_not_remembered(setup: Setup) -> None:
    setup.images.known = {PRIMARY: Unreachable("down")}
    await setup.refused("engine", GPU)
    setup.images.known = {PRIMARY: index("linux/amd64")}
    await setup.resolved("engine", GPU)


async def test_a_uri_of_ones_own(setup: Setup) -> None:
    setup.images.known = {"r.example/mine:1": index("linux/amd64")}
    got = await setup.resolver.resolve_uri("oci://r.example/mine:1", CPU, name="mine", alias="m")
    assert isinstance(got, ResolvedBackend)
    assert (got.variant, got.alias, got.digest, got.gallery_url) == ("mine", "m", DIGEST, "")
    unnamed = await setup.resolver.resolve_uri("oci://r.example/mine:1", CPU)
    assert isinstance(unnamed, Unresolved)
    assert unnamed.permanent
    arm = await setup.resolver.resolve_uri("oci://r.example/mine:1", ARM_GPU, name="mine")
    assert isinstance(arm, Unresolved)
    assert arm.reason == "no linux/arm64 build"
    local = await setup.resolver.resolve_uri("/srv/mock", Machine())
    assert isinstance(local, ResolvedBackend)
    assert (local.sources[0].kind, local.sources[0].uri) == ("directory", "/srv/mock")


async def test_what_upgrades_are_compared_with(setup: Setup) -> None:
    setup.images.known = {PRIMARY: index("linux/amd64")}
    catalogue = await setup.resolver.library.catalogue()
    entries = {entry.name: entry for entry in catalogue.entries}
    needed = {
        ("g@cuda12-engine", ""): (entries["cuda12-engine"], GPU),
        ("g@l4t-engine", ""): (entries["l4t-engine"], ARM_GPU),
        ("corral@engine-pypi", CPU.runtime): (entries["engine-pypi"], CPU),
    }
    got = await setup.resolver.available(needed)
    assert got["g@cuda12-engine", ""] == AvailableBuild(DIGEST)
    assert got["corral@engine-pypi", "linux/amd64 python3.11"].version == "2"
    assert ("g@l4t-engine", "") not in got  # it could not be found; no news


async def test_what_was_resolved_can_be_stored(setup: Setup) -> None:
    got = await setup.resolved("engine", CPU)
    assert decode(ResolvedBackend, encode(got)) == got
