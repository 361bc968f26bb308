"""A node whose memory does not hold both versions of a backend switches when another node serves its model."""

from __future__ import annotations

import asyncio
from typing import Any

from corral.store.records import DueSwitch
from corral.store.tables import due_switches
from tests.support.replica_fleet import GIB, ReplicaFleet, ReplicaWorker
from tests.support.waiting import until

BACKEND, MODEL, NEW = "llama-cpp", "m", "sha256:2"
FULL = {"total_ram": 64 * GIB, "available_ram": 2 * GIB}
WAITS = "waits until another node serves m, 10 minutes at most: memory does not hold both versions"


async def one_serves(fleet: ReplicaFleet, *others: str, **known: Any) -> list[ReplicaWorker]:
    """The only replica runs on the first node, which has no memory for a second one; the others have the backend."""
    barn = await fleet.worker("barn", has=BACKEND)
    await fleet.define(MODEL, memory="8GiB")
    await fleet.ask(MODEL)
    await fleet.until_ready(MODEL)
    await fleet.set_node("barn", **FULL)
    rest = [await fleet.worker(name, has=BACKEND, **known) for name in others]
    fleet.fleet.catalogue.publish(BACKEND, NEW)
    return [barn, *rest]


def switches(worker: ReplicaWorker) -> list[bool]:
    """Of each order to switch, whether the process ends first."""
    return [bool(body.get("in_place")) for body in worker.orders("upgrade") if not body.get("fetch_only")]


async def due(fleet: ReplicaFleet) -> list[DueSwitch]:
    async with fleet.fleet.store.read() as tx:
        return await due_switches.list_(tx)


async def until_due(fleet: ReplicaFleet) -> DueSwitch:
    async def is_due() -> bool:
        return bool(await due(fleet))

    await until(is_due, "a due switch")
    return (await due(fleet))[0]


async def until_none_is_due(fleet: ReplicaFleet) -> None:
    async def is_none() -> bool:
        return not await due(fleet)

    await until(is_none, "the end of the due switch")


async def upgrade(fleet: ReplicaFleet, **more: Any) -> str:
    return await fleet.fleet.ask("upgrade", BACKEND, **({"node": "barn"} | more))


async def nodes_of(fleet: ReplicaFleet) -> set[str]:
    return {row.node_id for row in await fleet.rows(MODEL)}


async def test_another_node_serves_first_and_the_switch_ends_no_service(fleet: ReplicaFleet) -> None:
    barn, shed = await one_serves(fleet, "shed")
    shed.starts.hold = asyncio.Event()
    operation = await upgrade(fleet)
    row = await until_due(fleet)
    assert (row.node_id, row.backend, row.operation_id, row.models) == (barn.node_id, BACKEND, operation, (MODEL,))

    async def explained() -> bool:
        return (await fleet.fleet.row(operation, "barn")).error == WAITS

    await until(explained)
    await until(lambda: shed.processes)
    assert switches(barn) == [], "the other replica does not serve yet"
    barn.script.hold = asyncio.Event()
    shed.starts.hold.set()
    await until(lambda: switches(barn) == [True])
    assert len(await fleet.shown(MODEL)) == 2
    assert len(await due(fleet)) == 1, "until the switch is over the other replica is not one too many"
    barn.script.hold.set()
    await fleet.fleet.until(operation, "done")
    await until_none_is_due(fleet)
    assert switches(barn) == [True]
    assert await nodes_of(fleet) == {barn.node_id, shed.node_id}


async def test_the_other_replica_ends_like_any_that_is_one_too_many(local: ReplicaFleet) -> None:
    barn, shed = await one_serves(local, "shed")
    await local.schedule(MODEL, min_replicas=1, max_replicas=1)
    await local.fleet.until(await upgrade(local), "done")
    await until_none_is_due(local)
    assert shed.started, "it was there meanwhile"
    assert switches(barn) == [True]

    async def one_is_left() -> bool:
        for worker in (barn, shed):
            await worker.in_flight()
        return len(await local.rows(MODEL)) == 1

    await until(one_is_left)


async def test_where_no_node_has_the_memory_requests_wait_as_before(fleet: ReplicaFleet) -> None:
    barn, shed = await one_serves(fleet, "shed", **FULL)
    await fleet.fleet.until(await upgrade(fleet), "done")
    assert (switches(barn), shed.started) == ([True], [])
    await until_none_is_due(fleet)


async def test_a_node_without_the_backend_is_not_given_the_untried_build(local: ReplicaFleet) -> None:
    (barn,) = await one_serves(local)
    shed = await local.worker("shed")
    await local.fleet.until(await upgrade(local), "done")
    assert (switches(barn), shed.started, shed.orders()) == ([True], [], [])


