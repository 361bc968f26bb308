"""The worker's capability, row by row of the table (docs/reference/wire/gallery.md#capability)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.worker.hardware.capability import HostFacts, detect_capability, run_file_paths

GIB = 1024**3
CUDA = {"none": frozenset[str](), "12": frozenset({"cuda-12"}), "13": frozenset({"cuda-12", "cuda-13"})}


@pytest.mark.parametrize(
    ("os", "arch", "vendor", "vram_gib", "cuda", "capability"),
    [
        ("darwin", "arm64", "apple", 64, "none", "metal"),
        ("darwin", "arm64", "", 0, "none", "metal"),
        ("darwin", "amd64", "amd", 16, "none", "darwin-x86"),
        ("linux", "arm64", "nvidia", 64, "13", "nvidia-l4t-cuda-13"),
        ("linux", "arm64", "nvidia", 64, "12", "nvidia-l4t-cuda-12"),
        ("linux", "arm64", "nvidia", 64, "none", "nvidia-l4t"),
        ("linux", "arm64", "nvidia", 0, "none", "nvidia-l4t"),
        ("linux", "arm64", "", 0, "13", "default"),
        ("linux", "arm64", "vulkan", 8, "none", "vulkan"),
        ("linux", "amd64", "", 0, "13", "default"),
        ("linux", "amd64", "", 64, "none", "default"),
        ("linux", "amd64", "nvidia", 4, "13", "default"),
        ("linux", "amd64", "nvidia", 5, "13", "nvidia-cuda-13"),
        ("linux", "amd64", "nvidia", 24, "12", "nvidia-cuda-12"),
        ("linux", "amd64", "nvidia", 24, "none", "nvidia"),
        ("linux", "amd64", "amd", 24, "12", "amd"),
        ("linux", "amd64", "intel", 16, "none", "intel"),
        ("linux", "amd64", "intel", 0, "none", "default"),
        ("linux", "amd64", "vulkan", 8, "none", "vulkan"),
        ("windows", "amd64", "nvidia", 24, "none", "nvidia"),
    ],
)
def test_the_first_matching_row_decides(
    os: str, arch: str, vendor: str, vram_gib: int, cuda: str, capability: str
) -> None:
    facts = HostFacts(os, arch, vendor, vram_gib * GIB, cuda_folders=CUDA[cuda])
    assert detect_capability(facts) == capability


def test_four_gib_exactly_is_too_little() -> None:
    assert detect_capability(HostFacts("linux", "amd64", "amd", 4 * GIB)) == "default"
    assert detect_capability(HostFacts("linux", "amd64", "amd", 4 * GIB + 1)) == "amd"


@pytest.mark.parametrize(
    ("env", "run_files", "capability"),
    [
        ({"LOCALAI_FORCE_META_BACKEND_CAPABILITY": "nvidia-cuda-12"}, ["amd"], "nvidia-cuda-12"),
        ({"CORRAL_FORCE_META_BACKEND_CAPABILITY": "vulkan"}, ["amd"], "vulkan"),
        (
            {
                "LOCALAI_FORCE_META_BACKEND_CAPABILITY": "nvidia",
                "CORRAL_FORCE_META_BACKEND_CAPABILITY": "disable",
            },
            [],
            "disable",
        ),
        ({"LOCALAI_FORCE_META_BACKEND_CAPABILITY": " verbatim "}, [], " verbatim "),
        ({"LOCALAI_FORCE_META_BACKEND_CAPABILITY": ""}, [None, "intel\n"], "intel"),
        ({}, [None, "  nvidia-cuda-13\n"], "nvidia-cuda-13"),
        ({}, ["amd", "intel"], "amd"),
        ({}, [" \n", None], "default"),
        ({}, [], "default"),
    ],
)
def test_a_person_or_an_image_may_say_it_instead(
    env: dict[str, str], run_files: list[str | None], capability: str
) -> None:
    assert detect_capability(HostFacts("linux", "amd64", env=env, run_files=run_files)) == capability


def test_the_override_also_beats_macos() -> None:
    env = {"LOCALAI_FORCE_META_BACKEND_CAPABILITY": "default"}
    assert detect_capability(HostFacts("darwin", "arm64", env=env)) == "default"


def test_run_files_may_lie_elsewhere() -> None:
    root = Path("/")
    assert run_file_paths({}, root) == [Path("/run/corral/capability"), Path("/run/localai/capability")]
    named = {"LOCALAI_FORCE_META_BACKEND_CAPABILITY_RUN_FILE": "/etc/l", "PATH": "/bin"}
    assert run_file_paths(named, root) == [Path("/run/corral/capability"), Path("/etc/l")]
    named = {"CORRAL_FORCE_META_BACKEND_CAPABILITY_RUN_FILE": "/etc/c"}
    assert run_file_paths(named, root) == [Path("/etc/c"), Path("/run/localai/capability")]


@settings(deadline=None)  # the machine may be busy
@given(
    os=st.sampled_from(["linux", "darwin"]),
    arch=st.sampled_from(["amd64", "arm64", "riscv64"]),
    vendor=st.sampled_from(["", "nvidia", "amd", "intel", "vulkan", "apple"]),
    total_vram=st.integers(0, 2**40),
    cuda=st.sets(st.sampled_from(["cuda-12", "cuda-13"])),
)
def test_every_machine_has_one_of_the_contracts_words(
    os: str, arch: str, vendor: str, total_vram: int, cuda: set[str]
) -> None:
    capability = detect_capability(HostFacts(os, arch, vendor, total_vram, cuda_folders=frozenset(cuda)))
    words = "default metal darwin-x86 nvidia nvidia-cuda-12 nvidia-cuda-13 nvidia-l4t nvidia-l4t-cuda-12"
    assert capability in {*words.split(), "nvidia-l4t-cuda-13", "amd", "intel", "vulkan", "apple"}
    assert capability.startswith("nvidia") <= (vendor == "nvidia")


@pytest.mark.parametrize(
    ("driver", "folders", "capability"),
    [
        ("580.65.06", [], "nvidia"),
        ("580.65.06", ["cuda-12"], "nvidia-cuda-12"),
        ("580.65.06", ["cuda-12", "cuda-13"], "nvidia-cuda-13"),
        ("535.129.03", ["cuda-12", "cuda-13"], "nvidia-cuda-12"),
        ("535.129.03", ["cuda-13"], "nvidia-cuda-12"),
        ("535.129.03", [], "nvidia-cuda-12"),
        ("470.82", ["cuda-12"], "nvidia-cuda-11"),
        ("", ["cuda-13"], "nvidia-cuda-13"),
        ("unknown", [], "nvidia"),
    ],
)
def test_no_cuda_is_named_that_the_driver_is_too_old_for(driver: str, folders: list[str], capability: str) -> None:
    facts = HostFacts("linux", "amd64", "nvidia", 24 * GIB, cuda_folders=frozenset(folders), driver=driver)
    assert detect_capability(facts) == capability
