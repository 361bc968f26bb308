"""Estimates the memory one process of a model needs. Pure.

The first that is known counts: the amount in its definition; the most its last processes used; the sum from the header
of its GGUF file (weights, cache for the context of all slots, buffers); the size of its files and 20 %. An estimate
errs upwards: a refused model costs an error message, running out of memory costs running requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.contract.gguf import GgufHeader
from corral.contract.models import Definition
from corral.controller.scheduler.world import MIB, Memory
from corral.kit.humanize import format_bytes

# llama.cpp processes this many tokens at a time and keeps their results for the whole vocabulary as 32-bit numbers.
BATCH = 512
DEFAULT_CONTEXT = 4096  # docs/reference/wire/gallery.md#model-definition
OWN_BYTES = 128 * MIB  # code, libraries, the driver's context on a device
# The prompt cache in RAM: two full contexts, and at most the limit that our llama-cpp backend sets.
KEPT_PROMPTS = 2
MAX_KEPT_BYTES = 512 * MIB
FILES_FACTOR = 1.2
PEAK_FACTOR = 1.05  # the next process may use a little more
VLLM_SHARE = 0.9  # vLLM's own default of gpu_memory_utilization

# Bytes per number in the cache; quantised ones are blocks of 32 with their scales.
_CACHE_TYPES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
# One of this many layers attends to the whole context, the others to a window; GGUF files of these do not say so.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4}
MAX_LAYERS = 4_096
MAX_WIDTH = 1 << 20
MAX_CONTEXT = 1 << 27


@dataclass(frozen=True)
class MeasuredUsage:
    """The most memory one process used: in RAM, or on the device on which it used most."""

    ram_bytes: int = 0  # 0: it did not run in RAM
    device_bytes: int = 0  # 0: not measured
    devices: int = 0


def estimate_memory(
    definition: Definition,
    files_bytes: int,
    *,
    header: GgufHeader | None = None,
    slots: int = 1,
    measured: Sequence[MeasuredUsage] = (),
) -> Memory:
    """`files_bytes`: of all its files; 0 = not known. `slots`: what its backend serves at once if the definition does
    not set it. `measured`: the last processes of this revision."""
    if definition.memory_bytes:
        return Memory(definition.memory_bytes, how="as its definition says")
    if device_share(definition):
        # Such an engine allocates its share of the device, whatever it needs.
        measured = [MeasuredUsage(each.ram_bytes) for each in measured]
    return apply_measured(_estimate(definition, files_bytes, header, slots), measured)


def apply_measured(estimated: Memory, measured: Sequence[MeasuredUsage]) -> Memory:
    """A measurement overrides the estimate; of several processes the largest counts."""
    in_ram = int(max((each.ram_bytes for each in measured), default=0) * PEAK_FACTOR)
    on_devices = int(max((_on_one_device(each, estimated.each_bytes) for each in measured), default=0) * PEAK_FACTOR)
    how = "the most its processes used"
    if on_devices:
        each = min(estimated.each_bytes, on_devices)
        return Memory(on_devices, each, estimated.host_bytes, in_ram or estimated.all_in_ram, how)
    if in_ram:  # includes what a process on a device keeps in RAM; on a device it is hardly more
        return Memory(in_ram, min(estimated.each_bytes, in_ram), how=how)
    return estimated


def _on_one_device(measured: MeasuredUsage, each_bytes: int) -> int:
    """What it would have used on one device, derived from several: the inverse of `Memory.on_each`."""
    own = min(each_bytes, measured.device_bytes)
    return (measured.device_bytes - own) * max(1, measured.devices) + own


def estimate_from_header(
    header: GgufHeader,
    weights_bytes: int,
    *,
    context_size: int = 0,
    parallel: int = 1,
    cache_types: tuple[str, str] = ("f16", "f16"),
) -> Memory | None:
    """None: the header lacks values, or has implausible ones."""
    layers = header.number("block_count")
    width, words = header.number("embedding_length"), header.vocabulary
    trained = header.number("context_length")
    # Without a configured size the engine uses the model's own, for all slots together.
    context = context_size * max(1, parallel) if context_size else trained or DEFAULT_CONTEXT
    if not 0 < layers <= MAX_LAYERS or width > MAX_WIDTH or context > MAX_CONTEXT or words > MAX_CONTEXT:
        return None
    cache = _cache_bytes(header, layers, context, max(1, parallel), cache_types)
    if cache is None:
        return None
    buffers = BATCH * 4 * (words + 4 * width + context)
    each = buffers + OWN_BYTES
    kept = min(MAX_KEPT_BYTES, KEPT_PROMPTS * cache)
    for_context = f"{format_bytes(cache)} for {context} tokens"
    how = f"{format_bytes(weights_bytes)} weights, {for_context}, {format_bytes(each)} buffers"
    return Memory(weights_bytes + cache + each, each, kept, how=how)


def device_share(definition: Definition) -> float:
    """The share of each device that its engine allocates, whatever it needs; 0: only what it needs."""
    said = definition.whole.get("gpu_memory_utilization")
    if isinstance(said, int | float) and not isinstance(said, bool) and 0 < said <= 1:
        return float(said)
    return VLLM_SHARE if "vllm" in definition.backend.lower().split("-") else 0.0


def is_ram_only(definition: Definition) -> bool:
    """Whether its definition excludes accelerators."""
    layers = definition.whole.get("gpu_layers")
    return layers == 0 and not isinstance(layers, bool)


def _estimate(definition: Definition, files_bytes: int, header: GgufHeader | None, slots: int) -> Memory:
    if files_bytes <= 0:
        return Memory()
    found = None
    if header is not None:
        found = estimate_from_header(
            header,
            files_bytes,
            context_size=definition.context_size,
            parallel=definition.parallel or slots,
            cache_types=_cache_types(definition),
        )
    if found is not None:
        return found
    total = int(files_bytes * FILES_FACTOR) + OWN_BYTES
    how = f"{format_bytes(files_bytes)} of files plus {FILES_FACTOR - 1:.0%}"
    return Memory(total, OWN_BYTES, how=how)


def _cache_types(definition: Definition) -> tuple[str, str]:
    keys, values = definition.whole.get("cache_type_k"), definition.whole.get("cache_type_v")
    return (keys if isinstance(keys, str) else "f16", values if isinstance(values, str) else "f16")


def _cache_bytes(header: GgufHeader, layers: int, context: int, parallel: int, types: tuple[str, str]) -> int | None:
    heads = header.numbers("attention.head_count", layers)
    if not heads or not any(heads):
        return 0  # no attention, no cache that grows: state-space models
    kept = header.numbers("attention.head_count_kv", layers) or heads
    per_head = header.number("embedding_length") // max(heads)
    key, value = (header.number(f"attention.{name}_length") or per_head for name in ("key", "value"))
    if max(*kept, key, value) > MAX_WIDTH:
        return None
    per_key, per_value = (_CACHE_TYPES.get(name.lower(), 2.0) for name in types)
    each = key * per_key + value * per_value
    tokens = _tokens(header, layers, context, parallel)
    return int(sum(count * each * length for count, length in zip(kept, tokens, strict=True)))


def _tokens(header: GgufHeader, layers: int, context: int, parallel: int) -> list[int]:
    """How many tokens each layer keeps."""
    window = header.number("attention.sliding_window")
    short = min(context, window * parallel + BATCH) if window else context
    pattern = header.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple) and len(pattern) >= layers:
        return [short if slides else context for slides in pattern[:layers]]
    every = header.number("attention.sliding_window_pattern") or _FULL_EVERY.get(header.architecture, 1)
    return [context if layer % every == every - 1 else short for layer in range(layers)]
