"""Work in a thread ends when its caller is cancelled, and has ended when the caller continues."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from corral.kit.threads import StopToken, run_in_thread, run_uncancelled
from tests.support.waiting import DEADLINE_S


async def test_the_result_comes_back() -> None:
    assert await run_in_thread(lambda _stop: 7) == 7
    assert await run_uncancelled(divmod, 7, 2) == (3, 1)


async def test_an_error_comes_back() -> None:
    def fail(_stop: StopToken) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await run_in_thread(fail)


async def test_cancelled_work_has_ended_when_the_caller_continues() -> None:
    running, ended = threading.Event(), threading.Event()

    def work(stop: StopToken) -> None:
        try:
            while True:
                running.set()
                stop.check()
                time.sleep(0.001)
        finally:
            ended.set()

    task = asyncio.create_task(run_in_thread(work))
    assert await asyncio.to_thread(running.wait, DEADLINE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_second_cancellation_does_not_end_the_wait() -> None:
    running, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        running.set()
        go.wait(DEADLINE_S)
        ended.set()

    task = asyncio.create_task(run_uncancelled(work))
    assert await asyncio.to_thread(running.wait, DEADLINE_S)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
