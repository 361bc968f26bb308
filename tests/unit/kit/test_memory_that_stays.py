"""A process that has started is not looked through as a whole again."""

from __future__ import annotations

import asyncio
import gc

from corral.kit.memory import settle, settle_after_start
from tests.support.waiting import until


def test_what_is_there_is_not_looked_at_by_later_collections() -> None:
    kept = [[number] for number in range(100)]
    assert any(found is kept for found in gc.get_objects())
    settle()
    assert not any(found is kept for found in gc.get_objects())


async def test_it_is_done_once_the_start_is_over() -> None:
    before = gc.get_freeze_count()
    settle_after_start(asyncio.get_running_loop(), 0.01)
    assert gc.get_freeze_count() == before
    await until(lambda: gc.get_freeze_count() > before, "a frozen heap")
