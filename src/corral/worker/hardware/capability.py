"""The worker's capability: LocalAI's detection table (docs/reference/wire/gallery.md#capability) as a pure function
over facts.

Who gathers the facts is `probe.py`. The table is the contract's; ours are the `CORRAL_` twins, which win over the
`LOCALAI_` names, and that no CUDA is named that the driver is too old for: the contract goes by the toolkit's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corral.contract.hardware import DEFAULT, NVIDIA, TOO_LITTLE_VRAM_BYTES

_FORCED = ("CORRAL_FORCE_META_BACKEND_CAPABILITY", "LOCALAI_FORCE_META_BACKEND_CAPABILITY")
_RUN_FILES = (
    ("CORRAL_FORCE_META_BACKEND_CAPABILITY_RUN_FILE", "run/corral/capability"),
    ("LOCALAI_FORCE_META_BACKEND_CAPABILITY_RUN_FILE", "run/localai/capability"),
)
CUDA_FOLDERS = ("cuda-13", "cuda-12")  # below /usr/local, best first
_FIRST_DRIVERS = {13: 580, 12: 525}  # by CUDA, the first branch of NVIDIA's driver that runs it; newest first
_OLD_CUDA = 11  # or older: no build is offered for it


@dataclass(frozen=True, slots=True)
class HostFacts:
    """All that the decision depends on."""

    os: str
    arch: str
    gpu_vendor: str = ""
    total_vram: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    run_files: Sequence[str | None] = ()  # contents of `run_file_paths`, None where there is no such file
    cuda_folders: frozenset[str] = frozenset()  # those of CUDA_FOLDERS that exist
    driver: str = ""  # version of NVIDIA's driver, 535.129.03; empty: unknown


def run_file_paths(env: Mapping[str, str], root: Path) -> list[Path]:
    """Where a container image may have left its capability, in the order they are believed."""
    return [Path(env[variable]) if env.get(variable) else root / usual for variable, usual in _RUN_FILES]


def detect_capability(facts: HostFacts) -> str:
    """First rule that matches, in the contract's order."""
    for variable in _FORCED:
        if forced := facts.env.get(variable):
            return forced
    for content in facts.run_files:
        # An empty file names nothing: no build answers to the empty word, so it must not hide the hardware.
        if content is not None and content.strip():
            return content.strip()
    if facts.os == "darwin":
        return "metal" if facts.arch == "arm64" else "darwin-x86"
    if (facts.os, facts.arch, facts.gpu_vendor) == ("linux", "arm64", NVIDIA):
        return _with_cuda("nvidia-l4t", facts)
    if not facts.gpu_vendor or facts.total_vram <= TOO_LITTLE_VRAM_BYTES:
        return DEFAULT
    return _with_cuda(NVIDIA, facts) if facts.gpu_vendor == NVIDIA else facts.gpu_vendor


def _with_cuda(capability: str, facts: HostFacts) -> str:
    newest = _newest_cuda(facts.driver)
    for folder in CUDA_FOLDERS:
        if folder in facts.cuda_folders and (newest is None or _major(folder) <= newest):
            return f"{capability}-{folder}"
    if newest is not None and newest < _major(CUDA_FOLDERS[0]):
        return f"{capability}-cuda-{newest}"  # without a number a build for any CUDA would be chosen
    return capability


def _newest_cuda(driver: str) -> int | None:
    """The newest CUDA that the driver runs; None: nobody knows."""
    branch = driver.partition(".")[0]
    if not branch.isdecimal():
        return None
    return next((cuda for cuda, first in _FIRST_DRIVERS.items() if int(branch) >= first), _OLD_CUDA)


def _major(folder: str) -> int:
    return int(folder.rpartition("-")[2])
