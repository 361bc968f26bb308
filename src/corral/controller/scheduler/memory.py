"""How much memory one process of a model needs. Pure.

In this order, the first that is known: what its definition says; the most its last processes were seen to use; what the
head of its GGUF file comes to (weights, cache for the context of all slots, buffers); the size of its files and a bit.
An estimate errs upwards: refusing what would just have fitted costs a sentence, running out of memory costs somebody's
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corral.contract.models import Definition
from corral.controller.scheduler.gguf import Head
from corral.controller.scheduler.world import MIB, Memory
from corral.kit.humanize import format_bytes

# llama.cpp works on so many tokens at a time, and keeps their results for the whole vocabulary as 32-bit numbers.
BATCH = 512
DEFAULT_CONTEXT = 4096  # docs/reference/wire/gallery.md#model-definition
OWN_BYTES = 128 * MIB  # code, libraries, the driver's context on a device
# What is kept of finished prompts, in RAM: as much as two full contexts, and no more than our llama-cpp is told.
KEPT_PROMPTS = 2
MOST_KEPT_BYTES = 512 * MIB
FILES_FACTOR = 1.2
PEAK_FACTOR = 1.05  # the next one may come to a little more
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
# Of so many layers one looks at the whole context, the others only at a window; files of these do not say so.
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4}
_MOST_LAYERS = 4_096
_MOST_WIDTH = 1 << 20
_MOST_CONTEXT = 1 << 27


@dataclass(frozen=True)
class Seen:
    """The most one process was seen to hold: in RAM, or on the one of its devices on which it held most."""

    ram_bytes: int = 0  # 0: it did not live there
    device_bytes: int = 0  # 0: not measured
    devices: int = 0


def memory_of(
    definition: Definition,
    files_bytes: int,
    *,
    head: Head | None = None,
    slots: int = 1,
    seen: Sequence[Seen] = (),
) -> Memory:
    """`files_bytes`: of all its files; 0 = not known. `slots`: what its backend serves at once if the definition does
    not say. `seen`: the last processes of this revision."""
    if definition.memory_bytes:
        return Memory(definition.memory_bytes, how="as its definition says")
    if device_share(definition):
        # What such an engine holds is its share of that device, whatever it needs.
        seen = [Seen(each.ram_bytes) for each in seen]
    return learned(_guess(definition, files_bytes, head, slots), seen)


def learned(guess: Memory, seen: Sequence[Seen]) -> Memory:
    """What was seen counts more than what was reckoned; of several processes the one that came to most."""
    in_ram = int(max((each.ram_bytes for each in seen), default=0) * PEAK_FACTOR)
    on_devices = int(max((_together(each, guess.each_bytes) for each in seen), default=0) * PEAK_FACTOR)
    how = "the most it was seen to use"
    if on_devices:
        each = min(guess.each_bytes, on_devices)
        return Memory(on_devices, each, guess.host_bytes, in_ram or guess.all_in_ram, how)
    if in_ram:  # with all that lives there besides; on a device it is hardly more
        return Memory(in_ram, min(guess.each_bytes, in_ram), how=how)
    return guess


def _together(seen: Seen, each_bytes: int) -> int:
    """What it would have held on one device, as far as one can tell from several: `Memory.on_each` the other way."""
    own = min(each_bytes, seen.device_bytes)
    return (seen.device_bytes - own) * max(1, seen.devices) + own


def estimate(
    head: Head,
    weights_bytes: int,
    *,
    context_size: int = 0,
    parallel: int = 1,
    cache_types: tuple[str, str] = ("f16", "f16"),
) -> Memory | None:
    """None: the head does not say enough, or what nobody can believe."""
    layers = head.number("block_count")
    width, words = head.number("embedding_length"), head.vocabulary
    trained = head.number("context_length")
    # Without a size of ours the engine takes the model's own, for all slots together.
    context = context_size * max(1, parallel) if context_size else trained or DEFAULT_CONTEXT
    if not 0 < layers <= _MOST_LAYERS or width > _MOST_WIDTH or context > _MOST_CONTEXT or words > _MOST_CONTEXT:
        return None
    cache = _cache_bytes(head, layers, context, max(1, parallel), cache_types)
    if cache is None:
        return None
    buffers = BATCH * 4 * (words + 4 * width + context)
    each = buffers + OWN_BYTES
    kept = min(MOST_KEPT_BYTES, KEPT_PROMPTS * cache)
    for_context = f"{format_bytes(cache)} for {context} tokens"
    how = f"{format_bytes(weights_bytes)} weights, {for_context}, {format_bytes(each)} besides"
    return Memory(weights_bytes + cache + each, each, kept, how=how)


def device_share(definition: Definition) -> float:
    """How much of each device its engine takes, whatever it needs; 0: as much as it needs."""
    said = definition.whole.get("gpu_memory_utilization")
    if isinstance(said, int | float) and not isinstance(said, bool) and 0 < said <= 1:
        return float(said)
    return VLLM_SHARE if "vllm" in definition.backend.lower().split("-") else 0.0


def lives_in_ram(definition: Definition) -> bool:
    """Its definition keeps it off accelerators."""
    layers = definition.whole.get("gpu_layers")
    return layers == 0 and not isinstance(layers, bool)


def _guess(definition: Definition, files_bytes: int, head: Head | None, slots: int) -> Memory:
    if files_bytes <= 0:
        return Memory()
    found = None
    if head is not None:
        found = estimate(
            head,
            files_bytes,
            context_size=definition.context_size,
            parallel=definition.parallel or slots,
            cache_types=_cache_types(definition),
        )
    if found is not None:
        return found
    total = int(files_bytes * FILES_FACTOR) + OWN_BYTES
    how = f"{format_bytes(files_bytes)} of files and {FILES_FACTOR - 1:.0%} besides"
    return Memory(total, OWN_BYTES, how=how)


def _cache_types(definition: Definition) -> tuple[str, str]:
    keys, values = definition.whole.get("cache_type_k"), definition.whole.get("cache_type_v")
    return (keys if isinstance(keys, str) else "f16", values if isinstance(values, str) else "f16")


def _cache_bytes(head: Head, layers: int, context: int, parallel: int, types: tuple[str, str]) -> int | None:
    heads = head.numbers("attention.head_count", layers)
    if not heads or not any(heads):
        return 0  # no attention, no cache that grows: state-space models
    kept = head.numbers("attention.head_count_kv", layers) or heads
    per_head = head.number("embedding_length") // max(heads)
    key, value = (head.number(f"attention.{name}_length") or per_head for name in ("key", "value"))
    if max(*kept, key, value) > _MOST_WIDTH:
        return None
    per_key, per_value = (_CACHE_TYPES.get(name.lower(), 2.0) for name in types)
    each = key * per_key + value * per_value
    tokens = _tokens(head, layers, context, parallel)
    return int(sum(count * each * length for count, length in zip(kept, tokens, strict=True)))


def _tokens(head: Head, layers: int, context: int, parallel: int) -> list[int]:
    """How many tokens each layer keeps."""
    window = head.number("attention.sliding_window")
    short = min(context, window * parallel + BATCH) if window else context
    pattern = head.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple) and len(pattern) >= layers:
        return [short if slides else context for slides in pattern[:layers]]
    every = head.number("attention.sliding_window_pattern") or _FULL_EVERY.get(head.architecture, 1)
    return [context if layer % every == every - 1 else short for layer in range(layers)]