async def test_a_start_that_fails_elsewhere_is_no_failed_load(local: ReplicaFleet) -> None:
    barn, shed = await one_serves(local, "shed")
    shed.starts.failures = ["no such file: weights"]
    await local.fleet.until(await upgrade(local), "done")
    assert switches(barn) == [True]
    assert await local.jobs() == [], "or requests would be refused during the switch"


async def test_killed_controllers_leave_the_decision_in_the_store(local: ReplicaFleet) -> None:
    barn, shed = await one_serves(local, "shed")
    shed.starts.hold = asyncio.Event()
    operation = await upgrade(local)
    before = await until_due(local)
    await until(lambda: shed.processes)
    await local.fleet.first.kill()
    second = await local.fleet.controller("c2")
    local.replicas.clear()
    local.add(second)
    shed.starts.hold.set()
    await until(lambda: switches(barn) == [True])
    assert [row.since for row in await due(local)] in ([], [before.since])

    async def is_done() -> bool:
        return str((await second.backends.operations.view(operation)).state) == "done"

    await until(is_done)
    assert len([order for order in shed.replica_orders if "model" in order]) == 1, "one replica, not two"


async def test_a_cancelled_or_paused_switch_is_not_due_any_more(local: ReplicaFleet) -> None:
    barn, shed = await one_serves(local, "shed")
    shed.starts.hold = asyncio.Event()
    operation = await upgrade(local)
    await until_due(local)
    await local.fleet.first.backends.rollouts.pause(operation, by="root")
    await until_none_is_due(local)
    await local.fleet.first.backends.rollouts.resume(operation)
    await until_due(local)
    await local.fleet.operations.cancel(operation)
    await until_none_is_due(local)
    shed.starts.hold.set()
    assert switches(barn) == []


async def test_a_node_that_is_drained_meanwhile_gives_its_model_away(local: ReplicaFleet) -> None:
    barn, shed = await one_serves(local, "shed")
    shed.starts.hold = asyncio.Event()
    await upgrade(local)
    await until_due(local)
    await until(lambda: shed.processes)
    await local.set_node("barn", status="draining")
    await until_none_is_due(local)
    shed.starts.hold.set()
    await local.until_ready(MODEL, 2)
    await barn.in_flight()

    async def moved() -> bool:
        return await nodes_of(local) == {shed.node_id}

    await until(moved)
    assert switches(barn) == []


async def test_the_node_that_takes_over_dies_and_a_third_one_does_it(local: ReplicaFleet) -> None:
    barn, shed, mill = await one_serves(local, "shed", "mill")
    shed.starts.hold = mill.starts.hold = asyncio.Event()
    operation = await upgrade(local)
    await until_due(local)
    await until(lambda: shed.processes or mill.processes)
    dead, other = (shed, mill) if shed.processes else (mill, shed)
    await dead.stop()

    async def taken_by_another() -> bool:
        # Its last heartbeat may arrive only now.
        await local.set_node("shed" if dead is shed else "mill", status="offline")
        return bool(other.processes)

    await until(taken_by_another)
    assert switches(barn) == []
    shed.starts.hold.set()
    await local.fleet.until(operation, "done")
    assert switches(barn) == [True]


async def test_two_nodes_with_the_last_two_replicas_do_not_switch_at_once(local: ReplicaFleet) -> None:
    barn, shed = await one_serves(local, "shed", arch="arm64")  # another hardware class: both would be first
    await local.schedule(MODEL, min_replicas=2)
    await local.until_ready(MODEL, 2)
    await local.set_node("shed", **FULL)
    barn.script.hold = shed.script.hold = asyncio.Event()
    fetching = asyncio.create_task(_release_fetches((barn, shed)))
    operation = await upgrade(local, node="", max_parallel="100%")
    await until(lambda: switches(barn) or switches(shed))
    first, second = (barn, shed) if switches(barn) else (shed, barn)

    async def held_back() -> bool:
        return WAITS in [(await local.fleet.row(operation, name)).error for name in ("barn", "shed")]

    await until(held_back)
    assert switches(second) == []
    await fetching
    for worker in (first, second):
        assert worker.script.hold is not None
        worker.script.hold.set()
    await local.fleet.until(operation, "done")
    assert switches(second) == [True]


async def _release_fetches(workers: tuple[ReplicaWorker, ...]) -> None:
    """Let the downloads end, and hold the switches after them."""
    await until(lambda: all(worker.at_once for worker in workers))
    for worker in workers:
        hold, worker.script.hold = worker.script.hold, asyncio.Event()
        assert hold is not None
        hold.set()


async def test_a_model_that_is_deleted_meanwhile_holds_nothing_up(local: ReplicaFleet) -> None:
    _barn, shed = await one_serves(local, "shed")
    shed.starts.hold = asyncio.Event()
    operation = await upgrade(local)
    await until_due(local)
    await local.forget(MODEL)
    await local.fleet.until(operation, "done")
    await until_none_is_due(local)
