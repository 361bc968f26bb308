"""Work in a thread ends when nobody waits for it any more, and has ended when the waiter is told."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from corral.blobs.threads import Stop, in_thread, to_the_end
from tests.support.waiting import DEADLINE_S


async def test_the_result_comes_back() -> None:
    assert await in_thread(lambda _stop: 7) == 7
    assert await to_the_end(divmod, 7, 2) == (3, 1)


async def test_an_error_comes_back() -> None:
    def fail(_stop: Stop) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await in_thread(fail)


async def test_cancelled_work_has_ended_when_the_waiter_is_told() -> None:
    running, ended = threading.Event(), threading.Event()

    def work(stop: Stop) -> None:
        try:
            while True:
                running.set()
                stop.check()
                time.sleep(0.001)
        finally:
            ended.set()

    task = asyncio.create_task(in_thread(work))
    assert await asyncio.to_thread(running.wait, DEADLINE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_second_cancel_does_not_cut_the_end_short() -> None:
    running, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        running.set()
        go.wait(DEADLINE_S)
        ended.set()

    task = asyncio.create_task(to_the_end(work))
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
