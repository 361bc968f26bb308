"""A backend on every node: at once, in the right build, and only done when the node shows it."""

from __future__ import annotations

import asyncio

import pytest

from corral.controller.backends.plan import NoBuild
from corral.kit.errors import NotFound, Unreachable
from corral.store.tables import nodes, operations
from tests.support.backend_fleet import Fleet, operation_request
from tests.support.scripted_catalogue import build
from tests.support.waiting import until


async def test_every_node_gets_it_in_the_build_that_fits(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    stall = await fleet.corral("stall", capability="nvidia")
    operation = await fleet.install("vllm")
    view = await fleet.until(operation, "done")
    assert {row.node_name: (row.status, row.variant) for row in view.nodes} == {
        "barn": ("success", "cpu-vllm"),
        "stall": ("success", "cuda-vllm"),
    }
    assert (view.progress, view.message, view.outcome) == (100, "completed", "completed")
    (order,) = barn.orders()
    assert order == {
        "backend": "vllm",
        "op_id": operation,
        "accept": True,
        "attempt": 1,
        "variant": "cpu-vllm",
        "digest": "sha256:cpu-vllm-1",
        "version": "1.0",
        "sources": [{"kind": "oci", "uri": "registry.test/cpu-vllm:1"}],
    }
    assert stall.orders()[0]["variant"] == "cuda-vllm"
    assert await fleet.inventory("barn") == ["vllm"]


async def test_why_a_machine_with_a_gpu_gets_the_cpu_build_stands_in_the_plan_and_in_its_row(fleet: Fleet) -> None:
    why = "cpu-vllm: no build for nvidia itself, default is the nearest; cuda13-vllm: needs CUDA 13"
    fleet.catalogue.builds["vllm"] = {"*": build("cpu-vllm"), "nvidia": build("cpu-vllm", note=why)}
    await fleet.corral("barn")
    await fleet.corral("stall", capability="nvidia")
    plan = await fleet.operations.plan(operation_request("install", "vllm"))
    assert {node.node_name: node.reason for node in plan.nodes} == {"barn": "", "stall": why}
    view = await fleet.until(await fleet.install("vllm"), "done")
    assert {row.node_name: (row.status, row.error, row.note) for row in view.nodes} == {
        "barn": ("success", "", ""),
        "stall": ("success", "", why),
    }


async def test_fan_out_is_concurrent_and_one_slow_node_delays_nobody(fleet: Fleet) -> None:
    workers = [await fleet.corral(f"n{number}") for number in range(12)]
    slow = await fleet.corral("slow")
    slow.script.hold = asyncio.Event()
    gate = asyncio.Event()
    for worker in workers:
        worker.script.hold = gate
    operation = await fleet.install()
    await until(lambda: all(worker.at_once for worker in [*workers, slow]))
    gate.set()
    for number in range(12):
        await fleet.until_row(operation, f"n{number}", "success")
    view = await fleet.view(operation)
    assert view.state == "under_way"
    assert (await fleet.row(operation, "slow")).status == "downloading"
    slow.script.hold.set()
    await fleet.until(operation, "done")


async def test_what_is_there_already_is_success_without_an_order(fleet: Fleet) -> None:
    barn = await fleet.corral("barn", joins=False)
    barn.put("vllm", digest="sha256:cpu-vllm-1")
    await barn.start()
    await barn.beat()
    await fleet.until(await fleet.install(), "done")
    assert barn.orders() == []


async def test_a_meta_backend_is_done_when_its_build_is_there(fleet: Fleet) -> None:
    barn = await fleet.corral("barn", joins=False)
    barn.put("vllm", is_meta=True, meta_backend_for="cpu-vllm")
    barn.put("cpu-vllm", digest="sha256:cpu-vllm-1", alias="vllm")
    await barn.start()
    await barn.beat()
    await fleet.until(await fleet.install(), "done")
    assert barn.orders() == []


async def test_agents_and_pending_nodes_are_left_out_and_the_latter_get_it_on_approval(fleet: Fleet) -> None:
    await fleet.corral("barn")
    await fleet.node("agent", node_type="agent")
    new = await fleet.corral("new", status="pending", approved=False)
    operation = await fleet.install()
    view = await fleet.until(operation, "done")
    assert [row.node_name for row in view.nodes] == ["barn"]
    assert new.orders() == []
    await fleet.set_node("new", status="healthy", approved=True)
    await fleet.until_row(operation, "new", "success")
    assert (await fleet.until(operation, "done")).outcome == "completed"


async def test_a_node_that_joins_tomorrow_converges(fleet: Fleet) -> None:
    await fleet.corral("barn")
    operation = await fleet.install()
    await fleet.until(operation, "done")
    late = await fleet.corral("late")
    await fleet.until_row(operation, "late", "success")
    assert len(late.orders("install")) == 1
    assert len(fleet.workers["barn"].orders()) == 1


async def test_no_build_for_the_platform_is_skipped_with_the_reason(fleet: Fleet) -> None:
    fleet.catalogue.builds["vllm"]["default", "linux/arm64"] = NoBuild("no linux/arm64 build")
    await fleet.corral("barn")
    pi = await fleet.corral("pi", arch="arm64")
    view = await fleet.until(await fleet.install(), "done")
    assert {row.node_name: (row.status, row.error) for row in view.nodes} == {
        "barn": ("success", ""),
        "pi": ("skipped", "no linux/arm64 build"),
    }
    assert pi.orders() == [], "what can never succeed is not sent"


async def test_an_unknown_backend_is_refused_with_the_nearest_names(fleet: Fleet) -> None:
    await fleet.corral("barn")
    with pytest.raises(NotFound, match="did you mean llama-cpp"):
        await fleet.install("llama-ccp")
    async with fleet.store.read() as tx:
        assert await operations.list_(tx, limit=9) == []


async def test_a_registry_that_is_away_is_told_and_asked_again(fleet: Fleet) -> None:
    fleet.catalogue.builds["vllm"]["*"] = Unreachable("registry.test refuses connections")
    barn = await fleet.corral("barn")
    operation = await fleet.install()
    row = await fleet.until_row(operation, "barn", "error")
    assert "registry.test refuses connections" in row.error
    assert row.next_retry_at
    fleet.catalogue.builds["vllm"]["*"] = build("cpu-vllm")
    fleet.first.backends.reconciler.targets._failing.clear()  # half a minute passes
    await fleet.until(operation, "done")
    assert len(barn.orders()) == 1


async def test_a_lookup_that_takes_long_does_not_hold_up_the_answer(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    fleet.catalogue.slow = asyncio.Event()
    operation = await fleet.install()
    assert (await fleet.row(operation, "barn")).status == "queued"
    fleet.catalogue.slow.set()
    await fleet.until(operation, "done")
    assert len(barn.orders()) == 1


async def test_a_later_node_gets_the_build_the_others_got(fleet: Fleet) -> None:
    """The gallery has moved on; the rule has not."""
    fleet.catalogue.builds["vllm"]["intel"] = build("cpu-vllm")
    await fleet.corral("barn")
    await fleet.until(await fleet.install(), "done")
    fleet.catalogue.publish("vllm", "sha256:newer")
    fleet.catalogue.publish("vllm", "sha256:newer", "intel")
    late = await fleet.corral("late")
    other = await fleet.corral("other", capability="intel")  # another kind of machine, the same variant
    await until(lambda: late.installed and other.installed)
    assert {worker.installed["vllm"]["digest"] for worker in (late, other)} == {"sha256:cpu-vllm-1"}


async def test_custom_uris_are_stored_whole_and_sent_again_whole(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    old = await fleet.localai("old-hand")
    barn.script.failures = [{"error": "cut"}]
    old.script.failures = [{"error": "cut"}]
    operation = await fleet.install("mine", uri="oci://registry.test/mine:7", alias="vllm")
    for name in ("barn", "old-hand"):
        await fleet.until_row(operation, name, "error")
        await fleet.time_passes(name, "mine")
    await fleet.until(operation, "done")
    for order in (*barn.orders(), *old.orders()):
        assert (order["uri"], order["name"], order["alias"]) == ("oci://registry.test/mine:7", "mine", "vllm")
    assert len(old.orders()) == 2


async def test_one_node_or_some_by_label(fleet: Fleet) -> None:
    for name, tier in (("a", "fast"), ("b", "slow"), ("c", "fast")):
        await fleet.corral(name, labels={"tier": tier})
    await fleet.until(await fleet.install(selector="tier=fast"), "done")
    await fleet.until(await fleet.install("llama-cpp", node="b"), "done")
    assert {name: sorted(worker.installed) for name, worker in fleet.workers.items()} == {
        "a": ["vllm"],
        "b": ["llama-cpp"],
        "c": ["vllm"],
    }
    async with fleet.store.write() as tx:
        from corral.store.tables import node_labels

        await node_labels.merge(tx, "id-of-b", {"tier": "fast"}, origin="admin")
    fleet.first.backends.reconciler.reconcile_all()
    await until(lambda: "vllm" in fleet.workers["b"].installed)


async def test_forced_means_fetched_again_once(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.until(await fleet.install(), "done")
    before = barn.installed["vllm"]["installed_at"]
    await fleet.until(await fleet.install(force=True), "done")
    assert barn.installed["vllm"]["installed_at"] != before
    assert barn.orders("install")[-1]["force"] is True
    await fleet.quiet()
    assert len(barn.orders()) == 2


async def test_the_same_wish_while_it_is_fulfilled_is_the_same_operation(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    first = await fleet.install()
    await fleet.until_row(first, "barn", "downloading")
    assert await fleet.install() == first
    assert await fleet.install(node="barn") != first
    barn.script.hold.set()
    await fleet.until(first, "done")
    assert await fleet.install() != first


async def test_a_deleted_node_ends_its_rows(fleet: Fleet) -> None:
    await fleet.corral("barn")
    await fleet.node("ghost", status="offline")
    operation = await fleet.install()
    await fleet.until(operation, "waiting")
    async with fleet.store.write() as tx:
        await nodes.delete(tx, "id-of-ghost")
    fleet.first.backends.reconciler.reconcile_changed()
    row = await fleet.until_row(operation, "ghost", "withdrawn")
    assert row.error == "the node was deleted"
    await fleet.until(operation, "done")
