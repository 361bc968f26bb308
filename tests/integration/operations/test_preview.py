"""`?plan=true`: what a request would do on each node, with nothing stored and nothing sent."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from corral.contract.admin import PlanNode, PlanProcess, PlanView
from corral.contract.messages.backends import NodeBackend
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat
from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.backends.plan import NoBuild
from corral.kit.errors import Conflict, NotFound, Unavailable
from corral.store.tables import backend_rules, models, node_backends, operations
from tests.integration.store.rows import a_model
from tests.support.backend_fleet import Fleet, operation_request
from tests.support.scripted_catalogue import build
from tests.support.scripted_worker import CorralWorker
from tests.support.waiting import until

GIB = 1 << 30


async def plan(fleet: Fleet, kind: str, backend: str = "vllm", **more: Any) -> PlanView:
    view: PlanView = await fleet.operations.plan(operation_request(kind, backend, **more))
    return view


async def planned(fleet: Fleet, kind: str, backend: str = "vllm", **more: Any) -> dict[str, PlanNode]:
    return {node.node_name: node for node in (await plan(fleet, kind, backend, **more)).nodes}


async def told(fleet: Fleet, worker: CorralWorker, *processes: ReplicaProcess) -> None:
    """The node's next heartbeat has arrived, with what runs there."""
    rows = tuple(NodeBackend(**row) for row in worker.installed.values())
    beat = BusHeartbeat(boot_id=worker.boot_id, inventory=rows, orders=(), processes=processes)
    await worker.bus.publish(NODE_HEARTBEAT, beat, node=worker.node_id)

    async def known() -> bool:
        async with fleet.store.read() as tx:
            found = await node_backends.find(tx, worker.node_id)
        return found is not None and (found.backends, found.processes) == (rows, processes)

    await until(known)


