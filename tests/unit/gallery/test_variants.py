"""Variants are chosen by capability and platform, and the choice says why (docs/explanation/design.md#variants)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.gallery.backends.catalogue import AliasGroup, BackendCatalogue
from corral.gallery.backends.compatibility import capability_chain, why_incompatible
from corral.gallery.backends.direct import direct_entry
from corral.gallery.backends.entries import BackendEntry, read_index
from corral.gallery.backends.variants import ChosenVariant, NoVariant, choose_variant
from corral.gallery.galleries import Gallery

INDEX = """
- name: engine
  capabilities:
    default: cpu-engine
    nvidia: cuda12-engine
    nvidia-cuda-13: cuda13-engine
    nvidia-l4t: l4t-engine
    amd: rocm-engine
    metal-darwin-arm64: metal-engine
    vulkan: ghost
- {name: gpu-only, capabilities: {nvidia: cuda12-engine}}
- {name: cpu-key, capabilities: {cpu: cpu-engine}}
- {name: lying, capabilities: {default: cuda12-engine, nvidia: rocm-engine}}
- {name: newest, capabilities: {default: cpu-engine, nvidia: cuda13-engine}}
- {name: cpu-engine, uri: "oci://r.example/e:cpu"}
- {name: cuda12-engine, uri: "oci://r.example/e:cuda12"}
- {name: cuda13-engine, uri: "oci://r.example/e:cuda13"}
- {name: l4t-engine, uri: "oci://r.example/e:l4t"}
- {name: rocm-engine, uri: "oci://r.example/e:rocm"}
- {name: metal-engine, uri: "oci://r.example/e:metal"}
- {name: linux-only, uri: "https://example.com/a.tar", corral: {platforms: [linux/amd64]}}
- {name: cpu-voice, alias: voice, uri: "oci://r.example/v:cpu"}
- {name: cuda12-voice, alias: voice, uri: "oci://r.example/v:cuda12"}
- {name: cuda12-voice-development, alias: voice, uri: "oci://r.example/v:dev"}
"""
CATALOGUE = BackendCatalogue([read_index(Gallery("g", "u"), INDEX.encode())])


def choose(
    name: str,
    capability: str,
    platform: str = "linux/amd64",
    platforms: dict[str, list[str]] | None = None,
    missing: dict[str, str] | None = None,
) -> ChosenVariant | NoVariant:
    wanted = CATALOGUE.find(name)
    assert isinstance(wanted, BackendEntry | AliasGroup)
    return choose_variant(
        wanted,
        CATALOGUE,
        capability=capability,
        platform=platform,
        platforms=platforms or {},
        missing=missing or {},
    )


@pytest.mark.parametrize(
    ("name", "capability", "platform", "build"),
    [
        ("engine", "default", "linux/amd64", "cpu-engine"),
        ("engine", "", "linux/amd64", "cpu-engine"),
        ("engine", "nvidia-cuda-12", "linux/amd64", "cuda12-engine"),
        ("engine", "nvidia-cuda-13", "linux/amd64", "cuda13-engine"),
        ("engine", "nvidia", "linux/amd64", "cuda12-engine"),
        ("engine", "nvidia-l4t-cuda-12", "linux/arm64", "l4t-engine"),
        ("engine", "amd", "linux/amd64", "rocm-engine"),
        ("engine", "intel", "linux/amd64", "cpu-engine"),
        ("engine", "metal", "darwin/arm64", "metal-engine"),
        ("engine", "disable", "linux/amd64", "cpu-engine"),
        ("engine", "vulkan", "linux/amd64", "cpu-engine"),  # its build is not in the index
        ("lying", "nvidia", "linux/amd64", "cuda12-engine"),  # the build under nvidia is for AMD, the next one fits
        ("cpu-key", "nvidia", "linux/amd64", "cpu-engine"),
        ("cuda12-engine", "nvidia-cuda-12", "linux/amd64", "cuda12-engine"),
        ("cuda12-engine", "disable", "linux/amd64", "cuda12-engine"),
        ("linux-only", "default", "linux/amd64", "linux-only"),
        ("engine", "nvidia-cuda-12", "", "cpu-engine"),  # a LocalAI worker chooses itself: it knows no prefixes
        ("newest", "nvidia-cuda-12", "linux/amd64", "cpu-engine"),  # a driver for CUDA 12 does not run CUDA 13
        ("newest", "nvidia-cuda-13", "linux/amd64", "cuda13-engine"),
        ("newest", "nvidia", "linux/amd64", "cuda13-engine"),
        ("linux-only", "default", "", "linux-only"),  # a LocalAI worker does not say its platform
        ("voice", "nvidia-cuda-12", "linux/amd64", "cuda12-voice"),
        ("voice", "default", "linux/amd64", "cpu-voice"),
    ],
)
def test_choices(name: str, capability: str, platform: str, build: str) -> None:
    choice = choose(name, capability, platform)
    assert isinstance(choice, ChosenVariant)
    assert choice.entry.name == build
    assert choice.tried[-1].outcome == "chosen"


@pytest.mark.parametrize(
    ("name", "capability", "platform", "reason"),
    [
        ("gpu-only", "default", "linux/amd64", "gpu-only has no build for capability default (there are nvidia)"),
        ("cuda12-engine", "default", "linux/amd64", "needs an NVIDIA GPU, the machine has capability default"),
        ("linux-only", "default", "linux/arm64", "no linux/arm64 build"),
    ],
)
def test_refusals(name: str, capability: str, platform: str, reason: str) -> None:
    choice = choose(name, capability, platform)
    assert isinstance(choice, NoVariant)
    assert choice.reason == reason


def test_the_reason_and_the_chain() -> None:
    direct = choose("cpu-engine", "default")
    exact = choose("engine", "nvidia-cuda-13")
    near = choose("engine", "nvidia-cuda-12")
    ghost = choose("engine", "vulkan")
    assert direct.reason == "named directly"
    assert exact.reason == "the build for nvidia-cuda-13"
    assert near.reason == "no build for nvidia-cuda-12 itself, nvidia is the nearest"
    assert [str(step) for step in ghost.tried] == [
        "vulkan → ghost: there is no ghost in the gallery g",
        "default → cpu-engine: chosen",
    ]
    assert ghost.reason.startswith("no build for vulkan itself, default is the nearest; vulkan → ghost")


def test_a_build_that_is_not_there_for_the_platform_is_passed_over() -> None:
    platforms = {"g@cuda12-engine": ["linux/amd64"], "g@cpu-engine": ["linux/amd64", "linux/arm64"]}
    choice = choose("engine", "nvidia", "linux/arm64", platforms)
    assert isinstance(choice, ChosenVariant)
    assert [str(step) for step in choice.tried] == [
        "nvidia → cuda12-engine: no linux/arm64 build",
        "default → cpu-engine: chosen",
    ]
    nowhere = choose("engine", "default", "linux/arm64", {"g@cpu-engine": ["linux/amd64"]})
    assert isinstance(nowhere, NoVariant)
    assert nowhere.reason == "no linux/arm64 build"
    assert [str(step) for step in nowhere.tried] == ["default → cpu-engine: no linux/arm64 build"]


def test_an_index_without_any_image_is_built_for_nobody() -> None:
    assert isinstance(choose("cpu-engine", "default", platforms={"g@cpu-engine": []}), NoVariant)


def test_a_source_that_does_not_exist_is_passed_over_with_its_reason() -> None:
    choice = choose("engine", "amd", missing={"g@rocm-engine": "no such image"})
    assert isinstance(choice, ChosenVariant)
    assert str(choice.tried[0]) == "amd → rocm-engine: no such image"


def test_development_builds_come_after_releases() -> None:
    choice = choose("voice", "nvidia", platforms={"g@cuda12-voice": []})
    assert isinstance(choice, ChosenVariant)
    assert choice.entry.name == "cpu-voice"


NVIDIA = ("nvidia", "nvidia-cuda-12", "nvidia-cuda-13", "nvidia-l4t", "nvidia-l4t-cuda-12")
CAPABILITIES = st.sampled_from(
    [*NVIDIA, "default", "amd", "intel", "vulkan", "metal", "darwin-x86", "disable", "cpu", "", "unheard-of-thing"]
)
PLATFORMS = st.sampled_from(["", "linux/amd64", "linux/arm64", "darwin/arm64"])
BUILDS = ["cpu-x", "cuda12-x", "cuda13-x", "rocm-x", "intel-x", "metal-x", "l4t-x", "vulkan-x", "x-plain", "not-there"]
KEYS = ["default", "cpu", "nvidia", "nvidia-cuda-12", "nvidia-l4t", "amd", "intel", "metal", "vulkan", "nvidia-cuda-13"]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[BackendEntry, BackendCatalogue, dict[str, list[str]]]:
    mapped = draw(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(BUILDS), min_size=1))
    text = "- {name: x, capabilities: {" + ", ".join(f"{k}: {v}" for k, v in mapped.items()) + "}}\n"
    text += "".join(f'- {{name: {name}, uri: "oci://r.example/e:{name}"}}\n' for name in BUILDS if name != "not-there")
    index = read_index(Gallery("g", "u"), text.encode())
    known = st.lists(st.sampled_from(["linux/amd64", "linux/arm64", "darwin/arm64"]), unique=True)
    platforms = draw(st.dictionaries(st.sampled_from([f"g@{name}" for name in BUILDS]), known))
    return index.entries[0], BackendCatalogue([index]), platforms


@given(worlds(), CAPABILITIES, PLATFORMS)
def test_what_is_chosen_fits(
    world: tuple[BackendEntry, BackendCatalogue, dict[str, list[str]]], capability: str, platform: str
) -> None:
    meta, catalogue, platforms = world
    choice = choose_variant(meta, catalogue, capability=capability, platform=platform, platforms=platforms)
    if isinstance(choice, ChosenVariant):
        assert not choice.entry.is_meta
        assert why_incompatible(choice.entry, capability) == ""
        assert not platform or platform in platforms.get(choice.entry.id, [platform])
        assert choice.entry.name in meta.capabilities.values()
    else:
        assert choice.reason
        assert all(step.outcome != "chosen" for step in choice.tried)


@given(worlds(), CAPABILITIES, PLATFORMS)
def test_nothing_earlier_in_the_chain_would_have_fitted(
    world: tuple[BackendEntry, BackendCatalogue, dict[str, list[str]]], capability: str, platform: str
) -> None:
    meta, catalogue, platforms = world
    choice = choose_variant(meta, catalogue, capability=capability, platform=platform, platforms=platforms)
    names = [meta.capabilities[key] for key in capability_chain(capability, platform) if key in meta.capabilities]
    tried = list(dict.fromkeys(names))
    assert [step.build for step in choice.tried] == tried[: len(choice.tried)]
    if isinstance(choice, NoVariant):
        assert len(choice.tried) == len(tried)


@given(worlds(), CAPABILITIES, PLATFORMS)
def test_learning_that_the_choice_is_not_built_ends_in_another_or_in_a_refusal(
    world: tuple[BackendEntry, BackendCatalogue, dict[str, list[str]]], capability: str, platform: str
) -> None:
    meta, catalogue, platforms = world
    seen: set[str] = set()
    missing: dict[str, str] = {}
    while isinstance(
        choice := choose_variant(
            meta, catalogue, capability=capability, platform=platform, platforms=platforms, missing=missing
        ),
        ChosenVariant,
    ):
        assert choice.entry.id not in seen
        seen.add(choice.entry.id)
        missing[choice.entry.id] = "gone"


@pytest.mark.parametrize(
    ("name", "capability", "note"),
    [
        (
            "newest",
            "nvidia-cuda-12",
            "cpu-engine: no build for nvidia-cuda-12 itself, default is the nearest; "
            "nvidia → cuda13-engine: needs CUDA 13, the machine has CUDA 12",
        ),
        ("engine", "intel", "cpu-engine: no build for intel itself, default is the nearest"),
        ("engine", "nvidia-cuda-12", ""),
        ("engine", "default", ""),
        ("voice", "nvidia-cuda-12", ""),
    ],
)
def test_a_machine_with_a_gpu_that_gets_another_build_is_told_why(name: str, capability: str, note: str) -> None:
    choice = choose(name, capability)
    assert isinstance(choice, ChosenVariant)
    assert choice.note == note


@pytest.mark.parametrize("uri", ["oci://r.example/team/mlx:1", "/srv/metal", "https://example.com/rocm.tar.gz"])
def test_what_is_named_by_its_uri_is_trusted_whatever_words_are_in_it(uri: str) -> None:
    choice = choose_variant(
        direct_entry(uri, name="mine"), CATALOGUE, capability="default", platform="linux/amd64", platforms={}
    )
    assert isinstance(choice, ChosenVariant)
