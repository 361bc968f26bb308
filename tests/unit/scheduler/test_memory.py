"""What one process of a model needs, by what is known about it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from msgspec.structs import replace

from corral.contract.gguf import GgufHeader, read_header
from corral.contract.models import Definition, read_definition
from corral.controller.scheduler.memory import (
    MeasuredUsage,
    apply_measured,
    device_share,
    estimate_from_header,
    estimate_memory,
    is_ram_only,
)
from corral.controller.scheduler.world import GIB, MIB, Memory
from tests.support.gguf_files import LLAMA, TOKENS, gguf


def header(**changed: Any) -> GgufHeader:
    architecture = changed.pop("architecture", "llama")
    values = {
        key.replace("llama", architecture, 1) if key.startswith("llama") else key: value for key, value in LLAMA.items()
    }
    values["general.architecture"] = architecture
    values |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in changed.items()}
    return read_header(io.BytesIO(gguf(values | TOKENS)))


def definition(**more: Any) -> Definition:
    return read_definition({"name": "m", "backend": "llama-cpp", "parameters": {"model": "m.gguf"}} | more)


def cache(found: Memory | None, weights: int = 0) -> int:
    """What of it is neither weights nor buffers."""
    assert found is not None
    return found.total_bytes - found.each_bytes - weights


# Llama 3 8B: 32 layers, 8 of 32 heads kept, 128 numbers each, keys and values, two bytes: 128 KiB per token.
@pytest.mark.parametrize(
    ("context", "parallel", "types", "expected"),
    [
        (8192, 1, ("f16", "f16"), GIB),
        (2048, 4, ("f16", "f16"), GIB),
        (8192, 2, ("f16", "f16"), 2 * GIB),
        (0, 1, ("f16", "f16"), GIB),
        (0, 4, ("f16", "f16"), GIB),
        (8192, 1, ("f32", "f32"), 2 * GIB),
        (8192, 1, ("q8_0", "q8_0"), GIB * 34 // 64),
        (8192, 1, ("f16", "q4_0"), GIB // 2 + GIB * 18 // 128),
        (8192, 1, ("whatever", "f16"), GIB),
    ],
)
def test_the_cache_grows_with_context_and_slots(
    context: int, parallel: int, types: tuple[str, str], expected: int
) -> None:
    found = estimate_from_header(header(), 0, context_size=context, parallel=parallel, cache_types=types)
    assert cache(found) == expected


def test_weights_cache_and_buffers_are_told() -> None:
    found = estimate_from_header(header(vocab_size=128256), 4 * GIB, context_size=8192)
    assert found is not None
    assert found.total_bytes == 4 * GIB + GIB + found.each_bytes
    assert found.how == "4.0 GiB weights, 1.0 GiB for 8192 tokens, 176.0 MiB buffers"
    assert found.host_bytes == 512 * MIB


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"attention__key_length": 256, "attention__value_length": 256}, 2 * GIB),
        ({"attention__head_count_kv": [8] * 16 + [0] * 16}, GIB // 2),
        ({"attention__head_count": 0}, 0),
        ({"attention__sliding_window": 512}, GIB),
        ({"attention__sliding_window": 512, "attention__sliding_window_pattern": 4}, GIB // 4 + GIB * 3 // 32),
        (
            {"attention__sliding_window": 512, "attention__sliding_window_pattern": [True, False] * 16},
            GIB // 2 + GIB // 16,
        ),
        ({"architecture": "gemma2", "attention__sliding_window": 512}, GIB // 2 + GIB // 16),
    ],
    ids=[
        "wide heads",
        "layers without",
        "no attention",
        "a window for nobody knows which",
        "every fourth is full",
        "said of each",
        "gemma2",
    ],
)
def test_shapes(changed: dict[str, Any], expected: int) -> None:
    assert cache(estimate_from_header(header(**changed), 0, context_size=8192)) == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"block_count": 0},
        {"block_count": 10**6},
        {"embedding_length": 2**40},
        {"attention__key_length": 2**40},
        {"attention__head_count_kv": 2**40},
        {"vocab_size": 2**40, "context_length": 2**40},
    ],
)
def test_what_nobody_can_believe_is_no_estimate(changed: dict[str, Any]) -> None:
    assert estimate_from_header(header(**changed), GIB) is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.5])
def test_numbers_that_are_none_stop_nobody(number: float) -> None:
    """A file comes from strangers, and is looked at whenever anything is placed."""
    odd = replace(header(), values={**header().values, "attention.head_count": (number,) * 4096})
    assert odd.numbers("attention.head_count", 2) == ()
    assert estimate_from_header(odd, GIB) is not None


def test_the_definition_has_the_last_word() -> None:
    found = estimate_memory(definition(memory="6GiB"), GIB, header=header(), measured=[MeasuredUsage(9 * GIB)])
    assert found == Memory(6 * GIB, how="as its definition says")


def test_what_was_seen_counts_more_than_what_was_reckoned() -> None:
    estimated = estimate_memory(definition(context_size=8192), 4 * GIB, header=header())
    assert estimated.host_bytes
    measured = estimate_memory(
        definition(context_size=8192),
        4 * GIB,
        header=header(),
        measured=[MeasuredUsage(20 * GIB), MeasuredUsage(3 * GIB)],
    )
    assert measured.total_bytes == 21 * GIB
    assert measured.how == "the most its processes used"
    assert (measured.each_bytes, measured.host_bytes) == (estimated.each_bytes, 0), (
        "what lives beside it was seen with it"
    )
    tiny = estimate_memory(definition(), 4 * GIB, header=header(), measured=[MeasuredUsage(MIB)])
    assert tiny.each_bytes <= tiny.total_bytes


def test_slots_are_the_definitions_or_the_backends() -> None:
    by_backend = estimate_memory(definition(context_size=8192), GIB, header=header(), slots=4)
    by_definition = estimate_memory(definition(context_size=8192, parallel=2), GIB, header=header(), slots=4)
    assert cache(by_backend, GIB) == 4 * GIB
    assert cache(by_definition, GIB) == 2 * GIB


def test_the_definitions_kinds_of_cache() -> None:
    quantised = definition(context_size=8192, cache_type_k="q8_0", cache_type_v="q8_0")
    assert cache(estimate_memory(quantised, 0 + GIB, header=header()), GIB) == GIB * 34 // 64


@pytest.mark.parametrize("given", [None, header(block_count=10**6)], ids=["no head", "a head nobody believes"])
def test_without_a_head_it_is_the_files_and_a_bit(given: GgufHeader | None) -> None:
    found = estimate_memory(definition(), 10 * GIB, header=given)
    assert found.total_bytes == 12 * GIB + 128 * MIB
    assert found.how == "10.0 GiB of files plus 20%"


def test_without_anything_nobody_knows() -> None:
    assert not estimate_memory(definition(), 0, header=header()).known


@pytest.mark.parametrize(
    ("backend", "more", "share"),
    [
        ("llama-cpp", {}, 0.0),
        ("vllm", {}, 0.9),
        ("cuda12-vllm", {}, 0.9),
        ("vllm", {"gpu_memory_utilization": 0.5}, 0.5),
        ("sglang", {"gpu_memory_utilization": 0.7}, 0.7),
        ("vllm", {"gpu_memory_utilization": 7}, 0.9),
        ("vllm", {"gpu_memory_utilization": "half"}, 0.9),
    ],
)
def test_engines_that_take_a_share_of_each_device(backend: str, more: dict[str, Any], share: float) -> None:
    assert device_share(definition(backend=backend, **more)) == share


@pytest.mark.parametrize(("more", "expected"), [({}, False), ({"gpu_layers": 0}, True), ({"gpu_layers": 99}, False)])
def test_off_the_accelerator(more: dict[str, Any], expected: bool) -> None:
    assert is_ram_only(definition(**more)) is expected


def test_what_was_seen_on_devices_counts_there_and_what_was_seen_in_ram_there() -> None:
    estimated = estimate_memory(definition(context_size=8192), 4 * GIB, header=header())
    measured = estimate_memory(
        definition(context_size=8192),
        4 * GIB,
        header=header(),
        measured=[MeasuredUsage(0, 6 * GIB, 1), MeasuredUsage(5 * GIB)],
    )
    assert (measured.total_bytes, measured.host_bytes) == (int(6 * GIB * 1.05), estimated.host_bytes)
    assert measured.all_in_ram == int(5 * GIB * 1.05)
    only_there = estimate_memory(
        definition(context_size=8192), 4 * GIB, header=header(), measured=[MeasuredUsage(0, 6 * GIB, 1)]
    )
    assert only_there.all_in_ram == estimated.all_in_ram, "nobody has seen it in RAM"


def test_what_was_seen_on_several_devices_is_reckoned_for_any_number() -> None:
    estimated = estimate_memory(definition(context_size=8192), 4 * GIB, header=header())
    measured = apply_measured(estimated, [MeasuredUsage(0, 6 * GIB, 4)])
    assert measured.on_each(4) == pytest.approx(6 * GIB * 1.05, rel=0.05)
    assert measured.on_each(1) > 20 * GIB


def test_an_engine_that_takes_its_share_of_any_device_teaches_nothing_there() -> None:
    summary = estimate_memory(definition(backend="vllm"), 4 * GIB, measured=[MeasuredUsage(0, 72 * GIB, 1)])
    assert summary == estimate_memory(definition(backend="vllm"), 4 * GIB)
