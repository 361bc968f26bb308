"""Which builds run on which machines, judged by names; lookup in several galleries."""

from __future__ import annotations

import pytest

from corral.gallery.backends.catalogue import AliasGroup, BackendCatalogue, UnknownBackend
from corral.gallery.backends.compatibility import (
    capability_chain,
    is_hardware_specific,
    is_listed,
    preference,
    why_incompatible,
)
from corral.gallery.backends.entries import BackendEntry, read_index
from corral.gallery.galleries import Gallery


def entry(name: str, uri: str = "https://example.com/a.tar") -> BackendEntry:
    return BackendEntry(gallery=Gallery("g", "u"), name=name, uri=uri)


@pytest.mark.parametrize(
    ("capability", "platform", "chain"),
    [
        ("nvidia-cuda-12", "", ["nvidia-cuda-12", "nvidia-cuda", "nvidia", "default", "cpu"]),
        ("nvidia-l4t-cuda-13", "", ["nvidia-l4t-cuda-13", "nvidia-l4t-cuda", "nvidia-l4t", "nvidia", "default", "cpu"]),
        ("metal", "darwin/arm64", ["metal", "metal-darwin-arm64", "default", "cpu"]),
        ("default", "", ["default", "cpu"]),
        ("", "", ["default", "cpu"]),
        ("cpu", "", ["cpu", "default"]),
    ],
)
def test_the_chain(capability: str, platform: str, chain: list[str]) -> None:
    assert list(capability_chain(capability, platform)) == chain


# name, capabilities it runs on, capabilities it does not
FILTER = [
    ("metal-llama-cpp", ["metal", "darwin-x86", "disable"], ["default", "nvidia-cuda-12", "amd", "intel", "vulkan"]),
    ("darwin-x86-thing", ["metal", "darwin-x86"], ["default"]),
    ("nvidia-l4t-arm64-llama-cpp", ["nvidia-l4t", "nvidia-l4t-cuda-12"], ["nvidia", "nvidia-cuda-12", "default"]),
    ("cuda12-llama-cpp", ["nvidia", "nvidia-cuda-13", "nvidia-l4t"], ["default", "amd", "metal", "nvidiax"]),
    ("rocm-llama-cpp", ["amd"], ["nvidia", "intel", "default"]),
    ("intel-sycl-f16-llama-cpp", ["intel"], ["amd", "default"]),
    ("cpu-llama-cpp", ["default", "nvidia", "metal", "amd"], []),
    ("vulkan-llama-cpp", ["default", "vulkan", "amd"], []),
    # Where the contract's filter goes wrong:
    ("chip-detector", ["default", "nvidia"], []),
    ("amd64-tools", ["default"], []),
    ("cpu-mlx", ["default", "nvidia-cuda-12", "metal"], []),
    ("cuda12-mlx", ["nvidia-cuda-12"], ["default", "metal"]),
    ("mlx", ["metal"], ["default", "nvidia"]),
]


@pytest.mark.parametrize(("name", "fits", "not_fits"), FILTER)
def test_names_say_where_a_build_runs(name: str, fits: list[str], not_fits: list[str]) -> None:
    for capability in fits:
        assert why_incompatible(entry(name), capability) == "", capability
    for capability in not_fits:
        assert f"the machine has capability {capability}" in why_incompatible(entry(name), capability)


def test_the_tag_counts_and_the_host_does_not() -> None:
    tagged = entry("thing", "quay.io/go-skynet/local-ai-backends:latest-gpu-nvidia-cuda-12-thing")
    assert why_incompatible(tagged, "default") == "needs an NVIDIA GPU, the machine has capability default"
    assert why_incompatible(entry("thing", "https://intel.example.com/amd/thing.tar"), "default") == ""


@pytest.mark.parametrize(
    ("name", "uri", "capability", "why"),
    [
        ("cuda13-ds4", "", "nvidia-cuda-12", "needs CUDA 13, the machine has CUDA 12"),
        ("cuda13-ds4", "", "nvidia-l4t-cuda-12", "needs CUDA 13, the machine has CUDA 12"),
        ("nvidia-ds4", "quay.io/x/y:latest-gpu-nvidia-cuda-13-ds4", "nvidia-cuda-12", "needs CUDA 13, the machine has"),
        ("cuda128-ds4", "", "nvidia-cuda-11", "needs CUDA 12, the machine has CUDA 11"),
        ("cuda13-ds4", "", "nvidia-cuda-13", ""),
        ("cuda12-ds4", "", "nvidia-cuda-13", ""),
        ("cuda13-ds4", "", "nvidia", ""),
        ("cuda-ds4", "", "nvidia-cuda-12", ""),
    ],
)
def test_a_build_for_a_newer_cuda_than_the_machine_has(name: str, uri: str, capability: str, why: str) -> None:
    found = why_incompatible(entry(name, uri or "https://example.com/a.tar"), capability)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_hardware_specific_builds() -> None:
    assert is_hardware_specific(entry("cuda12-x"))
    assert not is_hardware_specific(entry("cpu-x"))


