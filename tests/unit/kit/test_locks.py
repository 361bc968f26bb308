"""One backend at a time under any of its names, others side by side, first come first served."""

from __future__ import annotations

import asyncio

import pytest

from corral.kit.tasks import NameLocks


class Worker:
    def __init__(self, locks: NameLocks, log: list[str]) -> None:
        self.locks = locks
        self.log = log

    async def __call__(self, who: str, *names: str) -> None:
        async with self.locks.hold(frozenset(names)):
            self.log.append(f"{who} in")
            for _ in range(5):
                await asyncio.sleep(0)
            self.log.append(f"{who} out")


async def test_shared_names_are_serial_in_order() -> None:
    log: list[str] = []
    work = Worker(NameLocks(), log)
    await asyncio.gather(work("1", "a", "alias"), work("2", "alias"), work("3", "a"))
    # 2 and 3 share no name with each other, only with 1
    assert log[:2] == ["1 in", "1 out"]
    assert set(log[2:4]) == {"2 in", "3 in"}


async def test_different_names_run_side_by_side() -> None:
    log: list[str] = []
    work = Worker(NameLocks(), log)
    await asyncio.gather(work("1", "a"), work("2", "b"))
    assert log == ["1 in", "2 in", "1 out", "2 out"]


async def test_nobody_overtakes() -> None:
    log: list[str] = []
    work = Worker(NameLocks(), log)
    await asyncio.gather(work("1", "a"), work("2", "a", "b"), work("3", "b"))
    assert log == ["1 in", "1 out", "2 in", "2 out", "3 in", "3 out"]


async def test_one_who_gives_up_waiting_is_in_nobodys_way() -> None:
    locks, log = NameLocks(), list[str]()
    work = Worker(locks, log)
    first = asyncio.create_task(work("1", "a"))
    second = asyncio.create_task(work("2", "a", "b"))
    third = asyncio.create_task(work("3", "b"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, third)
    with pytest.raises(asyncio.CancelledError):
        await second
    assert log == ["1 in", "3 in", "1 out", "3 out"]
    await work("4", "a", "b")
