"""Tells by names which builds run on which machines (docs/reference/wire/gallery.md#compatibility-filter). Pure.

Four differences from LocalAI's filter. Whole words are compared: `chip` does not contain `hip`, and `amd64` is no AMD
GPU. `mlx` means Apple only if the name contains no other hardware, so that CPU and CUDA builds of mlx can be installed.
A capability falls back along its own prefixes before it falls back to `default`. And a build for a newer CUDA than the
machine's is never chosen, whatever its key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from corral.contract.hardware import DEFAULT, DISABLED
from corral.gallery.backends.entries import BackendEntry

_WORDS = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of hardware: the words for it in a build's name, and the capabilities that have it."""

    words: re.Pattern[str]
    prefixes: tuple[str, ...]
    needs: str

    def matches(self, words: Iterable[str]) -> bool:
        return any(self.words.fullmatch(word) for word in words)

    def is_present(self, capability: str) -> bool:
        return any(capability == prefix or capability.startswith(f"{prefix}-") for prefix in self.prefixes)


# In this order; the first match decides.
_KINDS = (
    _Kind(re.compile(r"darwin|metal"), ("metal", "darwin-x86"), "a Mac"),
    _Kind(re.compile(r"l4t"), ("nvidia-l4t",), "an NVIDIA Jetson"),
    _Kind(re.compile(r"cuda\d*|nvidia"), ("nvidia",), "an NVIDIA GPU"),
    _Kind(re.compile(r"rocm\d*|hip|hipblas|amd"), ("amd",), "an AMD GPU"),
    _Kind(re.compile(r"sycl|intel"), ("intel",), "an Intel GPU"),
)
_APPLE = _KINDS[0]
_CUDA = re.compile(r"cuda-?(\d{1,2})(?!\d)|cuda(\d{2})\d")  # cuda13, cuda-13, cuda128
_ANYWHERE = re.compile(r"cpu|vulkan")
# The ranking of builds with the same alias, by words in their names.
_PREFERENCES = (
    ("nvidia", ("cuda", "vulkan", "cpu")),
    ("amd", ("rocm", "hip", "vulkan", "cpu")),
    ("intel", ("sycl", "intel", "cpu")),
    ("metal", ("metal", "cpu")),
    ("darwin-x86", ("darwin-x86", "cpu")),
    ("vulkan", ("vulkan", "cpu")),
)


def capability_chain(capability: str, platform: str = "") -> tuple[str, ...]:
    """The keys to look for, in order: nvidia-cuda-12, nvidia, default, cpu.

    The second key is the capability with the platform: some metas have the key `metal-darwin-arm64`, which no host
    reports as its capability.
    """
    parts = capability.split("-")
    prefixes = ["-".join(parts[:length]) for length in range(len(parts), 0, -1)]
    if platform:
        prefixes.insert(1, f"{capability}-{platform.replace('/', '-')}")
    return tuple(dict.fromkeys(key for key in (*prefixes, DEFAULT, "cpu") if key))


def contract_chain(capability: str) -> tuple[str, ...]:
    """The keys that a LocalAI worker looks for: it does not use prefixes."""
    return tuple(dict.fromkeys(key for key in (capability, DEFAULT, "cpu") if key))


def why_incompatible(entry: BackendEntry, capability: str) -> str:
    """Empty if the build can run there, as far as its name tells."""
    if capability == DISABLED:
        return ""
    kind = _kind(_words(entry))
    if kind is None:
        return ""
    if not kind.is_present(capability):
        return f"needs {kind.needs}, the machine has capability {capability or DEFAULT}"
    needed, had = _cuda_major(_named(entry)), _cuda_major(capability)
    if needed is not None and had is not None and needed > had:
        return f"needs CUDA {needed}, the machine has CUDA {had}"
    return ""


def is_listed(entry: BackendEntry, capability: str, platform: str = "") -> bool:
    """Whether a catalogue for such machines shows the entry. A meta entry is shown if it has a matching key."""
    if capability == DISABLED:
        return True
    if entry.is_meta:
        return any(key in entry.capabilities for key in capability_chain(capability, platform))
    return not why_incompatible(entry, capability)


def is_hardware_specific(entry: BackendEntry) -> bool:
    """Whether a concrete build is for one kind of machine only, so that it cannot be installed on every node."""
    return not entry.is_meta and _kind(_words(entry)) is not None


def preference(name: str, capability: str) -> int:
    """Rank among builds that share an alias; lower is better. Builds without a known word come last."""
    tokens = next((tokens for prefix, tokens in _PREFERENCES if capability.startswith(prefix)), ("cpu",))
    found = (rank for rank, token in enumerate(tokens) if token in name.lower())
    return next(found, len(tokens))


def _words(entry: BackendEntry) -> list[str]:
    return _WORDS.split(_named(entry))


def _named(entry: BackendEntry) -> str:
    """The name and the last part of the URI: its host and owner say nothing about the build."""
    return f"{entry.name} {entry.uri.rsplit('/', 1)[-1]}".lower()


def _cuda_major(text: str) -> int | None:
    """The newest CUDA version in the text; None if it contains none."""
    found = [int(match[1] or match[2]) for match in _CUDA.finditer(text)]
    return max(found, default=None)


def _kind(words: list[str]) -> _Kind | None:
    for kind in _KINDS:
        if kind.matches(words):
            return kind
    return _APPLE if "mlx" in words and not any(_ANYWHERE.fullmatch(word) for word in words) else None
