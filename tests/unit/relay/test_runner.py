"""The runner behaves as a task does, without being one."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

import pytest

from corral.relay.loop.runner import Park, Runner
from tests.support.waiting import DEADLINE_S, until

DOOR = Park()
OTHER = Park()


class Run(Runner):
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: list[BaseException | None] = []

    def on_finished(self, failure: BaseException | None) -> None:
        self.ended.append(failure)


def outside(run: Run, coro: Coroutine[Any, Any, None]) -> None:
    """Start it where no task runs, as the relay does."""
    run.loop.call_soon(run.run, coro)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_it_runs_at_once_and_to_the_end() -> None:
    run = Run()
    seen: list[str] = []

    async def handler() -> None:
        seen.append("ran")

    def start() -> None:
        run.run(handler())
        assert seen == ["ran"]
        assert run.ended == [None]
        assert run.done()

    run.loop.call_soon(start)
    await settle()
    assert run.ended == [None]


async def test_whoever_wakes_it_runs_it() -> None:
    run = Run()
    got: list[object] = []

    async def handler() -> None:
        got.append(await run.wait(DOOR))
        got.append(await run.wait(OTHER))

    outside(run, handler())
    await settle()
    assert run.waits_for(DOOR)

    def wake() -> None:
        run.wake(OTHER, "not yet")
        assert got == []
        run.wake(DOOR, "one")
        assert got == ["one"]
        run.wake_with(OTHER, ValueError("two"))

    run.loop.call_soon(wake)
    await settle()
    assert [type(failure) for failure in run.ended] == [ValueError]


async def test_started_inside_another_task_it_waits_for_its_turn() -> None:
    run = Run()

    async def handler() -> None:
        assert asyncio.current_task() is run  # type: ignore[comparison-overlap]

    run.run(handler())
    assert run.ended == []
    await settle()
    assert run.ended == [None]


async def test_it_waits_for_futures_tasks_and_sleeps() -> None:
    run = Run()

    async def handler() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        assert list(await asyncio.gather(asyncio.sleep(0.001, 1), asyncio.sleep(0, 2))) == [1, 2]
        assert await asyncio.wait_for(asyncio.sleep(0, 3), DEADLINE_S) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(asyncio.sleep(0, 4))
        assert task.result() == 4

    outside(run, handler())
    await until(lambda: run.ended)
    assert run.ended == [None]


async def test_timeouts_reach_it_wherever_it_waits() -> None:
    run = Run()
    ways: list[str] = []

    async def handler() -> None:
        for way in ("park", "future"):
            try:
                async with asyncio.timeout(0.01):
                    await (run.wait(DOOR) if way == "park" else asyncio.Event().wait())
            except TimeoutError:
                ways.append(way)

    outside(run, handler())
    await until(lambda: run.ended)
    assert run.ended == [None]
    assert ways == ["park", "future"]
    assert run.cancelling() == 0


async def test_cancelling_it() -> None:
    for waits in ("park", "future"):
        run = Run()

        async def handler(run: Run = run, waits: str = waits) -> None:
            await (run.wait(DOOR) if waits == "park" else asyncio.Event().wait())

        outside(run, handler())
        await settle()
        assert run.cancel()
        await settle()
        assert [type(failure) for failure in run.ended] == [asyncio.CancelledError]
        assert not run.cancel()


async def test_cancelling_itself_takes_effect_at_the_next_wait() -> None:
    for waits in ("park", "future", "nothing"):
        run = Run()
        reached: list[str] = []

        async def handler(run: Run = run, waits: str = waits, reached: list[str] = reached) -> None:
            run.cancel()
            reached.append("here")
            if waits != "nothing":
                await (run.wait(DOOR) if waits == "park" else asyncio.Event().wait())

        outside(run, handler())
        await settle()
        assert reached == ["here"]
        expected = None if waits == "nothing" else asyncio.CancelledError
        assert [failure if failure is None else type(failure) for failure in run.ended] == [expected]


async def test_a_wake_that_meets_a_cancel_does_not_run_it_twice() -> None:
    run = Run()
    got: list[object] = []

    async def handler() -> None:
        try:
            got.append(await run.wait(DOOR))
        except asyncio.CancelledError:
            got.append("cancelled")
            await run.wait(OTHER)

    outside(run, handler())
    await settle()

    def both() -> None:
        run.cancel()
        run.wake(DOOR, "value")

    run.loop.call_soon(both)
    await settle()
    assert got == ["cancelled"]
    assert run.waits_for(OTHER)
    run.wake(OTHER)
    await settle()
    assert run.ended == [None]


async def test_it_has_a_context_of_its_own() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    run = Run()
    seen: list[int] = []

    async def handler() -> None:
        variable.set(1)
        await run.wait(DOOR)
        seen.append(variable.get())
        await asyncio.sleep(0)
        seen.append(variable.get())

    outside(run, handler())
    await settle()
    variable.set(2)
    run.loop.call_soon(run.wake, DOOR)
    await settle()
    assert seen == [1, 1]
    assert variable.get() == 2


async def test_waiting_in_a_task_the_handler_started() -> None:
    run = Run()

    async def handler() -> None:
        assert await asyncio.create_task(run.wait(DOOR)) == "value"

    outside(run, handler())
    await settle()
    assert run.waits_for(DOOR)
    run.wake(DOOR, "value")
    await settle()
    assert run.ended == [None]
    assert not run.waits_for(DOOR)


async def test_two_tasks_cannot_wait_for_the_same_thing() -> None:
    run = Run()

    async def handler() -> None:
        first = asyncio.create_task(run.wait(DOOR))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="two tasks"):
            await asyncio.create_task(run.wait(DOOR))
        first.cancel()

    outside(run, handler())
    await settle()
    assert run.ended == [None]


async def test_awaiting_nonsense_is_an_error_for_the_handler() -> None:
    class Nonsense:
        def __await__(self) -> Any:
            yield 42

    run = Run()

    async def handler() -> None:
        with pytest.raises(RuntimeError, match="42"):
            await Nonsense()

    outside(run, handler())
    await settle()
    assert run.ended == [None]
