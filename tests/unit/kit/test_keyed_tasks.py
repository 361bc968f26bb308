"""Work in the background: one task per key, and none is left behind."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from corral.kit.tasks import KeyedTasks


class Work:
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.given_up: list[str] = []
        self.go = asyncio.Event()

    async def do(self, key: str) -> None:
        self.begun.append(key)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.given_up.append(key)
            raise


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_one_at_a_time_for_a_key_and_again_when_it_has_ended() -> None:
    work = Work()
    async with KeyedTasks[str]() as tasks:
        for key in ("a", "a", "b"):
            tasks.start(key, partial(work.do, key), name=key)
        await turns()
        assert (work.begun, tasks.running()) == (["a", "b"], ("a", "b"))
        work.go.set()
        await turns()
        assert tasks.running() == ()
        tasks.start("a", partial(work.do, "a"), name="a")
        await turns()
    assert work.begun == ["a", "b", "a"]


async def test_what_is_given_up_counts_until_it_has_ended() -> None:
    work = Work()
    async with KeyedTasks[str]() as tasks:
        tasks.start("a", partial(work.do, "a"), name="a")
        await turns()
        tasks.cancel("a")
        tasks.start("a", partial(work.do, "a"), name="a")
        assert tasks.running() == ("a",)
        await turns()
        assert (work.begun, tasks.running()) == (["a"], ())


async def test_leaving_ends_what_is_under_way_and_nothing_begins_after() -> None:
    work = Work()
    async with KeyedTasks[str]() as tasks:
        tasks.start("a", partial(work.do, "a"), name="a")
        await turns()
    assert work.given_up == ["a"]
    tasks.start("b", partial(work.do, "b"), name="b")
    await turns()
    assert work.begun == ["a"]


async def test_a_mistake_in_the_work_is_not_swallowed() -> None:
    async def wrong() -> None:
        raise RuntimeError("wrong")

    async def keep() -> None:
        async with KeyedTasks[str]() as tasks:
            tasks.start("a", wrong, name="a")
            await asyncio.sleep(10)

    with pytest.raises(ExceptionGroup) as told:
        await keep()
    assert [str(error) for error in told.value.exceptions] == ["wrong"]


async def test_a_mistake_in_the_block_comes_out_as_it_is() -> None:
    """The word of a refused join is one line: wrapped, it became a traceback."""
    work = Work()

    async def fail() -> None:
        async with KeyedTasks[str]() as tasks:
            tasks.start("a", partial(work.do, "a"), name="a")
            await turns()
            raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        await fail()
    assert work.given_up == ["a"]
