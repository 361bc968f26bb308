"""What heartbeats report of backends: changes, every third time everything, and never late because of a disk."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from corral.contract.messages.backends import NodeBackend, OrderReport
from corral.contract.messages.replicas import ReplicaProcess
from corral.kit.tasks import Wake
from corral.worker.agent.heartbeat import reporter
from corral.worker.agent.heartbeat.reporter import FULL_REPORT_EVERY, HeartbeatReport, HeartbeatReporter
from tests.support.waiting import DEADLINE_S


class Disk:
    """The part of an installer that the reporter uses."""

    def __init__(self) -> None:
        self.sequence = 1
        self.rows: tuple[NodeBackend, ...] = (NodeBackend(name="a"),)
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: Exception | None = None
        self.reads = 0

    async def list_backends(self) -> tuple[NodeBackend, ...]:
        self.reads += 1
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return self.rows


class World:
    def __init__(self) -> None:
        self.disk = Disk()
        self.orders: tuple[OrderReport, ...] = ()
        self.processes: tuple[ReplicaProcess, ...] = ()
        self.wake = Wake()
        self.reporter = HeartbeatReporter(
            cast("Any", self.disk), lambda: self.orders, lambda: self.processes, self.wake
        )

    async def beat(self, *, arrives: bool = True) -> HeartbeatReport:
        report, on_sent = await self.reporter.collect()
        if arrives:
            on_sent()
        return report


async def test_a_report_has_changes_and_every_third_one_everything() -> None:
    world = World()
    assert (await world.beat()).inventory == world.disk.rows
    beats = [await world.beat() for _ in range(2 * FULL_REPORT_EVERY)]
    whole = [beat.inventory is not None for beat in beats]
    assert sum(whole) == 2
    assert all(beat.orders is None for beat in beats if beat.inventory is None)
    assert world.disk.reads == 3


async def test_a_change_is_reported_until_a_report_was_sent() -> None:
    world = World()
    await world.beat()
    world.disk.sequence, world.disk.rows = 2, ()
    for _ in range(3):
        report = await world.beat(arrives=False)
        assert (report.inventory, report.inventory_seq) == ((), 2)
    await world.beat()
    assert (await world.beat()).inventory is None
    world.orders = (OrderReport("op", 1, "install", "a"),)
    report = await world.beat()
    assert (report.orders, report.inventory) == (world.orders, ())
    world.processes = (ReplicaProcess("p", "m", 0, "a", "ready", "openai"),)
    assert (await world.beat()).processes == world.processes


async def test_a_new_session_begins_with_a_full_report() -> None:
    world = World()
    await world.beat()
    world.reporter.start_session()
    assert (await world.beat()).inventory is not None


async def test_a_slow_disk_delays_no_heartbeat(monkeypatch: Any) -> None:
    monkeypatch.setattr(reporter, "READ_TIMEOUT_S", 0.01)
    world = World()
    world.disk.answers.clear()
    for _ in range(3):
        report = await world.beat()
        assert (report.inventory, report.orders) == (None, None)
    assert world.disk.reads == 1  # one read at a time
    world.disk.answers.set()
    assert await world.wake.wait(DEADLINE_S)
    assert (await world.beat()).inventory == world.disk.rows
    await world.reporter.close()


async def test_a_failing_disk_prevents_no_heartbeat() -> None:
    world = World()
    world.disk.error = OSError("broken")
    assert (await world.beat()).inventory is None
    world.disk.error = None
    assert (await world.beat()).inventory == world.disk.rows
