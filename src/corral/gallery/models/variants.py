"""Which of an entry's variants suits a fleet (docs/reference/wire/gallery.md#model-entry). Pure.

LocalAI chooses for the one machine it runs on. Here a model is for the whole fleet, so a variant fits when there is a
machine that can hold it, and is preferred as the best such machine prefers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.contract.budget import Amount, parse_budget
from corral.contract.capability import DEFAULT
from corral.gallery.models.entries import ModelEntry

# In the order of the contract; what is not named comes last.
_GPU = ("vllm", "sglang", "llama-cpp")
_ENGINES = {
    "nvidia": _GPU,
    "amd": _GPU,
    "intel": _GPU,
    "metal": ("mlx", "llama-cpp"),
    "vulkan": ("llama-cpp",),
}
_OTHERWISE = ("llama-cpp", "vllm", "sglang")
_SERVING_TAGS = frozenset({"dflash", "mtp"})
_OVERHEAD = 1.2  # of what lies on the disk


@dataclass(frozen=True, slots=True)
class FleetMachine:
    capability: str = DEFAULT
    memory_bytes: int = 0  # of its accelerators, or RAM where it has none; 0: it does not say


def choose_variant(entry: ModelEntry, variants: Sequence[ModelEntry], machines: Sequence[FleetMachine]) -> ModelEntry:
    """The entry itself when there is nothing to choose, or nobody to choose for."""
    if not variants or not machines:
        return entry
    ranked = [(rank, candidate) for candidate in variants if (rank := _rank(candidate, machines)) is not None]
    own = _rank(entry, machines)
    if own is not None:
        ranked.append((own, entry))
    return min(ranked, key=lambda each: each[0])[1] if ranked else entry


def needed_bytes(entry: ModelEntry) -> int:
    """What it takes in memory, as far as the entry says; 0: nobody can say."""
    try:
        written = parse_budget(entry.size) if entry.size else None
    except ValueError:
        written = None
    size = written.size_bytes if isinstance(written, Amount) else sum(file.size for file in entry.files)
    return int(size * _OVERHEAD)


def _rank(entry: ModelEntry, machines: Sequence[FleetMachine]) -> tuple[int, int, int] | None:
    """Smaller is better; None where no machine can hold it."""
    need = needed_bytes(entry)
    places = [
        place
        for machine in machines
        if (not machine.memory_bytes or need <= machine.memory_bytes)
        and (place := _preference(entry.backend, machine.capability)) is not None
    ]
    if not places:
        return None
    return min(places), 0 if _SERVING_TAGS & {tag.lower() for tag in entry.tags} else 1, -need


def _preference(backend: str, capability: str) -> int | None:
    """How far down this engine is on the machine's list; None where it cannot run at all."""
    family = capability.partition("-")[0]
    if backend.startswith("mlx") and family != "metal":
        return None
    order = _ENGINES.get(family, _OTHERWISE)
    return next((at for at, name in enumerate(order) if name in backend), len(order))
