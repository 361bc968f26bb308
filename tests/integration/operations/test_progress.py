"""Progress: merged by attempt and number, never backwards, the same from every controller, written once in a while."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from corral.contract.admin import OperationNodeView
from corral.contract.messages.backends import InstallProgress
from corral.store.tables import operation_nodes
from tests.support.backend_fleet import QUICK, Controller, Fleet, quick
from tests.support.scripted_worker import CorralWorker
from tests.support.waiting import until


async def begun(fleet: Fleet, *names: str) -> tuple[str, list[CorralWorker]]:
    """An install under way on these nodes, which will not end by itself."""
    workers = [await fleet.corral(name) for name in names]
    for worker in workers:
        worker.script.hold = asyncio.Event()
    operation = await fleet.install()
    for name in names:
        await fleet.until_row(operation, name, "downloading")
    return operation, workers


async def shown(fleet: Fleet, operation: str, on: Controller | None = None, name: str = "barn") -> OperationNodeView:
    return next(row for row in (await fleet.view(operation, on)).nodes if row.node_name == name)


async def stored(fleet: Fleet, operation: str, name: str = "barn") -> Any:
    async with fleet.store.read() as tx:
        rows = await operation_nodes.list_(tx, operation)
    return next(row for row in rows if row.node_name == name)


async def until_shown(fleet: Fleet, operation: str, percentage: float, on: Controller | None = None) -> None:
    async def reached() -> bool:
        return (await shown(fleet, operation, on)).percentage == percentage

    await until(reached)


async def test_file_bytes_percent_phase_and_rate_are_shown_per_node(fleet: Fleet) -> None:
    operation, (barn, _) = await begun(fleet, "barn", "shed")
    await barn.progress(
        operation,
        attempt=1,
        seq=3,
        percentage=25.0,
        phase="downloading",
        file_name="layer 2 of 4",
        current_bytes=1024**2,
        total_bytes=4 * 1024**2,
        rate=512.0,
    )
    await until_shown(fleet, operation, 25.0)
    row = await shown(fleet, operation)
    assert (row.status, row.phase, row.file_name) == ("downloading", "downloading", "layer 2 of 4")
    assert (row.current, row.total, row.rate) == ("1.0 MiB", "4.0 MiB", 512.0)
    assert (await shown(fleet, operation, name="shed")).percentage == 0.0


async def test_events_that_overtake_each_other_or_come_twice_never_go_backwards(fleet: Fleet) -> None:
    operation, (barn,) = await begun(fleet, "barn")
    seen: list[float] = []
    for seq, percentage in ((1, 5.0), (4, 60.0), (2, 20.0), (4, 60.0), (3, 40.0), (1, 5.0), (5, 61.0)):
        await barn.progress(operation, attempt=1, seq=seq, percentage=percentage, phase="downloading")
        seen.append((await shown(fleet, operation)).percentage)
    await until_shown(fleet, operation, 61.0)
    assert seen == sorted(seen)


async def test_an_event_of_an_attempt_that_is_over_says_nothing(fleet: Fleet) -> None:
    operation, (barn,) = await begun(fleet, "barn")
    barn.script.failures = [{"error": "cut", "phase": "downloading"}]
    assert barn.script.hold is not None
    barn.script.hold.set()
    await fleet.until(operation, "failing")
    await barn.progress(operation, attempt=1, seq=99, percentage=99.0, phase="downloading")
    barn.script.hold = asyncio.Event()
    await fleet.operations.retry(operation)
    await fleet.until_row(operation, "barn", "downloading")
    await barn.progress(operation, attempt=2, seq=1, percentage=3.0, phase="downloading")
    await until_shown(fleet, operation, 3.0)


async def test_both_controllers_show_what_either_was_told(fleet: Fleet) -> None:
    second = await fleet.controller("c2")
    operation, (barn,) = await begun(fleet, "barn")
    await barn.progress(operation, attempt=1, seq=1, percentage=42.0, phase="extracting")
    for controller in fleet.controllers:
        await until_shown(fleet, operation, 42.0, controller)
    assert (await shown(fleet, operation, second)).phase == "extracting"


async def test_what_was_reached_is_shown_by_a_controller_that_starts_later(fleet: Fleet) -> None:
    operation, (barn,) = await begun(fleet, "barn")
    await barn.progress(operation, attempt=1, seq=7, percentage=70.0, phase="downloading")

    async def written() -> bool:
        return bool((await stored(fleet, operation)).percentage == 70.0)

    await until(written)
    later = await fleet.controller("c2", start=False)
    assert (await shown(fleet, operation, later)).percentage == 70.0


async def test_many_events_cost_few_writes(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred events within two of the writer's turns are no more than a write per turn and operation."""
    operation, (barn,) = await begun(fleet, "barn")
    writes: list[float] = []
    put = operation_nodes.put

    async def counted(tx: Any, rows: Any) -> None:
        rows = list(rows)
        if any(row.phase == "downloading" for row in rows):
            writes.append(fleet.clock.monotonic())
        await put(tx, rows)

    monkeypatch.setattr(operation_nodes, "put", counted)
    begin = fleet.clock.monotonic()
    for seq in range(1, 101):
        await barn.progress(operation, attempt=1, seq=seq, percentage=seq / 2, phase="downloading")
    await until_shown(fleet, operation, 50.0)

    async def written() -> bool:
        return bool((await stored(fleet, operation)).percentage == 50.0)

    await until(written)
    turns = (fleet.clock.monotonic() - begin) / QUICK.progress_write_interval_s
    assert 1 <= len(writes) <= turns + 1


async def test_only_the_controller_that_reconciles_writes(fleet: Fleet) -> None:
    operation, (barn,) = await begun(fleet, "barn")
    second = await fleet.controller("c2", settings=quick(progress_write_interval_s=0.01))
    await until(lambda: fleet.first.backends.reconciler.leading)
    await second.backends.progress.on_progress(_event(operation, barn, 55.0), {"node": barn.node_id})
    await second.backends.progress.write()
    assert (await stored(fleet, operation)).percentage == 0.0
    assert (await shown(fleet, operation, second)).percentage == 55.0, "but it remembers"


async def test_a_node_speaks_for_itself_only(fleet: Fleet) -> None:
    operation, (_, shed) = await begun(fleet, "barn", "shed")
    await shed.progress(operation, node_id="id-of-barn", attempt=1, seq=1, percentage=90.0, phase="downloading")

    async def heard() -> bool:
        return (await shown(fleet, operation, name="shed")).percentage == 90.0

    await until(heard)
    assert (await shown(fleet, operation)).percentage == 0.0


def _event(operation: str, worker: CorralWorker, percentage: float) -> Any:
    return InstallProgress(operation, worker.node_id, "vllm", percentage=percentage, attempt=1, seq=9)