async def test_nothing_is_stored_and_nothing_is_sent(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await plan(fleet, "install")
    await fleet.quiet()
    async with fleet.store.read() as tx:
        assert await operations.list_(tx, limit=1) == []
        assert await backend_rules.list_live(tx) == []
    assert barn.orders() == []


async def test_per_node_variant_bytes_and_disk_or_why_not(fleet: Fleet) -> None:
    fleet.catalogue.builds["vllm"] = {
        "*": build("cpu-vllm", size_bytes=GIB),
        "nvidia": build("cuda-vllm", size_bytes=0),
        ("default", "linux/arm64"): NoBuild("no linux/arm64 build"),
    }
    await fleet.corral("plain", available_disk=10 * GIB, total_disk=100 * GIB)
    await fleet.corral("fast", capability="nvidia")
    await fleet.corral("small", arch="arm64")
    await fleet.node("away", status="offline")
    nodes = await planned(fleet, "install")
    assert [nodes[name].action for name in ("plain", "fast", "small", "away")] == [
        "install",
        "install",
        "skip",
        "install",
    ]
    assert (nodes["plain"].variant, nodes["plain"].version) == ("cpu-vllm", "1.0")
    assert (nodes["plain"].fetch_bytes, nodes["plain"].disk_after_bytes) == (GIB, 8 * GIB)
    assert (nodes["fast"].variant, nodes["fast"].fetch_bytes) == ("cuda-vllm", None)
    assert nodes["small"].reason == "no linux/arm64 build"
    assert (nodes["away"].waits, nodes["away"].reason) == (True, "node offline, will be done when it is healthy")


async def test_who_has_it_already_has_nothing_to_do(fleet: Fleet) -> None:
    await fleet.corral("barn")
    await fleet.until(await fleet.install(), "done")
    await fleet.corral("shed")
    nodes = await planned(fleet, "install")
    assert (nodes["barn"].action, nodes["barn"].reason) == ("nothing", "it has this build already")
    assert nodes["shed"].action == "install"
    assert (await planned(fleet, "install", force=True))["barn"].action == "reinstall"


async def test_an_upgrade_that_changes_no_node_says_so_and_orders_nothing(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.corral("shed")
    await fleet.until(await fleet.install(), "done")
    before = len(barn.orders())
    assert (await plan(fleet, "upgrade")).notes == ("vllm: nothing newer on any node (1.0 is installed)",)
    accepted = await fleet.operations.accept(operation_request("upgrade", "vllm", node="barn"))
    assert accepted.unchanged == "vllm: nothing newer on barn (1.0 is installed)"
    view = await fleet.view(accepted.operation_id)  # at once, not when the reconciler has looked
    assert (view.state, view.outcome, view.counts) == ("done", "completed", {"skipped": 1})
    assert [row.error for row in view.nodes] == ["it has this build already"]
    await fleet.quiet()
    assert len(barn.orders()) == before
    fleet.catalogue.publish("vllm", "sha256:2")
    accepted = await fleet.operations.accept(operation_request("upgrade", "vllm", node="barn"))
    assert accepted.unchanged == ""
    await fleet.until(accepted.operation_id, "done")
    accepted = await fleet.operations.accept(operation_request("upgrade", "vllm"))
    view = await fleet.until(accepted.operation_id, "done")
    assert (accepted.unchanged, view.counts) == ("", {"skipped": 1, "success": 1})


async def test_an_upgrade_while_an_older_order_is_under_way_is_not_over_at_once(fleet: Fleet) -> None:
    """What the node reports now may not be what it ends with."""
    barn = await fleet.corral("barn")
    await fleet.until(await fleet.install(), "done")
    fleet.catalogue.publish("vllm", "sha256:2")
    barn.script.hold = asyncio.Event()
    await fleet.ask("upgrade", "vllm")
    await until(lambda: barn.orders("upgrade"))
    fleet.catalogue.publish("vllm", "sha256:cpu-vllm-1")
    accepted = await fleet.operations.accept(operation_request("upgrade", "vllm"))
    assert accepted.unchanged == ""
    barn.script.hold.set()
    await fleet.until(accepted.operation_id, "done")
    assert barn.installed["vllm"]["digest"] == "sha256:cpu-vllm-1"


async def test_an_upgrade_tells_which_processes_are_replaced_and_how(fleet: Fleet) -> None:
    barn, shed = await fleet.corral("barn"), await fleet.corral("shed")
    await fleet.until(await fleet.install(), "done")
    one = ReplicaProcess("p1", "smollm", 0, "vllm", "ready", "openai")
    other = ReplicaProcess("p2", "whisper", 0, "piper", "ready", "openai")
    await told(fleet, barn, one, other)
    await told(fleet, shed)
    fleet.catalogue.publish("vllm", "sha256:2")
    view = await plan(fleet, "upgrade")
    nodes = {node.node_name: node for node in view.nodes}
    assert view.max_parallel == "25%"
    assert "then one node of each hardware class switches, then 25% of the nodes at once" in view.notes[0]
    assert (nodes["barn"].action, nodes["barn"].installed_digest) == ("upgrade", "sha256:cpu-vllm-1")
    assert nodes["barn"].digest == "sha256:2"
    assert nodes["barn"].replaces == (PlanProcess("p1", "smollm", "beside", 0.0),)
    assert nodes["barn"].processes.startswith("1 process is replaced: the new version starts beside it")
    assert (nodes["shed"].replaces, nodes["shed"].processes) == ((), "none runs")


async def test_where_memory_does_not_hold_two_the_old_one_ends_first_and_the_gap_is_told(fleet: Fleet) -> None:
    barn = await fleet.corral("barn", available_ram=4 * GIB)
    await fleet.until(await fleet.install(), "done")
    times: dict[str, Any] = {"started_at": "2026-01-01T12:00:00Z", "ready_at": "2026-01-01T12:00:08Z"}
    large = ReplicaProcess("p1", "smollm", 0, "vllm", "ready", "openai", memory_bytes=5 * GIB, **times)
    await told(fleet, barn, large)
    fleet.catalogue.publish("vllm", "sha256:2")
    node = (await planned(fleet, "upgrade"))["barn"]
    assert node.replaces == (PlanProcess("p1", "smollm", "in_place", 8.0, 5 * GIB),)
    assert node.processes == (
        "1 process is replaced in place: memory does not hold two (needs 5.0 GiB of RAM, 4.0 GiB free), so the old one "
        "ends first; a gap of about 8 s; no other node serves smollm: requests wait at the gateway"
    )
    await fleet.until(await fleet.ask("upgrade", "vllm"), "done")
    fetch, switch = barn.orders("upgrade")
    assert (fetch.get("in_place"), switch.get("in_place")) == (None, True)


async def test_where_another_node_serves_the_model_meanwhile_the_plan_names_it(fleet: Fleet) -> None:
    barn, shed = await fleet.corral("barn", available_ram=4 * GIB), await fleet.corral("shed", available_ram=60 * GIB)
    await fleet.until(await fleet.install(), "done")
    revision = await define_model(fleet, "smollm")
    one = ReplicaProcess("p1", "smollm", 0, "vllm", "ready", "openai", revision, memory_bytes=5 * GIB)
    await told(fleet, barn, one)
    await told(fleet, shed, msgspec.structs.replace(one, process_id="p2"))
    fleet.catalogue.publish("vllm", "sha256:2")
    nodes = await planned(fleet, "upgrade")
    assert nodes["barn"].replaces == (PlanProcess("p1", "smollm", "in_place", None, 5 * GIB, ("shed",)),)
    assert nodes["barn"].processes.endswith("; smollm is served by shed meanwhile")
    assert nodes["shed"].replaces == (PlanProcess("p2", "smollm", "beside", 0.0, 5 * GIB),)
    assert "starts beside it (needs 5.0 GiB of RAM, 60.0 GiB free)" in nodes["shed"].processes


async def test_where_another_node_could_serve_it_takes_the_model_first(fleet: Fleet) -> None:
    barn = await fleet.corral("barn", available_ram=4 * GIB)
    await fleet.corral("shed", available_ram=60 * GIB)
    await fleet.corral("attic", available_ram=50 * GIB)
    await fleet.until(await fleet.install(), "done")
    one = ReplicaProcess("p1", "smollm", 0, "vllm", "ready", "openai", memory_bytes=5 * GIB)
    await told(fleet, barn, one)
    fleet.catalogue.publish("vllm", "sha256:2")
    node = (await planned(fleet, "upgrade", node="barn"))["barn"]
    assert [(each.could_serve, each.moves_to) for each in node.replaces] == [(("attic", "shed"), "shed")]
    assert node.processes.endswith("; shed takes smollm first (5.0 GiB), so that no request waits for it")
    node = (await planned(fleet, "install", node="barn", force=True))["barn"]
    assert [each.moves_to for each in node.replaces] == [""], "only an upgrade waits for its turn"


async def test_where_requests_have_to_wait_the_plan_names_nodes_with_the_memory(fleet: Fleet) -> None:
    barn = await fleet.corral("barn", available_ram=4 * GIB)
    await fleet.until(await fleet.install(), "done")
    await fleet.corral("shed", available_ram=60 * GIB)  # without the backend
    await fleet.corral("attic", available_ram=1 * GIB)
    await fleet.corral("mill", available_ram=60 * GIB, arch="arm64")
    one = ReplicaProcess("p1", "smollm", 0, "vllm", "ready", "openai", memory_bytes=5 * GIB)
    await told(fleet, barn, one)
    fleet.catalogue.publish("vllm", "sha256:2")
    node = (await planned(fleet, "upgrade", node="barn"))["barn"]
    assert [each.could_serve for each in node.replaces] == [("shed",)]
    assert node.processes.endswith(
        "no other node serves smollm: requests wait at the gateway; with the memory for it: shed; "
        "`corral models scale smollm --min 2` first avoids that"
    )


async def define_model(fleet: Fleet, name: str) -> str:
    """Its revision."""
    async with fleet.store.write() as tx:
        return (await models.put(tx, a_model(name, definition={"name": name, "backend": "vllm"}))).revision


async def test_what_is_fetched_already_costs_no_bytes(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.until(await fleet.install(), "done")
    barn.installed["vllm"]["fetched"] = ("sha256:2",)
    await told(fleet, barn)
    fleet.catalogue.builds["vllm"]["*"] = build("cpu-vllm", "sha256:2", size_bytes=GIB)
    assert (await planned(fleet, "upgrade"))["barn"].fetch_bytes == 0


async def test_a_delete_tells_what_it_stops(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.until(await fleet.install(node="barn"), "done")
    await told(fleet, barn, ReplicaProcess("p1", "smollm", 0, "vllm", "ready", "openai"))
    await fleet.corral("empty")
    await until(lambda: _known(fleet, "empty"))
    nodes = await planned(fleet, "delete")
    assert nodes["barn"].action == "delete"
    assert nodes["barn"].replaces == (PlanProcess("p1", "smollm", "stop"),)
    assert (nodes["empty"].action, nodes["empty"].reason) == ("nothing", "not installed there")


async def test_a_localai_worker_stops_what_runs_and_cannot_be_rolled_back(fleet: Fleet) -> None:
    old = await fleet.localai("old")
    await fleet.corral("barn")
    await fleet.until(await fleet.install(), "done")
    fleet.catalogue.publish("vllm", "sha256:2")
    assert (await planned(fleet, "upgrade"))["old"].processes.startswith("the worker stops those that run")
    old.script.digest = "sha256:2"
    await fleet.until(await fleet.ask("upgrade", "vllm"), "done")
    nodes = await planned(fleet, "rollback")
    assert (nodes["old"].action, nodes["old"].reason) == (
        "skip",
        "a LocalAI worker cannot be told which version to run",
    )
    assert (nodes["barn"].action, nodes["barn"].digest) == ("upgrade", "sha256:cpu-vllm-1")


async def test_what_nobody_can_say_in_time_is_said_to_be_looked_up(fleet: Fleet) -> None:
    await fleet.corral("barn")
    fleet.catalogue.builds["vllm"]["*"] = Unavailable("the registry is away")
    nodes = await planned(fleet, "install")
    assert (nodes["barn"].action, nodes["barn"].reason) == ("install", "its build is being looked up")
    fleet.catalogue.slow = asyncio.Event()
    assert (await planned(fleet, "install"))["barn"].reason == "its build is being looked up"


async def test_what_makes_no_sense_is_refused_as_it_would_be(fleet: Fleet) -> None:
    await fleet.corral("barn")
    with pytest.raises(NotFound):
        await plan(fleet, "install", "vlm")
    with pytest.raises(NotFound):
        await plan(fleet, "upgrade")
    with pytest.raises(Conflict):
        await plan(fleet, "install", "cuda-vllm")


async def test_a_build_is_changed_under_the_name_its_rule_has(fleet: Fleet) -> None:
    """The check names builds; the rule speaks of what stands for them. Two rules about one thing would never agree."""
    barn = await fleet.corral("barn")
    await fleet.until(await fleet.install("llama-cpp"), "done")
    barn.installed["llama-cpp"] |= {"is_meta": True, "meta_backend_for": "cpu-llama-cpp"}
    barn.put("cpu-llama-cpp", digest="sha256:cpu-llama-cpp-1", alias="llama-cpp")
    await told(fleet, barn)
    assert (await plan(fleet, "upgrade", "cpu-llama-cpp")).backend == "llama-cpp"
    assert (await plan(fleet, "delete", "cpu-llama-cpp")).backend == "llama-cpp"
    assert (await plan(fleet, "delete", "localai@llama-cpp")).backend == "llama-cpp"


async def test_so_is_one_that_a_localai_worker_lists_alone(fleet: Fleet) -> None:
    fleet.catalogue.shared = {"cuda12-vllm": "vllm"}
    old = await fleet.localai("old-hand")
    old.script.lists = {"vllm": "cuda12-vllm"}
    await fleet.until(await fleet.install(), "done")
    assert (await plan(fleet, "upgrade", "cuda12-vllm")).backend == "vllm"
    assert (await plan(fleet, "delete", "cuda12-vllm")).backend == "vllm"


async def _known(fleet: Fleet, name: str) -> bool:
    async with fleet.store.read() as tx:
        return await node_backends.find(tx, f"id-of-{name}") is not None
