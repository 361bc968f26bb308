"""Many who want the same thing share one run, which ends when the last has gone."""

from __future__ import annotations

import asyncio

import pytest

from corral.blobs.progress import Progress, Tell
from corral.blobs.sharing import SharedRuns
from corral.contract.messages.backends import Phase
from corral.kit.errors import Failed


class Work:
    """Counts how often it was started, waits to be let go, notes how it ended."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.tidied = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, tell: Tell) -> str:
        self.started += 1
        tell(Progress(Phase.DOWNLOADING, "f", self.started, 9))
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            await self.may_end.wait()
            raise
        finally:
            self.tidied += 1
        if self.error is not None:
            raise self.error
        return "done"


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_two_who_ask_get_one_run_and_both_hear_its_progress() -> None:
    runs: SharedRuns[str, str] = SharedRuns()
    work = Work()
    heard: tuple[list[Progress], list[Progress]] = ([], [])
    first = asyncio.create_task(runs.join("k", work, heard[0].append))
    await settle()
    second = asyncio.create_task(runs.join("k", work, heard[1].append))
    await settle()
    work.go.set()
    assert list(await asyncio.gather(first, second)) == ["done", "done"]
    assert work.started == 1
    assert heard[0] == heard[1] == [Progress(Phase.DOWNLOADING, "f", 1, 9)]  # the late one is told where it stands
    assert "k" not in runs


async def test_other_keys_are_other_runs() -> None:
    runs: SharedRuns[str, str] = SharedRuns()
    work = Work()
    work.go.set()
    assert list(await asyncio.gather(runs.join("a", work), runs.join("b", work))) == ["done", "done"]
    assert work.started == 2


async def test_one_who_leaves_takes_nothing_from_the_other() -> None:
    runs: SharedRuns[str, str] = SharedRuns()
    work = Work()
    first = asyncio.create_task(runs.join("k", work))
    second = asyncio.create_task(runs.join("k", work))
    await settle()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert work.cancelled == 0
    work.go.set()
    assert await second == "done"


async def test_when_the_last_leaves_the_work_has_ended_before_the_leaving_has() -> None:
    runs: SharedRuns[str, str] = SharedRuns()
    work = Work()
    only = asyncio.create_task(runs.join("k", work))
    await settle()
    only.cancel()
    with pytest.raises(asyncio.CancelledError):
        await only
    assert (work.cancelled, work.tidied) == (1, 1)


async def test_who_comes_while_it_is_given_up_gets_a_new_run_after_the_old_has_tidied() -> None:
    runs: SharedRuns[str, str] = SharedRuns()
    work = Work()
    work.may_end.clear()
    first = asyncio.create_task(runs.join("k", work))
    await settle()
    first.cancel()
    await settle()
    second = asyncio.create_task(runs.join("k", work))
    await settle()
    assert (work.started, work.tidied) == (1, 0)
    work.may_end.set()
    work.go.set()
    assert await second == "done"
    assert work.started == 2
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_failure_reaches_all_and_is_forgotten() -> None:
    runs: SharedRuns[str, str] = SharedRuns()
    work = Work()
    work.error = Failed("no")
    both = [asyncio.create_task(runs.join("k", work)) for _ in range(2)]
    await settle()
    work.go.set()
    for task in both:
        with pytest.raises(Failed, match="no"):
            await task
    work.error = None
    assert await runs.join("k", work) == "done"
    assert work.started == 2
