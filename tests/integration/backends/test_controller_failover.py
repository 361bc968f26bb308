"""Several controllers, and controllers killed between any two steps: nothing is ordered twice, nothing is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest

from corral.store.tables import operations
from tests.support.backend_fleet import Controller, Fleet, open_fleet, quick
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until


async def test_two_controllers_order_once_and_show_the_same(fleet: Fleet) -> None:
    second = await fleet.controller("c2")
    workers = [await fleet.corral(f"n{number}") for number in range(6)]
    first_operation = await fleet.install("vllm", on=fleet.first)
    second_operation = await fleet.install("llama-cpp", on=second)
    for operation in (first_operation, second_operation):
        await fleet.until(operation, "done")
        assert await fleet.view(operation, fleet.first) == await fleet.view(operation, second)
    await fleet.quiet()
    for worker in workers:
        assert sorted(worker.carried_out) == sorted([("install", first_operation, 1), ("install", second_operation, 1)])
        assert len(worker.orders()) == 2


async def test_a_controller_that_starts_later_shows_from_where_the_nodes_received_their_data(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await until(lambda: _leads(fleet.first))
    barn.script.hold = asyncio.Event()
    operation = await fleet.install()
    await until(lambda: barn.at_once)
    moving = {"attempt": 1, "phase": "downloading", "sources": {"attic": 384}, "bad_sources": ("byre",)}
    await barn.progress(operation, seq=1, **moving)
    await until(lambda: _has_sources(fleet, operation, fleet.first))
    barn.script.hold.set()
    await fleet.until(operation, "done")
    await barn.progress(operation, seq=2, **moving | {"sources": {"attic": 999}})  # too late
    second = await fleet.controller("c2")
    (row,) = (await fleet.view(operation, second)).nodes
    assert (row.sources, row.bad_sources) == ({"attic": 384}, ("byre",))
    assert await fleet.view(operation, fleet.first) == await fleet.view(operation, second)


async def _has_sources(fleet: Fleet, operation: str, on: Controller) -> bool:
    return all(row.sources for row in (await fleet.view(operation, on)).nodes)


async def test_the_other_controller_goes_on_when_one_is_killed_in_mid_install(fleet: Fleet) -> None:
    barn, old = await fleet.corral("barn"), await fleet.localai("old-hand")
    await until(lambda: _leads(fleet.first))
    second = await fleet.controller("c2")
    barn.script.hold = old.script.hold = asyncio.Event()
    operation = await fleet.install(on=second)
    await until(lambda: barn.at_once and old.at_once)
    await fleet.first.kill()
    fleet.controllers.reverse()
    row = await fleet.until_row(operation, "old-hand", "running_on_worker")
    assert row.failures == 0, "whoever called is gone, so nobody hears the answer; that is no failure"
    barn.script.hold.set()
    await fleet.until(operation, "done")
    assert barn.carried_out == [("install", operation, 1)]
    assert len(old.orders()) == 1


async def test_a_cancel_survives_the_controller_that_took_it(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    operation = await fleet.install()
    await until(lambda: barn.at_once)
    await fleet.first.kill()
    await fleet.operations.cancel(operation)
    await fleet.controller("c2")
    await until(lambda: barn.at_once == 0)
    assert barn.installed == {}


async def test_the_database_away_for_a_while_costs_time_only(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.kit.errors import Unavailable

    barn = await fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    operation = await fleet.install()
    await until(lambda: barn.at_once)

    def away() -> Any:
        raise Unavailable("the database is away")

    with monkeypatch.context() as broken:
        broken.setattr(fleet.store, "write", away)
        barn.script.hold.set()
        await until(lambda: barn.outcomes)
        await asyncio.sleep(0.1)
    await fleet.until(operation, "done")
    assert len(barn.orders()) == 1


class KilledAfter:
    """Awaits a coroutine for so many steps, a step being from one wait to the next, and then kills it where it is."""

    def __init__(self, work: Coroutine[Any, Any, None], steps: int) -> None:
        self._work = work
        self._steps = steps
        self.survived = False

    def __await__(self) -> Generator[Any, Any, None]:
        inner = self._work.__await__()
        for _ in range(self._steps):
            try:
                waiting = inner.send(None)
            except StopIteration:
                self.survived = True
                return
            yield waiting
        with contextlib.suppress(asyncio.CancelledError, StopIteration):
            inner.throw(asyncio.CancelledError())


async def live(controller: Controller, fleet: Fleet) -> None:
    """A controller that takes one request and brings it about, by hand and in one line, so that it can be cut."""
    reconciler = controller.backends.reconciler
    async with reconciler.dispatch, reconciler.targets:
        await fleet.install(on=controller)
        for _ in range(4):
            await reconciler.reconcile_once()
            await asyncio.sleep(0.004)


@pytest.mark.parametrize("offset", range(4))
async def test_a_controller_killed_between_any_two_steps_loses_nothing(offset: int, tmp_path: Path) -> None:
    steps, survived = offset, False
    while not survived:
        folder = tmp_path / str(steps)
        folder.mkdir()
        survived = await _killed_after(steps, sqlite_url(folder))
        steps += 4


async def _killed_after(steps: int, url: str) -> bool:
    async with open_fleet(url, start=False, lease_s=0.05) as fleet:
        barn, old = await fleet.corral("barn"), await fleet.localai("old-hand")
        barn.script.takes_s = old.script.takes_s = 0.005
        results = [
            await fleet.first.bus.subscribe(event, fleet.first.backends.reconciler.dispatch.on_result)
            for event in _results()
        ]
        life = KilledAfter(live(fleet.first, fleet), steps)
        await life
        for subscription in results:
            await subscription.unsubscribe()
        heir = await fleet.controller("c2", lease_s=0.3, settings=SHORT_TIMES)
        fleet.controllers = [heir]
        await barn.beat()
        async with fleet.store.read() as tx:
            accepted = await operations.list_(tx, limit=5)
        assert len(accepted) <= 1
        if accepted:
            await fleet.until(accepted[0].id, "done")
            assert barn.installed["vllm"]["digest"] == "sha256:cpu-vllm-1"
            assert old.installed["vllm"]
            assert len(set(barn.carried_out)) == len(barn.carried_out) == 1
        return life.survived


SHORT_TIMES = quick(
    backend_install_timeout_s=0.4,
    backend_upgrade_timeout_s=0.4,
    backend_delete_timeout_s=1.0,
    backend_accept_timeout_s=0.5,
    backend_list_timeout_s=0.5,
)


def _results() -> tuple[Any, ...]:
    from corral.contract.messages.backends import DELETE_RESULT, INSTALL_RESULT, UPGRADE_RESULT

    return INSTALL_RESULT, UPGRADE_RESULT, DELETE_RESULT


async def _leads(controller: Controller) -> bool:
    return controller.backends.reconciler.leading