def test_preferences_among_builds_with_one_alias() -> None:
    names = ["cpu-x", "vulkan-x", "cuda12-x", "rocm-x", "odd"]
    assert sorted(names, key=lambda name: preference(name, "nvidia-cuda-12")) == [
        "cuda12-x",
        "vulkan-x",
        "cpu-x",
        "rocm-x",
        "odd",
    ]
    assert min(names, key=lambda name: preference(name, "default")) == "cpu-x"


OURS = """
- {name: vllm, uri: "https://example.com/ours.tar", description: fast, tags: [LLM, gpu]}
- {name: Piper, uri: "https://example.com/piper.tar"}
- {name: nightly-development, uri: "https://example.com/n.tar"}
- name: meta
  capabilities: {default: there@cpu-voice, nvidia: here-build, amd: nowhere@x, intel: vllm-meta}
- {name: vllm-meta, capabilities: {default: vllm}}
"""
THEIRS = """
- {name: vllm, uri: "https://example.com/theirs.tar"}
- {name: cpu-voice, alias: voice, uri: "https://example.com/c.tar"}
- {name: cuda12-voice, alias: Voice, uri: "https://example.com/g.tar"}
- {name: whisper-large, uri: "https://example.com/w.tar", tags: [audio]}
"""


def catalogue(unread: dict[str, str] | None = None) -> BackendCatalogue:
    indexes = [
        read_index(Gallery("ours", "o"), OURS.encode()),
        read_index(Gallery("There", "t"), THEIRS.encode()),
    ]
    assert not any(index.problems for index in indexes)
    return BackendCatalogue(indexes, unread or {})


def found(query: str) -> BackendEntry:
    got = catalogue().find(query)
    assert isinstance(got, BackendEntry)
    return got


def test_the_first_gallery_wins_and_the_other_can_be_named() -> None:
    assert found("vllm").uri == "https://example.com/ours.tar"
    assert found("VLLM").id == "ours@vllm"
    assert found("there@vLLM").uri == "https://example.com/theirs.tar"
    assert found(" piper ").name == "Piper"


def test_an_alias_is_found_when_no_entry_has_the_name() -> None:
    group = catalogue().find("VOICE")
    assert isinstance(group, AliasGroup)
    assert [build.name for build in group.builds] == ["cpu-voice", "cuda12-voice"]


def test_unknown_names_come_with_near_ones() -> None:
    got = catalogue({"gone": "timed out"}).find("vlm")
    assert isinstance(got, UnknownBackend)
    assert got.nearest[0] == "vllm"
    assert got.reason == (
        "no backend is called 'vlm'; the gallery gone could not be read (timed out)"
        f"; did you mean {', '.join(got.nearest)}?"
    )
    assert catalogue().nearest("whisper")[0] == "whisper-large"
    assert catalogue().nearest("nightly") == ()  # development builds are not offered
    assert isinstance(catalogue().find("../../etc/passwd"), UnknownBackend)
    assert isinstance(catalogue().find(""), UnknownBackend)
    assert isinstance(catalogue().find("nowhere@vllm"), UnknownBackend)


def test_a_map_names_builds_of_its_own_gallery_or_of_another() -> None:
    meta = found("meta")
    build = catalogue().build_of(meta, "there@cpu-voice")
    assert isinstance(build, BackendEntry)
    assert build.id == "There@cpu-voice"
    assert catalogue().build_of(meta, "here-build") == "there is no here-build in the gallery ours"
    assert catalogue().build_of(meta, "nowhere@x") == "there is no gallery nowhere"
    assert catalogue({"Nowhere": "down"}).build_of(meta, "nowhere@x") == "the gallery nowhere could not be read: down"
    assert catalogue().build_of(meta, "vllm-meta") == "ours@vllm-meta is itself a meta entry"
    assert catalogue().build_of(meta, "cpu-voice") == "there is no cpu-voice in the gallery ours"


def test_the_meta_a_build_belongs_to() -> None:
    voice = found("there@cpu-voice")
    meta = catalogue().meta_of(voice)
    assert meta is not None
    assert meta.name == "meta"
    assert catalogue().meta_of(found("vllm")) == found("vllm-meta")
    assert catalogue().meta_of(found("piper")) is None


def test_searching() -> None:
    names = [each.id for each in catalogue().search("fast")]
    assert names == ["ours@vllm"]
    assert [each.name for each in catalogue().search("AUDIO")] == ["whisper-large"]
    assert [each.name for each in catalogue().search(tag="llm")] == ["vllm"]
    assert len(catalogue().search("there")) == 4  # the gallery's name counts
    assert "nightly-development" not in [each.name for each in catalogue().search(development=False)]
    on_cpu = [each.name for each in catalogue().search(capabilities=[("default", "linux/amd64")])]
    assert "cuda12-voice" not in on_cpu
    both = [each.name for each in catalogue().search(capabilities=[("default", ""), ("nvidia", "")])]
    assert "cuda12-voice" in both
    assert catalogue().search(capabilities=()) == ()


def test_a_meta_is_listed_where_there_is_a_key_for_it() -> None:
    (meta,) = read_index(Gallery("g", "u"), b"- {name: m, capabilities: {nvidia: a}}").entries
    assert is_listed(meta, "nvidia-cuda-12")
    assert is_listed(meta, "disable")
    assert not is_listed(meta, "default")
