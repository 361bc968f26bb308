"""Callers that want the same result share one run, which ends when its last caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from corral.kit.errors import Failed
from corral.kit.single_flight import SingleFlight


class Work:
    """Counts its starts, waits for `go`, and notes how it ended."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.cleaned_up = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, on_progress: Callable[[int], None]) -> str:
        self.started += 1
        on_progress(self.started)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            await self.may_end.wait()
            raise
        finally:
            self.cleaned_up += 1
        if self.error is not None:
            raise self.error
        return "done"


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_two_callers_share_one_run_and_its_progress() -> None:
    flight: SingleFlight[str, int, str] = SingleFlight()
    work = Work()
    reports: tuple[list[int], list[int]] = ([], [])
    first = asyncio.create_task(flight.run("k", work, reports[0].append))
    await settle()
    second = asyncio.create_task(flight.run("k", work, reports[1].append))
    await settle()
    work.go.set()
    assert list(await asyncio.gather(first, second)) == ["done", "done"]
    assert work.started == 1
    assert reports[0] == reports[1] == [1]  # the late caller receives the last report
    assert "k" not in flight


async def test_each_key_has_its_own_run() -> None:
    flight: SingleFlight[str, int, str] = SingleFlight()
    work = Work()
    work.go.set()
    assert list(await asyncio.gather(flight.run("a", work), flight.run("b", work))) == ["done", "done"]
    assert work.started == 2


async def test_a_caller_that_leaves_does_not_disturb_the_other() -> None:
    flight: SingleFlight[str, int, str] = SingleFlight()
    work = Work()
    first = asyncio.create_task(flight.run("k", work))
    second = asyncio.create_task(flight.run("k", work))
    await settle()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert work.cancelled == 0
    work.go.set()
    assert await second == "done"


async def test_the_work_has_ended_when_the_last_caller_has_left() -> None:
    flight: SingleFlight[str, int, str] = SingleFlight()
    work = Work()
    only = asyncio.create_task(flight.run("k", work))
    await settle()
    only.cancel()
    with pytest.raises(asyncio.CancelledError):
        await only
    assert (work.cancelled, work.cleaned_up) == (1, 1)


async def test_a_caller_during_a_cancellation_gets_a_new_run_after_the_old_one_has_cleaned_up() -> None:
    flight: SingleFlight[str, int, str] = SingleFlight()
    work = Work()
    work.may_end.clear()
    first = asyncio.create_task(flight.run("k", work))
    await settle()
    first.cancel()
    await settle()
    second = asyncio.create_task(flight.run("k", work))
    await settle()
    assert (work.started, work.cleaned_up) == (1, 0)
    work.may_end.set()
    work.go.set()
    assert await second == "done"
    assert work.started == 2
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_an_error_reaches_all_callers_and_is_forgotten() -> None:
    flight: SingleFlight[str, int, str] = SingleFlight()
    work = Work()
    work.error = Failed("no")
    both = [asyncio.create_task(flight.run("k", work)) for _ in range(2)]
    await settle()
    work.go.set()
    for task in both:
        with pytest.raises(Failed, match="no"):
            await task
    work.error = None
    assert await flight.run("k", work) == "done"
    assert work.started == 2
