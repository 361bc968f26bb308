"""Replicas that are wanted come and come back; those that are not go, when their work is done."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from corral.contract.hardware import Device
from corral.contract.messages.replicas import ReplicaProcess
from corral.kit.errors import Conflict, NotFound
from tests.support.replica_fleet import GIB, ReplicaFleet, ReplicaWorker
from tests.support.waiting import until


async def test_the_least_that_is_wanted_comes_by_itself_and_comes_back(fleet: ReplicaFleet) -> None:
    barn, shed = await fleet.worker("barn", has="llama-cpp"), await fleet.worker("shed", has="llama-cpp")
    mill = await fleet.worker("mill", has="llama-cpp")
    await fleet.define("m")
    await fleet.schedule("m", min_replicas=2)
    await fleet.until_ready("m", 2)
    victim = next(worker for worker in (barn, shed, mill) if worker.serving("m"))
    lost = victim.serving("m")[0].process_id
    await victim.lose(lost)

    async def back() -> bool:
        shown = await fleet.shown("m")
        return len(shown) == 2 and lost not in [each.process_id for each in shown]

    await until(back)
    assert len({each.node_id for each in await fleet.shown("m")}) == 2


async def test_a_node_that_goes_offline_is_replaced(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.schedule("m", min_replicas=1)
    await local.until_ready("m")
    shed = await local.worker("shed", has="llama-cpp")
    await barn.stop()
    await local.fleet.set_node("barn", status="offline", left=True)  # a heartbeat still on its way changes nothing
    await until(lambda: shed.serving("m"))
    assert [each.node_id for each in await local.until_ready("m")] == ["id-of-shed"]


@pytest.mark.parametrize("schedule", [{}, {"min_replicas": 1}, {"min_replicas": 1, "max_replicas": 3}])
async def test_the_replica_of_a_node_that_returns_leaves_where_another_took_its_place(
    patient: ReplicaFleet, schedule: dict[str, int]
) -> None:
    barn = await patient.worker("barn", has="llama-cpp")
    await patient.define("m")
    if schedule:
        await patient.schedule("m", **schedule)
    await patient.ask("m")
    [first] = await patient.until_ready("m")
    shed = await patient.worker("shed", has="llama-cpp")
    busy = asyncio.create_task(_keep_busy(barn, first.process_id))
    try:
        await patient.fleet.set_node("barn", status="offline", left=True)  # cut off, while its process goes on
        await patient.ask("m")
        await until(lambda: shed.serving("m"))
        await patient.fleet.set_node("barn", status="healthy", left=False)

        async def leaves() -> bool:
            stages = {row.node_id: row.stage for row in await patient.rows("m")}
            return stages == {"id-of-barn": "leaving", "id-of-shed": "running"}

        await until(leaves, "no new requests for the surplus one")
        assert [each.node_id for each in await patient.until_ready("m")] == ["id-of-shed"]
        assert barn.serving("m"), "it is busy"
    finally:
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    await barn.in_flight()
    await until(lambda: not barn.serving("m"), "its end, once its work has ended")

    async def alone() -> bool:
        return [row.node_id for row in await patient.rows("m")] == ["id-of-shed"]

    await until(alone, "one replica")


async def test_a_replica_comes_back_with_its_node_where_no_other_took_its_place(local: ReplicaFleet) -> None:
    await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.schedule("m", min_replicas=1)
    [first] = await local.until_ready("m")
    await local.fleet.set_node("barn", status="offline", left=True)

    async def noted(error: str) -> bool:
        return [(row.stage, row.error) for row in await local.rows("m")] == [("running", error)]

    await until(lambda: noted("its node went offline"), "the look that sees it offline")
    await local.fleet.set_node("barn", status="healthy", left=False)
    assert [each.process_id for each in await local.until_ready("m")] == [first.process_id]
    await until(lambda: noted(""), "the look that sees it back")


async def test_a_replica_that_keeps_ending_where_it_is_goes_elsewhere(local: ReplicaFleet) -> None:
    """Its worker has started it again, in vain, and says so."""
    barn, shed = await local.worker("barn", has="llama-cpp"), await local.worker("shed", has="llama-cpp")
    await local.define("m")
    await local.schedule("m", min_replicas=1)
    [first] = await local.until_ready("m")
    await local.until_settled()
    worker = barn if first.node_id == "id-of-barn" else shed
    await worker.set_process(first.process_id, state="restarting", restarts=4, error="exit code 1")
    await asyncio.sleep(0.3)
    assert len(await local.rows("m")) == 1, "its worker is at it"
    await worker.set_process(first.process_id, state="failed", error="exit code 1\nCUDA error: device is gone")
    [second] = await local.until_ready("m")
    assert second.node_id != first.node_id
    await until(lambda: not worker.processes, "end of what is left")


async def test_one_on_every_node_that_matches(local: ReplicaFleet) -> None:
    workers = [await local.worker(name, has="llama-cpp", labels={"tier": "fast"}) for name in ("a", "b")]
    other = await local.worker("c", has="llama-cpp")
    await local.define("m")
    await local.schedule("m", spread_all=True, node_selector={"tier": "fast"})
    await local.until_ready("m", 2)
    assert all(len(worker.serving("m")) == 1 for worker in workers)
    assert not other.serving("m")
    late = await local.worker("d", has="llama-cpp", labels={"tier": "fast"})
    await local.until_ready("m", 3)
    assert len(late.serving("m")) == 1


async def test_after_an_edit_the_old_one_serves_until_the_new_one_is_ready(patient_fleet: ReplicaFleet) -> None:
    fleet = patient_fleet
    barn = await fleet.worker("barn", has="llama-cpp")
    old = await fleet.define("m")
    await fleet.ask("m")
    [before] = await fleet.until_ready("m")
    busy = asyncio.create_task(_keep_busy(barn, before.process_id))
    barn.starts.hold = asyncio.Event()
    new = await fleet.define("m", context_size=4096)
    await until(lambda: len(barn.processes) == 2)
    assert [each.revision for each in await fleet.shown("m")] == [old.revision]
    barn.starts.hold.set()

    async def changed() -> bool:
        return [each.revision for each in await fleet.shown("m")] == [new.revision]

    await until(changed)

    async def leaves() -> bool:
        return "leaving" in [row.stage for row in await fleet.rows("m")]

    await until(leaves)
    await asyncio.sleep(2.5)  # longer than anything said is believed
    assert before.process_id in barn.processes, "it is at work, and is not stopped"
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    await barn.in_flight()
    await until(lambda: before.process_id not in barn.processes)

    async def one_row() -> bool:
        return [row.revision for row in await fleet.rows("m")] == [new.revision]

    await until(one_row)


async def test_an_edit_that_does_not_wait_ends_the_old_one_first(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    [before] = await local.until_ready("m")
    await local.until_settled()
    new = await local.define("m", recreate=True, context_size=4096)
    assert await local.shown("m") == []
    await local.ask("m")
    [after] = await local.until_ready("m")
    assert after.revision == new.revision
    await until(lambda: before.process_id not in barn.processes)


async def test_a_deleted_model_is_served_no_more_and_ends(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    await local.until_ready("m")
    await local.forget("m")
    assert await local.shown() == []
    await until(lambda: not barn.processes)
    await local.until_gone("m")


async def test_unload_ends_it_and_a_schedule_is_not_overruled(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    await local.until_ready("m")
    assert await local.loads.unload("m") == 1
    assert await local.shown("m") == []
    await until(lambda: not barn.processes)
    await local.until_gone("m")
    assert await local.status("m") is None
    await local.schedule("m", min_replicas=1)
    await local.until_ready("m")
    with pytest.raises(Conflict, match="schedule"):
        await local.loads.unload("m")
    with pytest.raises(NotFound, match=r"there is no model 'mm'.*m"):
        await local.loads.unload("mm")


async def test_drain_moves_a_replica_in_use_before_it_ends(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    [before] = await local.until_ready("m")
    shed = await local.worker("shed", has="llama-cpp")
    shed.starts.hold = asyncio.Event()
    await local.fleet.set_node("barn", status="draining", drained=True)
    await until(lambda: shed.processes)
    assert [(each.node_id, each.last_resort) for each in await local.shown("m")] == [("id-of-barn", True)]
    shed.starts.hold.set()
    await until(lambda: not barn.processes)
    shown = await local.until_ready("m")
    assert [each.node_id for each in shown] == ["id-of-shed"]
    assert before.process_id not in shed.processes


async def test_two_models_that_fit_only_one_at_a_time_give_way_to_each_other(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp", total_ram=16 * GIB, available_ram=15 * GIB)
    await local.define("a", memory="10GiB")
    await local.define("b", memory="10GiB")
    await local.ask("a")
    [first] = await local.until_ready("a")
    assert barn.processes[first.process_id].memory_bytes == 10 * GIB
    await local.ask("b")
    await local.until_ready("b")
    assert first.process_id not in barn.processes
    assert await local.shown("a") == []
    await local.ask("a")
    await local.until_ready("a")
    assert await local.shown("b") == []


async def test_models_of_one_concurrency_group_are_never_on_one_node_together(local: ReplicaFleet) -> None:
    """There is memory for both; each evicts the other while that one is idle."""
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("a", memory="1GiB", concurrency_groups=["big"])
    await local.define("b", memory="1GiB", concurrency_groups=["big", "other"])
    for name in ("a", "b", "a"):
        await local.ask(name)
        await local.until_ready(name)
        await local.until_settled()
    assert barn.models_at_start == [{"a"}, {"b"}, {"a"}]

    def are_counted() -> bool:  # a moment after the load has ended in the store
        counts = {
            (sample.name, sample.labels["model"], sample.labels["node"]): sample.value
            for family in local.metrics.collect()
            for sample in family.samples
        }
        assert [counts["corral_evictions_total", model, "barn"] for model in "ab"] == [1, 1]
        assert [counts["corral_replica_load_seconds_count", model, "barn"] for model in "ab"] == [2, 1]
        return True

    await until(are_counted, "the metrics of three loads and two evictions")


async def test_a_group_added_to_a_running_model_parts_the_two(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("a", memory="1GiB", concurrency_groups=["big"])
    await local.define("b", memory="1GiB")
    for name in ("a", "b"):
        await local.ask(name)
        await local.until_ready(name)
    shed = await local.worker("shed", has="llama-cpp")
    await local.define("b", memory="1GiB", concurrency_groups=["big"])

    def models_of(worker: ReplicaWorker) -> set[str]:
        return {process.model for process in worker.processes.values()}

    await until(lambda: len(models_of(barn)) == 1 and len(models_of(shed)) == 1)
    assert models_of(barn) | models_of(shed) == {"a", "b"}


async def test_a_busy_model_is_not_evicted_and_the_other_waits(patient: ReplicaFleet) -> None:
    barn = await patient.worker("barn", has="llama-cpp", total_ram=16 * GIB, available_ram=15 * GIB)
    await patient.define("a", memory="10GiB")
    await patient.define("b", memory="10GiB")
    await patient.ask("a")
    [first] = await patient.until_ready("a")

    busy = asyncio.create_task(_keep_busy(barn, first.process_id))
    try:
        tracker = patient.replicas["c1"].activity
        await until(lambda: tracker.find(barn.node_id, first.process_id).in_flight, "word that it is busy")
        await patient.ask("b")

        async def waits() -> bool:
            status = await patient.status("b")
            return status is not None and "busy" in status.message

        await until(waits)
        assert first.process_id in barn.processes
    finally:
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    await barn.in_flight()
    await patient.until_ready("b")


async def test_a_process_that_is_busy_for_long_is_never_reaped(patient: ReplicaFleet) -> None:
    """Longer than anything here waits: not for its idle time, nor an edit, nor because nobody wants its model."""
    barn = await patient.worker("barn", has="llama-cpp")
    await patient.define("m", idle_unload="1s")
    await patient.ask("m")
    [shown] = await patient.until_ready("m")
    busy = asyncio.create_task(_keep_busy(barn, shown.process_id))
    try:
        await asyncio.sleep(3.5)
        await patient.define("m", idle_unload="1s", context_size=4096)
        await asyncio.sleep(0.5)
        await patient.forget("m")
        await asyncio.sleep(1.0)
        assert shown.process_id in barn.processes
        assert not [
            order
            for order in barn.replica_orders
            if order.get("process_id") == shown.process_id and "model" not in order
        ]
    finally:
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    await barn.in_flight()
    await until(lambda: not barn.processes, "its end, once its work has ended")


async def _keep_busy(worker: ReplicaWorker, process_id: str) -> None:
    while True:
        await worker.in_flight(**{process_id: 1})
        await asyncio.sleep(0.05)


async def test_a_process_nobody_wants_is_stopped_after_a_while_and_one_that_is_wanted_taken_in(
    local: ReplicaFleet,
) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    wanted = await local.define("m")
    for name, model, revision in (("p-1", "m", wanted.revision), ("p-2", "m", "ancient"), ("p-3", "unknown", "r")):
        replica = int(name[-1])
        barn.processes[name] = ReplicaProcess(name, model, replica, "llama-cpp", "ready", "openai", revision=revision)
    await barn.beat()
    await until(lambda: set(barn.processes) == {"p-1"})
    assert not any(order.get("force") for order in barn.replica_orders), "each may finish what it has"
    assert [row.process_id for row in await local.rows("m")] == ["p-1"]
    assert [each.process_id for each in await local.shown()] == ["p-1"]


async def test_a_process_its_worker_started_again_is_the_same_replica(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    [before] = await local.until_ready("m")
    process = barn.processes.pop(before.process_id)
    barn.processes["again"] = ReplicaProcess(
        "again", "m", process.replica, "llama-cpp", "ready", "openai", revision=process.revision
    )
    await barn.beat()

    async def shown() -> bool:
        return [each.process_id for each in await local.shown("m")] == ["again"]

    await until(shown)
    await asyncio.sleep(0.5)
    assert len(barn.started) == 1
    assert set(barn.processes) == {"again"}


async def test_a_model_larger_than_any_device_is_spread_over_equal_ones(local: ReplicaFleet) -> None:
    cards = tuple(
        Device(index=number, vendor="nvidia", uuid=f"GPU-{number}", total_bytes=8 * GIB, free_bytes=8 * GIB)
        for number in range(4)
    )
    barn = await local.worker("barn", has="llama-cpp", capability="nvidia-cuda-12", devices=cards)
    await local.define("large", memory="20GiB", tensor_parallel=4)
    await local.define("small", memory="2GiB")
    await local.ask("large")
    [shown] = await local.until_ready("large")
    process = barn.processes[shown.process_id]
    assert [device.index for device in process.devices] == [0, 1, 2, 3]
    await local.ask("small")
    [shown] = await local.until_ready("small")
    assert len(barn.processes[shown.process_id].devices) == 1, "what is left of one of them is enough"


async def test_an_idle_model_is_unloaded_when_its_definition_says_so(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m", idle_unload="1s")
    await local.ask("m")
    await local.until_ready("m")
    await until(lambda: not barn.processes)
    await local.until_gone("m")
    await local.ask("m")
    await local.until_ready("m")


async def test_when_all_are_busy_another_comes_up_to_the_most(local: ReplicaFleet) -> None:
    barn, shed = await local.worker("barn", has="llama-cpp"), await local.worker("shed", has="llama-cpp")
    await local.define("m")
    await local.schedule("m", min_replicas=1, max_replicas=2)
    [first] = await local.until_ready("m")
    worker = barn if first.node_id == "id-of-barn" else shed
    busy = asyncio.create_task(_keep_busy(worker, first.process_id))
    try:
        await local.until_ready("m", 2)
    finally:
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)


async def test_the_successor_of_a_process_that_is_being_upgraded_is_no_stray(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    [before] = await local.until_ready("m")
    old = barn.processes[before.process_id]
    barn.processes["next"] = msgspec.structs.replace(old, process_id="next", state="starting")
    await barn.beat()
    await asyncio.sleep(0.6)  # longer than strays are left alone
    assert set(barn.processes) == {before.process_id, "next"}
    del barn.processes[before.process_id]
    await barn.set_process("next", state="ready")

    async def shown() -> bool:
        return [each.process_id for each in await local.shown("m")] == ["next"]

    await until(shown)
    assert len(barn.started) == 1
