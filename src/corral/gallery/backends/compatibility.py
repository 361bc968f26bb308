"""Which builds run on which machines, judged by names (docs/reference/wire/gallery.md#compatibility-filter). Pure.

Four differences from LocalAI's filter. Words are compared as words: a `chip` is no `hip`, and `amd64` is no AMD GPU.
`mlx` means Apple only where the name says nothing else, so that the CPU and CUDA builds of mlx can be installed. A
capability falls back along its own prefixes before it falls back to `default`. And a build for a newer CUDA than the
machine has is not chosen for it, whatever key it stands under.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from corral.contract.capability import DEFAULT, DISABLED
from corral.gallery.backends.entries import BackendEntry

_WORDS = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of hardware: the words that mean it in a build's name, the capabilities that have it."""

    words: re.Pattern[str]
    prefixes: tuple[str, ...]
    needs: str

    def is_meant(self, words: Iterable[str]) -> bool:
        return any(self.words.fullmatch(word) for word in words)

    def is_had(self, capability: str) -> bool:
        return any(capability == prefix or capability.startswith(f"{prefix}-") for prefix in self.prefixes)


# In this order; the first that is meant decides.
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
# Which of several builds with one alias is best, by what their names contain.
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

    Directly after the word itself comes the word with the platform: some metas say `metal-darwin-arm64` and no host
    ever says that of itself.
    """
    parts = capability.split("-")
    prefixes = ["-".join(parts[:length]) for length in range(len(parts), 0, -1)]
    if platform:
        prefixes.insert(1, f"{capability}-{platform.replace('/', '-')}")
    return tuple(dict.fromkeys(key for key in (*prefixes, DEFAULT, "cpu") if key))


def contract_chain(capability: str) -> tuple[str, ...]:
    """The keys a LocalAI worker looks for: it knows no prefixes."""
    return tuple(dict.fromkeys(key for key in (capability, DEFAULT, "cpu") if key))


def why_incompatible(entry: BackendEntry, capability: str) -> str:
    """Empty when the build can run there, as far as its name tells."""
    if capability == DISABLED:
        return ""
    kind = _kind(_words(entry))
    if kind is None:
        return ""
    if not kind.is_had(capability):
        return f"needs {kind.needs}, the machine has capability {capability or DEFAULT}"
    needed, had = _cuda_major(_named(entry)), _cuda_major(capability)
    if needed is not None and had is not None and needed > had:
        return f"needs CUDA {needed}, the machine has CUDA {had}"
    return ""


def is_listed(entry: BackendEntry, capability: str, platform: str = "") -> bool:
    """Whether a catalogue for such machines shows it. A meta is shown when there is a key for it."""
    if capability == DISABLED:
        return True
    if entry.is_meta:
        return any(key in entry.capabilities for key in capability_chain(capability, platform))
    return not why_incompatible(entry, capability)


def is_hardware_specific(entry: BackendEntry) -> bool:
    """Whether a concrete build is for one kind of machine only, so that "on every node" makes no sense for it."""
    return not entry.is_meta and _kind(_words(entry)) is not None


def preference(name: str, capability: str) -> int:
    """Rank among builds that share an alias; lower is better. Builds nothing is known of come last."""
    tokens = next((tokens for prefix, tokens in _PREFERENCES if capability.startswith(prefix)), ("cpu",))
    found = (rank for rank, token in enumerate(tokens) if token in name.lower())
    return next(found, len(tokens))


def _words(entry: BackendEntry) -> list[str]:
    return _WORDS.split(_named(entry))


def _named(entry: BackendEntry) -> str:
    """Of the URI only what names the build: the host and the owner may be called anything."""
    return f"{entry.name} {entry.uri.rsplit('/', 1)[-1]}".lower()


def _cuda_major(text: str) -> int | None:
    """The newest that a name speaks of; None where it speaks of none."""
    found = [int(match[1] or match[2]) for match in _CUDA.finditer(text)]
    return max(found, default=None)


def _kind(words: list[str]) -> _Kind | None:
    for kind in _KINDS:
        if kind.is_meant(words):
            return kind
    return _APPLE if "mlx" in words and not any(_ANYWHERE.fullmatch(word) for word in words) else None
