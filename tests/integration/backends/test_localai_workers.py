"""Workers that answer when they are done: LocalAI's, exact to the contract."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from corral.controller.orders.backend_calls import CallLimits
from corral.store.tables import node_backends, nodes
from tests.support.backend_fleet import QUICK_PACE, Fleet, open_fleet, quick
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until

SHORT = quick(backend_install_timeout_s=0.5, backend_upgrade_timeout_s=0.5)


async def test_it_is_asked_in_the_contracts_words_and_done_when_its_list_shows_it(fleet: Fleet) -> None:
    old = await fleet.localai("old-hand")
    operation = await fleet.install()
    await fleet.until(operation, "done")
    assert old.orders() == [
        {
            "backend": "vllm",
            "backend_galleries": '[{"name":"test","url":"https://gallery.test/index.yaml"}]',
            "op_id": operation,
        }
    ]


async def test_it_is_asked_for_its_inventory_by_itself(fleet: Fleet) -> None:
    old = await fleet.localai("old-hand")
    old.put("piper", is_system=True)
    await until(lambda: _listed(fleet, ["piper"]))
    old.put("vllm", digest="sha256:x")
    await until(lambda: _listed(fleet, ["piper", "vllm"]))


async def test_a_call_that_times_out_is_in_progress_not_failed_and_not_repeated(tmp_path: Path) -> None:
    """The whole story: timeout, row alive, worker finishes, listing confirms, view turns. After as long again it would
    be asked anew, and a busy machine needs some of that for what is looked at here."""
    async with open_fleet(sqlite_url(tmp_path), start=False) as fleet:
        short = await fleet.controller("c2", settings=quick(backend_install_timeout_s=3.0))
        fleet.controllers.insert(0, short)
        old = await fleet.localai("old-hand")
        old.script.hold = asyncio.Event()
        operation = await fleet.install(on=short)
        row = await fleet.until_row(operation, "old-hand", "running_on_worker")
        view = await fleet.view(operation)
        assert view.processed
        assert view.progress != 100
        assert view.message == "worker still installing in background: old-hand"
        assert (row.failures, view.error, view.state) == (0, "", "under_way")
        intent = await fleet.intent("old-hand")
        assert (intent.failures, intent.running) == (0, True)
        await fleet.quiet()
        assert len(old.orders()) == 1, "no second call while it may be at it"
        old.script.hold.set()
        await fleet.until(operation, "done")
        assert len(old.orders()) == 1


async def test_one_that_had_its_time_and_has_nothing_to_show_is_asked_again(tmp_path: Path) -> None:
    async with open_fleet(sqlite_url(tmp_path), start=False) as fleet:
        fleet.controllers.insert(0, await fleet.controller("c2", settings=SHORT))
        old = await fleet.localai("old-hand")
        old.script.hold = asyncio.Event()
        old.script.lie = True
        operation = await fleet.install()
        await fleet.until_row(operation, "old-hand", "running_on_worker")
        await until(lambda: len(old.orders()) >= 2)
        old.script.hold, old.script.lie = None, False
        await fleet.until(operation, "done")
        assert (await fleet.view(operation)).nodes[0].failures == 0


async def test_a_refusal_of_a_localai_worker(fleet: Fleet) -> None:
    old = await fleet.localai("old-hand")
    old.script.failures = [{"error": "installing backend from gallery: no space left"}]
    operation = await fleet.install()
    row = await fleet.until_row(operation, "old-hand", "error")
    assert row.error == "installing backend from gallery: no space left"
    await fleet.time_passes("old-hand")
    await fleet.until(operation, "done")


async def test_an_upgrade_shows_by_its_date_and_a_worker_from_before_reinstalls_by_force(fleet: Fleet) -> None:
    new = await fleet.localai("newer")
    old = await fleet.localai("older", upgrades=False)
    for worker in (new, old):
        worker.put("vllm")
    await until(lambda: _listed(fleet, ["vllm"], "newer", "older"))
    operation = await fleet.ask("upgrade", "vllm", max_parallel="100%")
    await fleet.until(operation, "done")
    assert [order["op_id"] for order in new.orders("upgrade")] == [operation]
    assert new.orders("install") == []
    assert [(order["force"], order["op_id"]) for order in old.orders("install")] == [(True, operation)]
    await fleet.quiet()
    assert len(new.orders()) + len(old.orders()) == 2, "done is done"


async def test_what_is_listed_only_as_its_build_is_installed_upgraded_and_deleted_by_its_own_name(fleet: Fleet) -> None:
    """LocalAI's usual case: builds share the name of the entry that chooses among them, and hide it in the list."""
    fleet.catalogue.shared = {"cuda12-vllm": "vllm"}
    old = await fleet.localai("old-hand")
    old.script.lists = {"vllm": "cuda12-vllm"}
    await fleet.until(await fleet.install(), "done")
    assert await fleet.inventory("old-hand") == ["cuda12-vllm"]
    await fleet.until(await fleet.ask("upgrade", "vllm"), "done")
    fleet.catalogue.shared = {}  # no gallery can be read any more: what they said is remembered
    before = len(old.asked)
    await until(lambda: [one for one in old.asked[before:] if one.subject == "backend.list"])
    await fleet.until(await fleet.ask("delete", "vllm"), "done")
    assert [one.subject for one in old.asked if one.subject != "backend.list"] == [
        "backend.install",
        "backend.upgrade",
        "backend.delete",
    ]
    assert await fleet.inventory("old-hand") == []


