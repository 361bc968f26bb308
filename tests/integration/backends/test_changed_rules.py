"""Delete, upgrade, roll back, cancel, and all of it at once."""

from __future__ import annotations

import asyncio

import pytest

from corral.kit.errors import Conflict, Invalid, NotFound
from corral.store.tables import node_backends, operations
from tests.support.backend_fleet import Fleet
from tests.support.scripted_worker import CorralWorker
from tests.support.waiting import promised, until


async def having(fleet: Fleet, *names: str, backend: str = "vllm") -> list[CorralWorker]:
    workers = [await fleet.corral(name) for name in names]
    await fleet.until(await fleet.install(backend), "done")
    return workers


async def test_delete(fleet: Fleet) -> None:
    barn, stall = await having(fleet, "barn", "stall")
    await fleet.corral("empty")
    await fleet.until(await fleet.ask("delete", "vllm", node="barn"), "done")
    assert barn.installed == {}
    assert stall.installed
    operation = await fleet.ask("delete", "vllm")
    view = await fleet.until(operation, "done")
    assert stall.installed == {}
    assert {row.node_name: row.status for row in view.nodes}["stall"] == "success"
    await fleet.quiet()
    assert all(len(worker.orders("delete")) <= 1 for worker in (barn, stall))


async def test_a_heartbeat_from_before_an_install_that_is_heard_after_it_changes_nothing(fleet: Fleet) -> None:
    """A delete would find nothing to do, and the backend would stay for ever."""
    barn = await fleet.corral("barn")
    early = barn.heartbeat()
    await fleet.until(await fleet.install(), "done")
    heard = fleet.first.heartbeats.received
    await barn.send(early)
    await until(lambda: fleet.first.heartbeats.received > heard)
    await fleet.first.backends.inventories.flush()
    assert await fleet.inventory("barn") == ["vllm"]
    await fleet.until(await fleet.ask("delete", "vllm"), "done")
    assert barn.installed == {}


async def test_a_delete_for_a_node_that_is_away_is_done_when_it_returns(fleet: Fleet) -> None:
    """Else backends that were deleted come back with the node."""
    (barn,) = await having(fleet, "barn")
    await fleet.set_node("barn", status="draining")
    operation = await fleet.ask("delete", "vllm")
    await fleet.until(operation, "waiting")
    await fleet.set_node("barn", status="healthy")
    await fleet.until(operation, "done")
    assert barn.installed == {}


async def test_deleting_what_nobody_has_stores_nothing(fleet: Fleet) -> None:
    await having(fleet, "barn")
    with pytest.raises(NotFound, match="not installed on any node; did you mean vllm"):
        await fleet.ask("delete", "vlm")
    barn = fleet.workers["barn"]
    barn.put("piper", is_system=True)
    assert isinstance(barn, CorralWorker)
    await barn.beat()
    await until(lambda: _listed(fleet, "barn", ["piper", "vllm"]))
    with pytest.raises(Invalid, match="belongs to the system"):
        await fleet.ask("delete", "piper")
    async with fleet.store.read() as tx:
        assert len(await operations.list_(tx, limit=9)) == 1


async def test_install_and_delete_crossing(fleet: Fleet) -> None:
    """The install under way is told to stop, and the delete has the last word."""
    barn = await fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    install = await fleet.install()
    await until(lambda: barn.at_once)
    delete = await fleet.ask("delete", "vllm")
    await until(lambda: barn.orders("cancel"))
    await fleet.until(delete, "done")
    assert barn.installed == {}
    view = await fleet.view(install)
    assert (view.nodes[0].status, view.state) == ("superseded", "done")
    again = await fleet.install()
    barn.script.hold.set()
    await fleet.until(again, "done")
    assert "vllm" in barn.installed


async def test_crossing_back_and_forth_ends_at_the_last_word(fleet: Fleet) -> None:
    workers = [await fleet.corral(f"n{number}") for number in range(3)]
    for worker in workers:
        worker.script.takes_s = 0.01
    for kind in ("install", "delete", "install", "delete", "install"):
        last = await fleet.ask(kind, "vllm")
        await asyncio.sleep(0.02)
    await fleet.until(last, "done")
    assert all("vllm" in worker.installed for worker in workers)
    assert all(worker.most_at_once <= 1 for worker in workers)


async def test_cancel_reaches_the_node(fleet: Fleet) -> None:
    barn, away = await fleet.corral("barn"), await fleet.corral("away", joins=False, status="offline")
    barn.script.hold = asyncio.Event()
    operation = await fleet.install()
    await until(lambda: barn.at_once)
    await fleet.operations.cancel(operation)
    view = await fleet.view(operation)
    assert {row.status for row in view.nodes} == {"cancelled"}
    assert (view.state, view.outcome, view.message) == ("done", "cancelled", "cancelled")
    await until(lambda: barn.at_once == 0, timeout_s=promised(2))
    cancels = barn.orders("cancel")
    assert cancels
    assert all(body == {"op_id": operation, "backend": "vllm"} for body in cancels)  # until its end is heard of
    with pytest.raises(Invalid, match="already ended"):
        await fleet.operations.cancel(operation)
    await away.start()
    await away.beat()
    await fleet.quiet()
    assert (barn.installed, away.orders()) == ({}, [])


