"""A model nobody serves is asked for: one load, from nothing to a process gateways are told of."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs

from corral.kit.errors import Failed, Unavailable
from corral.store.tables import load_jobs
from tests.support.replica_fleet import ReplicaFleet
from tests.support.waiting import until

REGISTRY_DOWN = "registry.test does not answer"


async def test_a_load_from_nothing_installs_stages_starts_and_is_done(fleet: ReplicaFleet) -> None:
    barn = await fleet.worker("barn")
    definition = await fleet.define("m", download_files=[{"filename": "w.gguf", "uri": "https://h.test/w", "size": 7}])
    asked = await fleet.ask("m")
    assert asked.state == "pending"
    shown = await fleet.until_ready("m")
    assert [(each.node_id, each.revision) for each in shown] == [("id-of-barn", definition.revision)]
    assert [order["backend"] for order in barn.orders("install")] == ["llama-cpp"]
    [order] = barn.started
    assert order["files"] == [{"path": "w.gguf", "digest": "sha256:", "size_bytes": 7}]
    assert order["sources"] == ["https://blobs.test"]
    assert order["source_token"] == "token-of-id-of-barn"
    assert order["definition"]["backend"] == "llama-cpp"

    async def done() -> bool:
        return await fleet.jobs() == []

    await until(done, "end of the job")
    assert [(row.stage, row.node_id) for row in await fleet.rows("m")] == [("running", "id-of-barn")]
    status = await fleet.status("m")
    assert status is not None
    assert status.state == "loaded"


async def test_a_hundred_who_ask_cause_one_load(fleet: ReplicaFleet) -> None:
    barn = await fleet.worker("barn", has="llama-cpp")
    await fleet.define("m")
    barn.starts.hold = asyncio.Event()
    await asyncio.gather(*(fleet.ask("m") for _ in range(100)))
    await until(lambda: barn.processes)
    assert (await fleet.ask("m")).state in ("staging", "loading", "pending")
    barn.starts.hold.set()
    await fleet.until_ready("m")
    assert len(barn.started) == 1
    assert (await fleet.ask("m")).state == "loaded"


async def test_while_a_build_is_looked_up_that_is_what_is_told(local: ReplicaFleet) -> None:
    await local.worker("barn")
    await local.define("m")
    local.fleet.catalogue.slow = asyncio.Event()
    await local.ask("m")

    async def is_reported() -> bool:
        status = await local.status("m")
        return status is not None and status.message == "looking up a build of llama-cpp for barn …"

    await until(is_reported, "what is being looked up")
    local.fleet.catalogue.slow.set()
    await local.until_ready("m")


async def test_who_waits_hears_of_every_step_and_of_the_end(local: ReplicaFleet) -> None:
    barn = await local.worker("barn")
    await local.define("m")
    barn.starts.hold = asyncio.Event()
    local.files.hold = asyncio.Event()
    barn.script.hold = asyncio.Event()
    operations = local.fleet.first.backends.operations
    entries: dict[str, tuple[str, bool]] = {}
    status = await local.ask("m")
    seen = [status.state]
    while status.state != "loaded":
        newer = await local.loads.wait("m", since=status.version, wait_s=10)
        assert newer is not None
        assert newer.version > status.version
        status = newer
        if status.state != seen[-1]:
            seen.append(status.state)
        if status.state == "staging":
            listed = await operations.list_views(loads=True)
            entries = {view.id: (view.node_name, view.cancellable) for view in listed if view.kind == "staging"}
        {"installing": barn.script.hold, "staging": local.files.hold, "loading": barn.starts.hold}.get(
            status.state, asyncio.Event()
        ).set()
    assert seen == ["pending", "installing", "staging", "loading", "loaded"]
    assert entries == {"staging:m": ("barn", False)}
    assert [view.kind for view in await operations.list_views(loads=True) if view.kind == "staging"] == []


@pytest.mark.parametrize(
    ("columns", "reason"),
    [({"bus_down": True}, "barn cannot reach the bus"), ({"status": "unhealthy"}, "barn is unhealthy")],
)
async def test_a_load_on_a_node_that_cannot_be_heard_says_so(
    local: ReplicaFleet, columns: dict[str, Any], reason: str
) -> None:
    """Its order was accepted; it may be starting or not. Nobody is told that it starts without being told that."""
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    barn.starts.hold = asyncio.Event()
    await local.ask("m")
    await until(lambda: barn.processes)
    barn.silent = True
    expected = f"starting on barn, but no report arrives from there: {reason}"

    async def is_told() -> bool:
        await local.set_node("barn", **columns)  # each time: a heartbeat from before may be written late
        status = await local.status("m")
        return status is not None and (status.state, status.message) == ("loading", expected)

    await until(is_told, "the reason")
    why = await next(iter(local.replicas.values())).why.model("m")
    assert why.load is not None
    assert why.load.message == expected
    barn.silent = False
    await local.set_node("barn", status="healthy", bus_down=False)
    barn.starts.hold.set()
    await local.until_ready("m")


@pytest.mark.parametrize(
    "cause",
    [
        "w.gguf is not on this machine, and the order does not say what it is",
        "llama-cpp was killed by SIGKILL, as the system does when memory runs out; its last lines:\nloading tensors",
        "llama-cpp ended with code 1; its last lines:\nerror loading model: failed to open w.gguf",
    ],
    ids=["missing file", "out of memory", "an engine that ends"],
)
async def test_a_backend_that_crashes_at_load_is_told_then_left_alone_for_a_while(
    patient: ReplicaFleet, cause: str
) -> None:
    barn = await patient.worker("barn", has="llama-cpp")
    await patient.define("m")
    barn.starts.failures = [cause]
    await patient.ask("m")
    status = await patient.until_failed("m")
    assert cause in status.error
    assert status.retry_after_s > 0
    assert (await patient.ask("m")).state == "failed", "it is not tried again at once"
    assert await patient.rows("m") == []

    async def again() -> bool:
        return (await patient.ask("m")).state != "failed"

    await until(again)
    await patient.until_ready("m")
    assert len(barn.started) == 1


async def test_once_a_backend_is_there_that_could_not_be_installed_nobody_waits(patient: ReplicaFleet) -> None:
    """A person who has installed the missing library asks again at once."""
    barn = await patient.worker("barn")
    await patient.define("m")
    barn.script.failures = [{"error": "it needs libgomp.so.1"}]
    await patient.ask("m")
    status = await patient.until_failed("m")
    assert "llama-cpp could not be installed: it needs libgomp.so.1" in status.error
    async with patient.fleet.store.write() as tx:  # long enough for a busy machine
        [job] = await load_jobs.list_(tx)
        later = structs.replace(job, retry_at=await tx.now() + timedelta(hours=1))
        await load_jobs.put(tx, [later])
    assert (await patient.ask("m")).state == "failed"

    barn.put("llama-cpp", digest="sha256:cpu-llama-cpp-1")

    async def asked_again() -> bool:
        return (await patient.ask("m")).state != "failed"

    await until(asked_again)
    await patient.until_ready("m")


async def test_what_fails_on_one_node_is_tried_on_another_before_anybody_hears(local: ReplicaFleet) -> None:
    barn, shed = await local.worker("barn", has="llama-cpp"), await local.worker("shed", has="llama-cpp")
    await local.define("m")
    barn.starts.failures, shed.starts.failures = ["broken card"], []
    await local.ask("m")
    shown = await local.until_ready("m")
    assert [each.node_id for each in shown] == ["id-of-shed"]
    assert len(shed.started) == 1


async def test_files_that_cannot_be_had_fail_the_load_once(local: ReplicaFleet) -> None:
    await local.worker("barn", has="llama-cpp")
    await local.worker("shed", has="llama-cpp")
    await local.define("m")
    local.files.failures = [Failed("404 from the hub")] * 5

    await local.ask("m")
    status = await local.until_failed("m")
    assert "404 from the hub" in status.error
    assert local.files.asked == ["m"]
    async with local.fleet.store.read() as tx:
        assert [job.failed_on for job in await load_jobs.list_(tx)] == [{}], "no node is to blame"


async def test_a_model_no_node_can_ever_run_fails_with_the_reasons(local: ReplicaFleet) -> None:
    await local.worker("barn")
    await local.define("m", backend="no-such-backend")
    await local.ask("m")
    status = await local.until_failed("m")
    assert "no-such-backend" in status.error
    assert "barn" in status.error


async def test_an_installed_backend_needs_no_registry(local: ReplicaFleet) -> None:
    local.fleet.catalogue.builds["llama-cpp"]["*"] = Unavailable(REGISTRY_DOWN)
    await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    await local.until_ready("m")
    assert local.fleet.catalogue.asked == []


async def test_a_registry_that_cannot_be_reached_is_told_to_those_who_wait(local: ReplicaFleet) -> None:
    local.fleet.catalogue.builds["llama-cpp"]["*"] = Unavailable(REGISTRY_DOWN)
    await local.worker("barn")
    await local.worker("shed", status="draining")
    await local.define("m")
    await local.ask("m")

    async def is_reported() -> bool:
        status = await local.status("m")
        return (
            status is not None and f"barn: llama-cpp: the lookup of its build failed: {REGISTRY_DOWN}" in status.message
        )

    await until(is_reported, "the cause")


async def test_without_a_node_it_waits_and_goes_on_when_one_joins(local: ReplicaFleet) -> None:
    await local.define("m")
    await local.ask("m")

    async def is_reported() -> bool:
        status = await local.status("m")
        return status is not None and "no nodes" in status.message

    await until(is_reported)
    await local.worker("barn", has="llama-cpp")
    await local.until_ready("m")
