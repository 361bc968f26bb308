"""`BackgroundTasks`: independent work whose errors are logged and which ends with its block."""

from __future__ import annotations

import asyncio

import pytest

from corral.kit.errors import Failed
from corral.kit.tasks import BackgroundTasks


async def test_an_error_ends_only_its_own_task() -> None:
    done = asyncio.Event()

    async def fail(error: Exception) -> None:
        raise error

    async def finish() -> None:
        done.set()

    async with BackgroundTasks() as tasks:
        tasks.start(fail(Failed("no")), name="expected")
        tasks.start(fail(ValueError("no")), name="unexpected")
        tasks.start(finish(), name="finish")
        async with asyncio.timeout(5):
            await done.wait()


async def test_leaving_the_block_cancels_unfinished_work() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with BackgroundTasks() as tasks:
        tasks.start(work(), name="work")
        tasks.start(work(), name="never began")
        assert len(tasks) == 2
        await started.wait()
    assert ended.is_set()
    assert len(tasks) == 0
    tasks.start(work(), name="too late")
    assert len(tasks) == 0


async def test_an_error_of_the_block_comes_out_as_it_is() -> None:
    tasks = BackgroundTasks()

    async def leave() -> None:
        async with tasks:
            tasks.start(asyncio.sleep(10), name="work")
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        await leave()
    assert len(tasks) == 0
