"""What heartbeats tell of backends: what is new, now and then everything, and never late because of a disk."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from corral.contract.messages.backends import NodeBackend, OrderReport
from corral.contract.messages.replicas import ReplicaProcess
from corral.kit.tasks import Wake
from corral.worker.agent import news as room
from corral.worker.agent.news import EVERY, News, Told
from tests.support.waiting import DEADLINE_S


class Disk:
    """An installer as far as it matters here."""

    def __init__(self) -> None:
        self.sequence = 1
        self.rows: tuple[NodeBackend, ...] = (NodeBackend(name="a"),)
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: Exception | None = None
        self.looks = 0

    async def list_backends(self) -> tuple[NodeBackend, ...]:
        self.looks += 1
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
        self.news = News(cast("Any", self.disk), lambda: self.orders, lambda: self.processes, self.wake)

    async def beat(self, *, arrives: bool = True) -> Told:
        told, was_told = await self.news.gather()
        if arrives:
            was_told()
        return told


async def test_only_what_is_new_and_now_and_then_everything() -> None:
    world = World()
    assert (await world.beat()).inventory == world.disk.rows
    told = [await world.beat() for _ in range(2 * EVERY)]
    whole = [beat.inventory is not None for beat in told]
    assert sum(whole) == 2
    assert all(beat.orders is None for beat in told if beat.inventory is None)
    assert world.disk.looks == 3


async def test_a_change_is_told_at_once_and_again_until_it_was_sent() -> None:
    world = World()
    await world.beat()
    world.disk.sequence, world.disk.rows = 2, ()
    for _ in range(3):
        told = await world.beat(arrives=False)
        assert (told.inventory, told.inventory_seq) == ((), 2)
    await world.beat()
    assert (await world.beat()).inventory is None
    world.orders = (OrderReport("op", 1, "install", "a"),)
    told = await world.beat()
    assert (told.orders, told.inventory) == (world.orders, ())
    world.processes = (ReplicaProcess("p", "m", 0, "a", "ready", "openai"),)
    assert (await world.beat()).processes == world.processes


async def test_somebody_new_who_listens_is_told_everything() -> None:
    world = World()
    await world.beat()
    world.news.start_over()
    assert (await world.beat()).inventory is not None


async def test_a_disk_that_hangs_keeps_no_heartbeat_waiting(monkeypatch: Any) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.01)
    world = World()
    world.disk.answers.clear()
    for _ in range(3):
        told = await world.beat()
        assert (told.inventory, told.orders) == (None, None)
    assert world.disk.looks == 1  # nobody asks twice while the first is under way
    world.disk.answers.set()
    assert await world.wake.wait(DEADLINE_S)
    assert (await world.beat()).inventory == world.disk.rows
    await world.news.close()


async def test_a_disk_that_fails_keeps_no_heartbeat_from_being_sent() -> None:
    world = World()
    world.disk.error = OSError("broken")
    assert (await world.beat()).inventory is None
    world.disk.error = None
    assert (await world.beat()).inventory == world.disk.rows
