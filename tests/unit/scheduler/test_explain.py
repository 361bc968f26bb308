"""What `corral why` shows is what was decided, with its numbers."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from corral.contract.labels import selector_of_map
from corral.contract.why import WhyModel, WhyNode
from corral.controller.scheduler.explain import MEANINGS, explain_model, explain_node
from corral.controller.scheduler.placement import Score
from corral.controller.scheduler.world import GIB, Memory, ModelFile, ReplicaState, budget_of
from tests.support.scheduling import cpu_node, gpu, gpu_node, model, on, replica, with_schedule, world


def test_every_node_is_told_best_first_with_checks_and_score() -> None:
    of = model("m", memory=Memory(4 * GIB, how="3 files"), files=(ModelFile("sha256:a", 2 * GIB),))
    nodes = [cpu_node("small", ram_gib=1), cpu_node("large", ram_gib=32), gpu_node("fast")]
    explained = explain_model(world(nodes, [of]), of)
    assert (explained.decision, explained.memory_bytes, explained.memory_how) == ("placed", 4 * GIB, "3 files")
    assert explained.text.startswith("fast: needs 4.0 GiB; GPU 0: 8.0 GiB free of 8.0 GiB")
    assert [verdict.node for verdict in explained.nodes] == ["fast", "large", "small"]
    fast, large, small = explained.nodes
    assert [check.name for check in fast.checks] == ["node", "selector", "backend", "slots", "disk", "memory"]
    assert all(check.ok for check in fast.checks)
    assert {score.name: score.value for score in large.score}["in_ram"] == "yes"
    assert (fast.devices, fast.memory_bytes, fast.fetch_bytes) == ((0,), 4 * GIB, 2 * GIB)
    assert fast.notes == ("2.0 GiB to fetch",)
    assert (small.eligible, small.score) == (False, ())
    assert small.text == "needs 4.0 GiB of RAM; RAM: 972.8 MiB free of 972.8 MiB"


def test_every_line_of_the_ranking_has_its_meaning() -> None:
    assert list(MEANINGS) == list(Score._fields)


def test_who_is_in_the_way_is_told() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=2)])
    of, other = model("m", 6), model("other", 6, pinned=True)
    explained = explain_model(world([node], [of, other], [replica(node, other, 6, devices=on(0))]), of)
    assert explained.decision == "no_room"
    assert explained.kept == ("other is pinned",)


def test_what_has_to_happen_first_is_told() -> None:
    node = gpu_node(gpus=[gpu(0, 8, free_gib=2)])
    of, other = model("m", 6), model("other", 6)
    there = replica(node, other, 6, devices=on(0))
    assert explain_model(world([node], [of, other], [there]), of).decision == "make_room"
    busy = replica(node, other, 6, devices=on(0), in_flight=1)
    assert explain_model(world([node], [of, other], [busy]), of).decision == "wait"


def test_how_many_there_should_be_is_told() -> None:
    a, b = cpu_node("a"), cpu_node("b", labels={"tier": "fast"})
    of = with_schedule(model("m", 1), min_replicas=1, max_replicas=3, selector=selector_of_map({"tier": "fast"}))
    explained = explain_model(world([a, b], [of], [replica(a, of, 1)]), of)
    assert (explained.min_replicas, explained.max_replicas, explained.selector) == (1, 3, "tier=fast")
    assert explained.scaling == "up"
    assert "b: needs 1.0 GiB of RAM" in explained.scaling_text
    moved = explain_model(world([a, b], [of], [replica(a, of, 1), replica(b, of, 1)]), of)
    assert (moved.scaling, moved.scaling_text) == ("down", "replica 0 on a: a no longer matches the selector")
    far = with_schedule(of, selector=selector_of_map({"tier": "none"}))
    assert explain_model(world([a, b], [far]), far).scaling == "unsatisfied"
    plain = model("m", 1)
    assert explain_model(world([a, b], [plain]), plain).scaling == "hold"


def test_a_node_tells_its_memory_its_replicas_and_every_model() -> None:
    node = gpu_node("g", gpus=[gpu(0, 8, free_gib=2), gpu(1, 8)], budget=budget_of("12GiB"))
    a, big = model("a", 6, pinned=True), model("big", 30)
    there = replica(node, a, 6, devices=on(0), last_used_at=None)
    explained = explain_node(world([node], [a, big], [there]), node)
    assert (explained.accepts, explained.text) == (True, "takes new replicas")
    assert [pool.name for pool in explained.spaces] == ["GPU 0", "GPU 1", "RAM"]
    assert explained.spaces[0].text == "GPU 0: 2.0 GiB free of 8.0 GiB"
    assert (explained.budget_bytes, explained.left_of_budget) == (12 * GIB, 6 * GIB)
    (shown,) = explained.replicas
    assert (shown.model, shown.state, shown.devices, shown.unused_s) == ("a", "ready", (0,), 3600.0)
    assert shown.kept == "is pinned"
    assert [(verdict.model, verdict.eligible) for verdict in explained.models] == [("a", False), ("big", False)]


def test_a_node_that_takes_nothing_says_why() -> None:
    explained = explain_node(world([node := cpu_node(status="draining")]), node)
    assert (explained.accepts, explained.text) == (False, "is draining")


def test_what_ran_on_a_node_that_is_gone_is_not_told_as_ready() -> None:
    here, without, of = cpu_node("a"), cpu_node("gone", status="offline"), model("m", 1)
    explained = explain_model(world([without, here], [of], [replica(without, of, 1), replica(here, of, 1)]), of)
    assert {each.node: each.state for each in explained.replicas} == {"gone": "node offline", "a": "ready"}


def test_it_travels_as_json() -> None:
    node, of = cpu_node(), model("m", 1)
    fleet = world([node], [of], [replica(node, of, 1, state=ReplicaState.STARTING, ready_at=None)])
    explained = explain_model(fleet, of)
    assert msgspec.json.decode(msgspec.json.encode(explained), type=WhyModel) == explained
    of_node = explain_node(fleet, node)
    assert msgspec.json.decode(msgspec.json.encode(of_node), type=WhyNode) == of_node


def test_a_new_revision_on_trial_is_told_from_an_earlier_one() -> None:
    node = cpu_node("barn", ram_gib=64)
    of = replace(model("m", 1), revision="b", trial_revision="c")
    held = [replace(replica(node, of, 1), revision=revision) for revision in ("a", "b", "c")]
    found = explain_model(world([node], [of], held), of).replicas
    assert [(each.current, each.on_trial) for each in found] == [(False, False), (True, False), (False, True)]
