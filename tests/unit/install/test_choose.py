"""The quantisation that the fleet's memory holds, and the sentence that says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.gguf import GgufHeader
from corral.contract.models import read_definition
from corral.controller.install.choose import Fitting, choose, evaluate_choices, explain, is_wanted, usual_choice
from corral.controller.install.derive import context_sizes, derive_definition
from corral.controller.install.gguf_files import QuantChoice, SourceFile
from corral.controller.scheduler.memory import estimate_memory
from corral.controller.scheduler.world import GIB, Build, BuildState, World
from tests.support.scheduling import cpu_node, gpu, gpu_node, replica, world

SIZES = {"F16": 16.0, "Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "Q3_K_M": 4.0, "Q2_K": 3.2}
# An 8B model: 128 KiB of cache per token.
SHAPE = GgufHeader(
    3,
    "llama",
    {
        "block_count": 32,
        "context_length": 131_072,
        "embedding_length": 4096,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
    },
    128_256,
    chat_template=True,
)


def choices(sizes: dict[str, float] = SIZES) -> list[QuantChoice]:
    return [
        QuantChoice(quant, (SourceFile(f"x-{quant}.gguf", "https://h/x.gguf", int(gib * GIB)),))
        for quant, gib in sizes.items()
    ]


def evaluated(fleet: World, found: Sequence[QuantChoice] | None = None) -> list[Fitting]:
    def define(choice: QuantChoice, context_size: int) -> dict[str, Any]:
        return derive_definition("x", choice, SHAPE, context_size=context_size)

    return evaluate_choices(fleet, choices() if found is None else found, SHAPE, context_sizes(SHAPE), define)


def chosen(fleet: World) -> Fitting:
    found = choose(evaluated(fleet))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("vram_gib", "quant", "context"),
    [
        (80, "Q8_0", 32_768),  # no more than Q8_0, though F16 would fit, and no more than 32768 tokens
        (24, "Q8_0", 32_768),
        (12, "Q8_0", 16_384),
        (10, "Q8_0", 8192),
        (8, "Q6_K", 4096),
        (6.4, "Q4_K_M", 8192),
    ],
)
def test_an_accelerator_gets_the_best_that_it_holds(vram_gib: float, quant: str, context: int) -> None:
    found = chosen(world([gpu_node("a", [gpu(0, vram_gib)])]))
    assert (found.choice.quant, found.context_size) == (quant, context)


def test_without_an_accelerator_speed_counts() -> None:
    assert chosen(world([cpu_node("big", ram_gib=256)])).choice.quant == "Q4_K_M"
    assert chosen(world([cpu_node("small", ram_gib=6)])).choice.quant in ("Q3_K_M", "Q2_K")


def test_an_accelerator_comes_before_more_ram() -> None:
    fleet = world([cpu_node("ram", ram_gib=256), gpu_node("card", [gpu(0, 8)])])
    found = chosen(fleet)
    assert found.choice.quant == "Q6_K"
    assert found.nodes[0].node == "card"


def test_the_sentence_names_the_node_and_what_would_not_fit() -> None:
    fittings = evaluated(world([gpu_node("node-a", [gpu(0, 8)])]))
    found = choose(fittings)
    assert found is not None
    text = explain(found, fittings)
    assert text.startswith("Q6_K, 6.6 GiB: fits on node-a (GPU 0: 8.0 GiB free of 8.0 GiB)")
    assert text.endswith("; Q8_0 would not fit anywhere")


def test_a_node_that_is_busy_now_counts_after_one_with_room() -> None:
    busy = gpu_node("busy", [gpu(0, 24, 1, uuid="GPU-b")])
    fleet = world([busy], replicas=[replica(busy, "other", 22, devices=())])
    found = chosen(fleet)
    assert found.choice.quant == "Q4_K_M", "what fits later is chosen small"
    assert not found.nodes[0].now
    assert "when other models have left" in explain(found, [found])
    free = gpu_node("free", [gpu(0, 10, uuid="GPU-f")])
    found = chosen(world([busy, free], replicas=[replica(busy, "other", 22)]))
    assert (found.choice.quant, found.nodes[0].node) == ("Q8_0", "free")


def test_nothing_fits() -> None:
    fittings = evaluated(world([cpu_node("tiny", ram_gib=2)]))
    assert choose(fittings) is None
    assert all("tiny: needs" in each.why_not[0] for each in fittings)


def test_a_node_without_a_build_still_tells_its_memory() -> None:
    node = cpu_node("new", builds={"llama-cpp": Build(BuildState.UNKNOWN, "the lookup failed")})
    found = chosen(world([node]))
    assert (found.choice.quant, found.nodes) == ("Q4_K_M", ())
    assert "the lookup failed" in found.why_not[0]


def test_a_fleet_without_nodes_gets_the_usual_one() -> None:
    assert usual_choice(evaluated(world())).choice.quant == "Q4_K_M"
    assert usual_choice(evaluated(world(), choices({"F16": 16.0}))).choice.quant == "F16"


def test_only_what_is_there_can_be_chosen() -> None:
    [only] = evaluated(world([gpu_node("a", [gpu(0, 80)])]), choices({"F16": 16.0}))
    assert choose([only]) is only, "larger than needed is better than nothing"


@pytest.mark.parametrize("text", ["q4_k_m", "Q4-K-M", "Q4_K_M"])
def test_how_users_write_a_quantisation(text: str) -> None:
    assert is_wanted(choices()[4], text)
    assert is_wanted(QuantChoice("UD-Q4_K_XL", choices()[0].files), "Q4_K_XL")
    assert not is_wanted(choices()[0], text)


def test_the_estimate_is_the_schedulers() -> None:
    found = chosen(world([gpu_node("a", [gpu(0, 24)])]))
    whole = derive_definition("x", found.choice, SHAPE, context_size=found.context_size)
    assert found.memory == estimate_memory(read_definition(whole), found.choice.size_bytes, header=SHAPE)


@given(st.lists(st.floats(0.5, 100), min_size=1, max_size=3), st.integers(0, 6))
def test_more_memory_never_results_in_a_worse_choice(vram: list[float], more: int) -> None:
    order = list(SIZES)
    nodes = [gpu_node(f"n{i}", [gpu(0, gib, uuid=f"GPU-{i}")], total_ram=GIB) for i, gib in enumerate(vram)]
    before = choose(evaluated(world(nodes)))
    larger = gpu_node("larger", [gpu(0, max(vram) + more, uuid="GPU-l")])
    after = choose(evaluated(world([*nodes, larger])))
    if before is not None:
        assert after is not None
        assert order.index(after.choice.quant) <= order.index(before.choice.quant)