async def test_other_upgrade_errors_do_not_fall_back(fleet: Fleet) -> None:
    old = await fleet.localai("old-hand")
    old.put("vllm")
    await until(lambda: _listed(fleet, ["vllm"]))
    old.script.failures = [{"error": "no such image"}]
    operation = await fleet.ask("upgrade", "vllm")
    row = await fleet.until_row(operation, "old-hand", "error")
    assert row.error == "no such image"
    assert old.orders("install") == []


async def test_a_delete_that_is_refused_counts_as_failed(fleet: Fleet) -> None:
    old = await fleet.localai("old-hand")
    old.put("vllm")
    await until(lambda: _listed(fleet, ["vllm"]))
    old.script.failures = [{"error": "vllm#0 is still running"}]
    operation = await fleet.ask("delete", "vllm")
    assert (await fleet.until_row(operation, "old-hand", "error")).error == "vllm#0 is still running"
    await fleet.time_passes("old-hand")
    await fleet.until(operation, "done")
    assert old.orders("delete") == [{"backend": "vllm"}] * 2


async def test_one_on_which_nobody_listens_is_unhealthy_after_the_second_try(fleet: Fleet) -> None:
    old = await fleet.localai("old-hand")
    await until(lambda: _known(fleet))
    await old.stop()

    async def unhealthy() -> bool:
        async with fleet.store.read() as tx:
            return (await nodes.get(tx, old.node_id)).status == "unhealthy"

    await until(unhealthy)


async def test_no_more_calls_are_open_at_once_than_lines(tmp_path: Path) -> None:
    async with open_fleet(sqlite_url(tmp_path), start=False) as fleet:
        few = await fleet.controller("c2", pace=replace(QUICK_PACE, limits=CallLimits(quick=8, slow=2)))
        fleet.controllers.insert(0, few)
        workers = [await fleet.localai(f"n{number}") for number in range(5)]
        gate = asyncio.Event()
        for worker in workers:
            worker.script.hold = gate
        operation = await fleet.install()

        async def do_others_wait() -> bool:  # their inventories may be read after the first two have begun
            return sum("waits for its turn" in row.error for row in (await fleet.view(operation)).nodes) == 3

        await until(do_others_wait)
        await fleet.quiet()
        assert await do_others_wait()
        assert sum(worker.at_once for worker in workers) == 2
        gate.set()
        await fleet.until(operation, "done")


async def test_mixed_fleet_without_spurious_errors(fleet: Fleet) -> None:
    await fleet.localai("old-hand")
    await fleet.corral("barn")
    operation = await fleet.install()
    seen: set[str] = set()

    async def done() -> bool:
        view = await fleet.view(operation)
        seen.update(row.status for row in view.nodes)
        return view.state == "done"

    await until(done)
    assert "error" not in seen


async def _listed(fleet: Fleet, names: list[str], *nodes: str) -> bool:
    return all([await fleet.inventory(node) == names for node in nodes or ("old-hand",)])


async def _known(fleet: Fleet) -> bool:
    async with fleet.store.read() as tx:
        return await node_backends.find(tx, "id-of-old-hand") is not None
