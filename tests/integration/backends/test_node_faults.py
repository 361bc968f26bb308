"""Nodes that are away, restart, refuse, lie, or lose what they wanted to say. What was accepted is never dropped."""

from __future__ import annotations

import asyncio

from corral.store.tables import nodes
from tests.support.backend_fleet import Fleet
from tests.support.waiting import until


async def test_an_offline_node_converges_when_it_returns(fleet: Fleet) -> None:
    away = await fleet.corral("away", joins=False, status="offline")
    await fleet.corral("barn")
    operation = await fleet.install()
    view = await fleet.until(operation, "waiting")
    assert (await fleet.row(operation, "away")).error == "node offline, will retry when healthy"
    assert view.settled, "whoever watches may go"
    assert (await fleet.row(operation, "barn")).status == "success"
    await away.start()
    await away.beat()
    await fleet.until(operation, "done")
    assert len(away.orders()) == 1


async def test_a_refusal_is_shown_backs_off_and_is_tried_again(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    barn.script.failures = [{"error": "disk full", "phase": "extracting"}]
    operation = await fleet.install()
    view = await fleet.until(operation, "failing")
    row = view.nodes[0]
    assert (row.status, row.error, row.failures) == ("error", "disk full", 1)
    assert row.next_retry_at
    assert view.error == "barn: disk full"
    await fleet.quiet()
    assert len(barn.orders()) == 1, "not before its time"
    await fleet.time_passes("barn")
    await fleet.until(operation, "done")
    assert [order["attempt"] for order in barn.orders()] == [1, 2]


async def test_what_time_does_not_cure_is_parked_until_a_person_retries(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    barn.script.failures = [{"error": "wrong digest, twice", "permanent": True}]
    operation = await fleet.install()
    row = (await fleet.until(operation, "failing")).nodes[0]
    assert (row.error, row.next_retry_at) == ("wrong digest, twice", "")
    await fleet.quiet()
    assert len(barn.orders()) == 1
    await fleet.operations.retry(operation)
    await fleet.until(operation, "done")


async def test_what_lacked_a_library_is_tried_again_when_a_heartbeat_says_it_is_there(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    refusal = "vllm needs libgomp.so.1, which this machine lacks → sudo apt-get install libgomp1"
    barn.script.failures = [{"error": refusal, "permanent": True, "missing": ("libgomp.so.1",)}]
    operation = await fleet.install()
    row = (await fleet.until(operation, "failing")).nodes[0]
    assert (row.error, row.next_retry_at) == (refusal, "")
    await barn.beat()
    await fleet.quiet()
    assert len(barn.orders()) == 1
    barn.cured = True
    await barn.beat()
    await fleet.until(operation, "done")
    assert [order["attempt"] for order in barn.orders()] == [1, 2]


async def test_a_node_gone_in_mid_install_finishes_when_it_returns(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.until_heard("barn")
    barn.script.hold = asyncio.Event()
    operation = await fleet.install()
    await until(lambda: barn.at_once)
    await barn.stop()
    await fleet.set_node("barn", status="offline")
    await fleet.until(operation, "waiting")
    barn.script.hold = None
    await barn.restart()
    await fleet.set_node("barn", status="healthy", boot_id=barn.boot_id)
    await barn.beat()
    await fleet.until(operation, "done")
    assert barn.carried_out == [("install", operation, 1)]


async def test_a_worker_that_accepted_and_died_gets_the_same_order_again(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    operation = await fleet.install()
    await until(lambda: barn.at_once)
    await until(lambda: _accepted(fleet))
    barn.script.hold = None
    await barn.restart()
    await barn.beat()
    await fleet.until(operation, "done")
    assert [order["attempt"] for order in barn.orders()] == [1, 1]


async def test_a_lost_result_is_found_in_the_next_heartbeat(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    barn.script.lose_results = True
    operation = await fleet.install()
    await until(lambda: barn.outcomes)
    assert (await fleet.view(operation)).state == "under_way"
    await barn.beat()
    await fleet.until(operation, "done")
    assert len(barn.orders()) == 1


async def test_a_lost_refusal_is_found_in_the_next_heartbeat(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    barn.script.lose_results = True
    barn.script.failures = [{"error": "disk full"}]
    operation = await fleet.install()
    await until(lambda: barn.outcomes)
    await barn.beat()
    assert (await fleet.until_row(operation, "barn", "error")).error == "disk full"


async def test_a_doubled_order_is_carried_out_once(local_fleet: Fleet) -> None:
    barn = await local_fleet.corral("barn")
    local_fleet.hub.faults = type(local_fleet.hub.faults)(duplicate=1.0)
    operation = await local_fleet.install()
    await local_fleet.until(operation, "done")
    assert barn.carried_out == [("install", operation, 1)]


async def test_messages_lost_on_the_way_cost_time_and_nothing_else(local_fleet: Fleet) -> None:
    workers = [await local_fleet.corral(f"n{number}") for number in range(4)]
    local_fleet.hub.faults = type(local_fleet.hub.faults)(drop=0.3, duplicate=0.2)
    operation = await local_fleet.install()

    async def nearly() -> bool:
        for number, worker in enumerate(workers):
            await worker.beat()
            await local_fleet.time_passes(f"n{number}")
        local_fleet.first.backends.reconciler.reconcile_all()
        await asyncio.sleep(0.05)
        return (await local_fleet.view(operation)).state == "done"

    await until(nearly, timeout_s=40)
    for worker in workers:
        assert len(set(worker.carried_out)) == len(worker.carried_out)
        assert worker.installed["vllm"]["digest"] == "sha256:cpu-vllm-1"


async def test_a_success_that_did_not_happen_is_no_success(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    barn.script.lie = True
    operation = await fleet.install()
    row = await fleet.until_row(operation, "barn", "error")
    assert "inventory does not show the result" in row.error
    barn.script.lie = False
    await fleet.time_passes("barn")
    await fleet.until(operation, "done")


async def test_a_node_on_which_nobody_listens_is_unhealthy_until_its_next_heartbeat(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.until_heard("barn")
    await barn.stop()
    operation = await fleet.install()

    async def unhealthy() -> bool:
        async with fleet.store.read() as tx:
            return (await nodes.get(tx, barn.node_id)).status == "unhealthy"

    async def told() -> bool:
        row = await fleet.row(operation, "barn")
        return (row.status, row.error) == ("queued", "node unhealthy, will retry when healthy")

    async def done_in_time() -> bool:
        await fleet.time_passes("barn")  # whenever its failure is written down
        return (await fleet.view(operation)).state == "done"

    await until(unhealthy)
    await until(told)
    await barn.start()
    await barn.beat()
    await until(done_in_time)


async def test_somebody_who_deletes_it_by_hand_gets_it_back(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.until(await fleet.install(), "done")
    barn.installed.clear()
    async with fleet.store.write() as tx:  # long after it was done
        from datetime import timedelta

        import msgspec

        from corral.store.tables import backend_intents

        (intent,) = await backend_intents.list_(tx, [barn.node_id])
        then = intent.updated_at - timedelta(minutes=5)
        await backend_intents.put(tx, [msgspec.structs.replace(intent, updated_at=then)])
    await barn.beat()
    await until(lambda: barn.installed)
    assert [order["attempt"] for order in barn.orders()] == [1, 2]


async def test_nonsense_from_a_worker_harms_nobody_else(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.corral("stall")
    barn.script.failures = [{"error": "\0\x1b[2J" + "x" * 10_000}]
    operation = await fleet.install()
    await fleet.until_row(operation, "stall", "success")
    row = await fleet.until_row(operation, "barn", "error")
    assert len(row.error) < 5000
    assert "\x1b" not in row.error


async def _accepted(fleet: Fleet) -> bool:
    return (await fleet.intent("barn")).accepted_at is not None