async def test_cancel_on_one_node_leaves_the_others(fleet: Fleet) -> None:
    barn, stall = await fleet.corral("barn"), await fleet.corral("stall")
    gate = asyncio.Event()
    barn.script.hold = stall.script.hold = gate
    operation = await fleet.install()
    await until(lambda: barn.at_once and stall.at_once)
    await fleet.operations.cancel(operation, node="barn")
    await until(lambda: barn.at_once == 0)
    gate.set()
    view = await fleet.until(operation, "done")
    assert {row.node_name: row.status for row in view.nodes} == {"barn": "cancelled", "stall": "success"}
    assert barn.installed == {}
    with pytest.raises(NotFound, match="did you mean barn"):
        await fleet.operations.retry(operation, node="bran")


async def test_withdraw_lets_what_runs_end(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.corral("away", joins=False, status="offline")
    barn.script.hold = asyncio.Event()
    operation = await fleet.install()
    await until(lambda: barn.at_once)
    await fleet.operations.withdraw(operation)
    assert {row.status for row in (await fleet.view(operation)).nodes} == {"withdrawn"}
    barn.script.hold.set()
    await until(lambda: barn.installed)
    assert barn.orders("cancel") == []


async def test_retry_of_what_was_cancelled_asks_anew(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    operation = await fleet.install("mine", uri="oci://registry.test/mine:1", alias="x")
    await until(lambda: barn.at_once)
    await fleet.operations.cancel(operation)
    barn.script.hold = None
    again = await fleet.operations.retry(operation, by="key-1")
    assert again.operation_id != operation
    await fleet.until(again.operation_id, "done")
    assert barn.orders("install")[-1]["uri"] == "oci://registry.test/mine:1"
    with pytest.raises(Invalid, match="no node of the operation is failing"):
        await fleet.operations.retry(again.operation_id)


async def test_upgrade_goes_where_it_is_installed_and_nowhere_else(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.until(await fleet.install(node="barn"), "done")
    empty = await fleet.corral("empty")
    fleet.catalogue.publish("vllm", "sha256:2")
    operation = await fleet.ask("upgrade", "vllm")
    view = await fleet.until(operation, "done")
    assert [row.node_name for row in view.nodes] == ["barn"]
    assert barn.installed["vllm"]["digest"] == "sha256:2"
    fetch, switch = barn.orders("upgrade")
    assert (fetch["digest"], fetch["fetch_only"]) == ("sha256:2", True)
    assert (switch["digest"], switch.get("fetch_only")) == ("sha256:2", None)
    assert (fetch["op_id"], fetch["attempt"] + 1) == (switch["op_id"], switch["attempt"])
    assert empty.orders() == []
    await fleet.quiet()
    assert len(barn.orders()) == 3


async def test_an_upgrade_nobody_has_is_refused_and_stores_nothing(fleet: Fleet) -> None:
    await having(fleet, "barn")
    with pytest.raises(NotFound, match="'llama-cpp' is not installed on any node"):
        await fleet.ask("upgrade", "llama-cpp")
    await fleet.corral("empty")
    await until(lambda: _known(fleet, "empty"))
    with pytest.raises(NotFound, match="not installed on this node"):
        await fleet.ask("delete", "llama-cpp", node="empty")
    async with fleet.store.read() as tx:
        assert len(await operations.list_(tx, limit=9)) == 1


async def test_one_node_switches_first_then_a_share_and_a_failed_switch_stops_the_rest(fleet: Fleet) -> None:
    workers = {f"n{number}": worker for number, worker in enumerate(await having(fleet, *(f"n{n}" for n in range(8))))}
    gate = asyncio.Event()
    for worker in workers.values():
        worker.script.hold = gate
    fleet.catalogue.publish("vllm", "sha256:2")
    operation = await fleet.ask("upgrade", "vllm", max_parallel="25%")
    await until(lambda: sum(worker.at_once for worker in workers.values()) == 8)
    assert all(worker.orders("upgrade")[-1]["fetch_only"] for worker in workers.values()), "all fetch at once"
    gate.set()
    gate = asyncio.Event()
    for worker in workers.values():
        worker.script.hold = gate
    await until(lambda: all(worker.installed["vllm"].get("fetched") == ["sha256:2"] for worker in workers.values()))
    await until(lambda: sum(worker.at_once for worker in workers.values()) == 1)
    await fleet.quiet()
    assert sum(worker.at_once for worker in workers.values()) == 1, "one node per variant first"
    (first,) = [name for name, worker in workers.items() if worker.at_once]
    workers[first].script.hold.set()  # type: ignore[union-attr]
    gate = asyncio.Event()
    for worker in workers.values():
        worker.script.hold = gate
    await until(lambda: sum(worker.at_once for worker in workers.values()) == 2)
    await fleet.quiet()
    assert sum(worker.at_once for worker in workers.values()) == 2, "then a quarter of eight"
    second, third = [name for name, worker in workers.items() if worker.at_once]
    workers[second].script.failures = [{"error": "exit 1", "phase": "starting"}]
    gate.set()
    await fleet.until_row(operation, second, "error")
    await fleet.until_row(operation, third, "success")
    await fleet.quiet()
    view = await fleet.view(operation)
    held = [row for row in view.nodes if row.error.startswith(f"stopped: {second} failed to switch: exit 1")]
    assert len(held) == 5
    assert view.state == "failing"
    assert view.settled
    await fleet.operations.retry(operation)
    await fleet.until(operation, "done")
    assert {worker.installed["vllm"]["digest"] for worker in workers.values()} == {"sha256:2"}


async def test_a_download_that_fails_stops_nobody_else(fleet: Fleet) -> None:
    workers = await having(fleet, "a", "b", "c")
    fleet.catalogue.publish("vllm", "sha256:2")
    workers[1].script.failures = [{"error": "cut", "phase": "downloading"}]
    operation = await fleet.ask("upgrade", "vllm")
    await fleet.until(operation, "failing")
    await fleet.until_row(operation, "c", "success")
    assert (await fleet.row(operation, "b")).status == "error"


async def test_rollback_is_the_previous_build_as_a_new_word(fleet: Fleet) -> None:
    barn, stall = await having(fleet, "barn", "stall")
    fleet.catalogue.publish("vllm", "sha256:2")
    await fleet.until(await fleet.ask("upgrade", "vllm"), "done")
    operation = await fleet.ask("rollback", "vllm")
    await fleet.until(operation, "done")
    assert {worker.installed["vllm"]["digest"] for worker in (barn, stall)} == {"sha256:cpu-vllm-1"}
    assert barn.orders("upgrade")[-1]["sources"] == [{"kind": "oci", "uri": "registry.test/cpu-vllm:1"}]
    await fleet.until(await fleet.ask("upgrade", "vllm"), "done")
    assert barn.installed["vllm"]["digest"] == "sha256:2"


async def test_rollback_to_what_the_nodes_keep(fleet: Fleet) -> None:
    """Nobody installed it through us, so only the nodes know an earlier version."""
    barn = await fleet.corral("barn", joins=False)
    barn.put("vllm", digest="sha256:2", previous=["sha256:1", "sha256:0"])
    await barn.start()
    await barn.beat()
    old = await fleet.localai("old-hand")
    old.put("vllm")
    await until(lambda: _listed(fleet, "barn", ["vllm"]))
    await until(lambda: _listed(fleet, "old-hand", ["vllm"]))
    operation = await fleet.ask("rollback", "vllm")
    view = await fleet.until(operation, "done")
    assert barn.installed["vllm"]["digest"] == "sha256:1"
    assert {row.node_name: row.status for row in view.nodes} == {"barn": "success", "old-hand": "skipped"}
    assert old.orders() == []


async def test_rollback_of_what_has_no_past(fleet: Fleet) -> None:
    await having(fleet, "barn")
    with pytest.raises(Conflict, match=r"no earlier version .*`corral backends list`"):
        await fleet.ask("rollback", "vllm")


async def test_withdrawing_an_upgrade_brings_back_what_held_before(fleet: Fleet) -> None:
    barn, stall = await having(fleet, "barn", "stall")
    fleet.catalogue.publish("vllm", "sha256:2")
    barn.script.hold, stall.script.hold = asyncio.Event(), asyncio.Event()
    operation = await fleet.ask("upgrade", "vllm")
    await until(lambda: barn.at_once or stall.at_once)
    first, second = (barn, stall) if barn.at_once else (stall, barn)
    assert first.script.hold is not None
    first.script.hold.set()
    await until(lambda: first.installed["vllm"]["digest"] == "sha256:2" and second.at_once)
    await fleet.operations.cancel(operation)
    await until(lambda: {worker.installed["vllm"]["digest"] for worker in (barn, stall)} == {"sha256:cpu-vllm-1"})


async def _listed(fleet: Fleet, name: str, backends: list[str]) -> bool:
    return await fleet.inventory(name) == backends


async def _known(fleet: Fleet, name: str) -> bool:
    async with fleet.store.read() as tx:
        return await node_backends.find(tx, f"id-of-{name}") is not None
