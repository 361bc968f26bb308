"""Which node gets a replica, and what each of them says about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from corral.contract.labels import selector_of_map
from corral.controller.scheduler.placement import NoCapacity, Placed, Verdict, choose_node, evaluate_nodes
from corral.controller.scheduler.world import (
    GIB,
    MIB,
    Build,
    BuildState,
    Memory,
    Model,
    ModelFile,
    Node,
    Policy,
    ReplicaState,
    World,
)
from tests.support.scheduling import cpu_node, gpu, gpu_node, model, on, replica, with_schedule, world


def placed(fleet: World, of: Model, **more: Any) -> Placed:
    found = choose_node(fleet, of, **more)
    assert isinstance(found, Placed), found
    return found


def refused(fleet: World, of: Model, **more: Any) -> NoCapacity:
    found = choose_node(fleet, of, **more)
    assert isinstance(found, NoCapacity), found
    return found


def why(of: Model, node: Node, **more: Any) -> str:
    return refused(world([node], [of], **more), of).why[0]


def verdict_of(found: Placed | NoCapacity, node: str) -> Verdict:
    return next(verdict for verdict in found.verdicts if verdict.node == node)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"status": "unhealthy"}, "cpu: is unhealthy"),
        ({"status": "draining"}, "cpu: is draining"),
        ({"status": "pending"}, "cpu: is pending"),
        ({"status": "offline"}, "cpu: is offline"),
        ({"bus_down": True}, "cpu: cannot receive orders: its connection to the bus is down"),
        ({"vetoes": ("is a LocalAI worker",)}, "cpu: is a LocalAI worker"),
        ({"builds": {}}, "cpu: llama-cpp: its builds were not looked up yet"),
        (
            {"builds": {"llama-cpp": Build(BuildState.MISSING, "no linux/arm64 build")}},
            "cpu: no build of llama-cpp: no linux/arm64 build",
        ),
        (
            {"builds": {"llama-cpp": Build(BuildState.FORBIDDEN, "deleted by a person")}},
            "cpu: llama-cpp is not allowed here: deleted by a person",
        ),
    ],
)
def test_nodes_that_are_out_say_why(changed: dict[str, Any], reason: str) -> None:
    assert why(model(), cpu_node(**changed)) == reason


def test_a_selector_rules_out_nodes_without_the_labels() -> None:
    of = with_schedule(model(), selector=selector_of_map({"tier": "fast"}))
    nodes = [cpu_node("a", labels={"tier": "slow"}), cpu_node("b"), cpu_node("c", labels={"tier": "fast"})]
    found = placed(world(nodes, [of]), of)
    assert found.node == "c"
    assert verdict_of(found, "a").why_not == "tier=fast: has 'slow'"
    assert verdict_of(found, "b").why_not == "tier=fast: has no such label"
    assert not refused(world(nodes[:2], [of]), of).fits_later


def test_a_node_takes_only_so_many_of_one_model() -> None:
    of, node = model(), cpu_node()
    assert why(of, node, replicas=[replica(node, of)]) == "cpu: runs 1 of at most 1 replicas of this model"
    roomy = replace(node, max_replicas_per_model=2)
    assert placed(world([roomy], [of], [replica(roomy, of)]), of).index == 1


def test_an_old_revision_fills_no_slot_and_keeps_its_number() -> None:
    of, node = model(revision="r2"), cpu_node()
    assert placed(world([node], [of], [replica(node, of)]), of).index == 1


def test_one_that_ends_fills_no_slot_and_keeps_its_number() -> None:
    of, node = model(), cpu_node()
    assert placed(world([node], [of], [replica(node, of, state=ReplicaState.STOPPING)]), of).index == 1


def test_the_lowest_free_number() -> None:
    of, node = model(), cpu_node(max_replicas_per_model=5)
    there = [replica(node, of, index=index) for index in (0, 1, 3)]
    assert placed(world([node], [of], there), of).index == 2


# docs/reference/wire/budgets-and-labels.md#disk-headroom: known size → size + max(5 %, 1 GiB); unknown → 2 GiB;
# total_disk 0 always passes.
@pytest.mark.parametrize(
    ("files", "total", "available", "fits"),
    [
        ((ModelFile("sha256:a", 10 * GIB),), 100, 11 * GIB, True),
        ((ModelFile("sha256:a", 10 * GIB),), 100, 11 * GIB - 1, False),
        ((ModelFile("sha256:a", 100 * GIB),), 100, 105 * GIB, True),
        ((ModelFile("sha256:a", 100 * GIB),), 100, 105 * GIB - 1, False),
        (None, 100, 2 * GIB, True),
        (None, 100, 2 * GIB - 1, False),
        ((ModelFile("sha256:a", 0),), 100, 2 * GIB - 1, False),
        (None, 0, 0, True),
        ((ModelFile("sha256:there", 100 * GIB),), 100, 0, True),
        ((), 100, 0, True),
    ],
)
def test_disk(files: tuple[ModelFile, ...] | None, total: int, available: int, fits: bool) -> None:
    node = cpu_node(total_disk=total * GIB, available_disk=available, files=frozenset({"sha256:there"}))
    of = model(files=files)
    assert isinstance(choose_node(world([node], [of]), of), Placed) is fits


def test_too_little_disk_is_told_with_numbers() -> None:
    node = cpu_node(total_disk=100 * GIB, available_disk=5 * GIB)
    of = model(files=(ModelFile("sha256:a", 10 * GIB),))
    assert why(of, node) == "cpu: 11.0 GiB needed on disk, 5.0 GiB free"
    unchecked = placed(world([node], [of], policy=Policy(disk_check=False)), of)
    (disk,) = [check for check in unchecked.verdicts[0].checks if check.name == "disk"]
    assert disk.text == "11.0 GiB needed on disk, 5.0 GiB free; ignored, because the disk check is switched off"
    assert placed(world([node], [of], policy=Policy(shared_models=True)), of).node == "cpu"


def test_a_refusal_for_disk_space_names_the_free_space_of_every_node() -> None:
    of = model("big", memory=Memory(9 * GIB, how="3 files"), files=(ModelFile("sha256:a", 10 * GIB),))
    nodes = [
        cpu_node("a", total_disk=100 * GIB, available_disk=5 * GIB),
        cpu_node("b", total_disk=100 * GIB, available_disk=7 * GIB),
        cpu_node("c", total_disk=100 * GIB, available_disk=90 * GIB, status="offline"),
        cpu_node("d", total_disk=100 * GIB, available_disk=0),
        cpu_node("e", status="offline"),
    ]
    refused = choose_node(world(nodes, [of]), of)
    assert isinstance(refused, NoCapacity)
    assert refused.text == (
        "none of 5 nodes can run big (needs 9.0 GiB: 3 files): 3 for disk (a, b, d), 2 for node (c, e); "
        "11.0 GiB needed on disk; free: c 90.0 GiB, b 7.0 GiB, a 5.0 GiB, d 0 B"
    )


def test_memory_is_refused_with_numbers() -> None:
    of = model("big", memory=Memory(9 * GIB, how="3 files"))
    assert why(of, gpu_node()) == "gpu: needs 9.0 GiB on one GPU; GPU 0: 8.0 GiB free of 8.0 GiB"
    found = refused(world([gpu_node(), cpu_node(status="offline"), cpu_node("b", ram_gib=4)], [of]), of)
    assert found.text == (
        "none of 3 nodes can run big (needs 9.0 GiB: 3 files): 2 for memory (b, gpu), 1 for node (cpu)"
    )
    assert refused(world(models=[of]), of).text == "no node can run big (needs 9.0 GiB: 3 files): there are no nodes"


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(gpu_node("z"), cpu_node("a", ram_gib=500), id="an accelerator before RAM"),
        pytest.param(cpu_node("z", ram_gib=32), cpu_node("a", ram_gib=16), id="the roomiest"),
        pytest.param(cpu_node("a"), cpu_node("b"), id="the name, when all is equal"),
        pytest.param(cpu_node("z"), cpu_node("a", ram_gib=0), id="where it is known to fit"),
        pytest.param(
            cpu_node("z"),
            cpu_node("a", ram_gib=64, builds={"llama-cpp": Build(BuildState.INSTALLABLE, size_bytes=MIB)}),
            id="where its backend is",
        ),
        pytest.param(cpu_node("z", files=frozenset({"sha256:a"})), cpu_node("a", ram_gib=64), id="where its files are"),
    ],
)
def test_the_better_node(better: Node, worse: Node) -> None:
    of = model(gib=2, files=(ModelFile("sha256:a", 2 * GIB),))
    for nodes in ([better, worse], [worse, better]):
        assert placed(world(nodes, [of]), of).node == better.name


def test_little_to_fetch_is_as_good_as_nothing() -> None:
    of = model(gib=2, files=(ModelFile("sha256:a", 500 * MIB),))
    nodes = [cpu_node("z", files=frozenset({"sha256:a"})), cpu_node("a", ram_gib=64)]
    assert placed(world(nodes, [of]), of).node == "a"


def test_replicas_of_one_model_are_spread() -> None:
    of, a, b = model(gib=1), cpu_node("a", ram_gib=64, max_replicas_per_model=4), cpu_node("b")
    assert placed(world([a, b], [of], [replica(a, of)]), of).node == "b"


def test_an_idle_node_before_one_with_other_models() -> None:
    of, a, b = model(gib=1), cpu_node("a", ram_gib=64), cpu_node("b")
    assert placed(world([a, b], [of], [replica(a, "other")]), of).node == "b"


def test_the_least_busy_node_of_those_that_have_other_models() -> None:
    of, a, b = model(gib=1), cpu_node("a", ram_gib=64), cpu_node("b")
    there = [replica(a, "other", in_flight=3), replica(b, "other", in_flight=1)]
    assert placed(world([a, b], [of], there), of).node == "b"


def test_members_of_a_group_that_is_a_preference_keep_apart_while_they_can() -> None:
    of, other = model(gib=1, concurrency_groups=("big",)), model("other", concurrency_groups=("small", "big"))
    a, b = cpu_node("a", ram_gib=64), cpu_node("b")
    soft = Policy(exclusive_groups=False)
    fleet = world([a, b], [of, other], [replica(a, other)], policy=soft)
    assert placed(fleet, of).node == "b"
    alone = placed(world([a], [of, other], [replica(a, other)], policy=soft), of)
    assert alone.node == "a"
    assert "avoids nodes that run other" in alone.text
    unrelated = model(gib=1, concurrency_groups=("quiet",))
    assert "beside" not in placed(world([a], [unrelated, other], [replica(a, other)], policy=soft), unrelated).text


def test_where_it_failed_last_comes_last() -> None:
    a, b = cpu_node("a", ram_gib=64), cpu_node("b", status="healthy", ram_gib=4)
    of = model(gib=1, failed_on={a.id: "out of memory"})
    assert placed(world([a, b], [of]), of).node == "b"
    only = placed(world([a], [of]), of)
    assert only.node == "a"
    assert "its last start here failed: out of memory" in only.text


def test_only_some_nodes_are_asked() -> None:
    of, a, b = model(gib=1), cpu_node("a", ram_gib=64), cpu_node("b")
    assert placed(world([a, b], [of]), of, only={b.id}).node == "b"
    assert refused(world([a], [of]), of, only={b.id}).text.endswith("there are no nodes")


def test_as_if_others_had_ended() -> None:
    of, node = model(gib=6), gpu_node(gpus=[gpu(0, 8, free_gib=2)])
    other = replica(node, "other", 6, devices=on(0))
    fleet = world([node], [of], [other])
    found = refused(fleet, of)
    assert found.fits_later
    assert found.verdicts[0].blocked_by_replicas
    assert placed(fleet, of, without={other.key}).node == "gpu"


@pytest.mark.parametrize(
    ("node", "fits_later"),
    [
        (cpu_node(status="offline"), True),
        (cpu_node(ram_gib=1), False),
        (cpu_node(builds={}), True),
        (cpu_node(builds={"llama-cpp": Build(BuildState.MISSING, "none")}), False),
        (cpu_node(ram_gib=16, free_gib=1), True),
    ],
)
def test_what_time_may_cure(node: Node, fits_later: bool) -> None:
    of = model(gib=4)
    assert refused(world([node], [of]), of).fits_later is fits_later


def test_verdicts_come_best_first_and_the_rest_by_name() -> None:
    of = model(gib=2)
    nodes = [cpu_node("d", ram_gib=1), cpu_node("c", ram_gib=1), cpu_node("b"), cpu_node("a", ram_gib=64)]
    assert [verdict.node for verdict in evaluate_nodes(world(nodes, [of]), of)] == ["a", "b", "c", "d"]
