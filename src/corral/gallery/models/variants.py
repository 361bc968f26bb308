"""Chooses the variant of a model that suits a fleet (docs/reference/wire/gallery.md#model-entry). Pure.

LocalAI chooses for the one machine it runs on. In Corral a model is for the whole fleet, so a variant fits if one
machine has enough memory for it, and its rank is that of the best such machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.contract.budget import Amount, parse_budget
from corral.contract.hardware import DEFAULT
from corral.gallery.models.entries import ModelEntry

# In LocalAI's order; other engines come last.
_GPU = ("vllm", "sglang", "llama-cpp")
_ENGINES = {
    "nvidia": _GPU,
    "amd": _GPU,
    "intel": _GPU,
    "metal": ("mlx", "llama-cpp"),
    "vulkan": ("llama-cpp",),
}
_DEFAULT_ENGINES = ("llama-cpp", "vllm", "sglang")
_SERVING_TAGS = frozenset({"dflash", "mtp"})
_OVERHEAD = 1.2  # memory relative to the size on disk


@dataclass(frozen=True, slots=True)
class FleetMachine:
    capability: str = DEFAULT
    memory_bytes: int = 0  # of its accelerators, or RAM if it has none; 0: unknown


def choose_variant(entry: ModelEntry, variants: Sequence[ModelEntry], machines: Sequence[FleetMachine]) -> ModelEntry:
    """The entry itself if there are no variants or no machines."""
    if not variants or not machines:
        return entry
    ranked = [(rank, candidate) for candidate in variants if (rank := _rank(candidate, machines)) is not None]
    own = _rank(entry, machines)
    if own is not None:
        ranked.append((own, entry))
    return min(ranked, key=lambda each: each[0])[1] if ranked else entry


def needed_bytes(entry: ModelEntry) -> int:
    """The memory that the entry needs; 0: unknown."""
    try:
        written = parse_budget(entry.size) if entry.size else None
    except ValueError:
        written = None
    size = written.size_bytes if isinstance(written, Amount) else sum(file.size for file in entry.files)
    return int(size * _OVERHEAD)


def _rank(entry: ModelEntry, machines: Sequence[FleetMachine]) -> tuple[int, int, int] | None:
    """Smaller is better; None if no machine has enough memory."""
    need = needed_bytes(entry)
    ranks = [
        rank
        for machine in machines
        if (not machine.memory_bytes or need <= machine.memory_bytes)
        and (rank := _preference(entry.backend, machine.capability)) is not None
    ]
    if not ranks:
        return None
    return min(ranks), 0 if _SERVING_TAGS & {tag.lower() for tag in entry.tags} else 1, -need


def _preference(backend: str, capability: str) -> int | None:
    """Position of the engine in the machine's list; None if it cannot run there."""
    family = capability.partition("-")[0]
    if backend.startswith("mlx") and family != "metal":
        return None
    order = _ENGINES.get(family, _DEFAULT_ENGINES)
    return next((at for at, name in enumerate(order) if name in backend), len(order))
