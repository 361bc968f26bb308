"""A part is drawn once for all who ask at the same time, and kept in proportion to what drawing it took."""

from __future__ import annotations

import asyncio

from corral.controller.web.shared_parts import MAX_PARTS, SharedParts
from tests.support.manual_clock import ManualClock


async def test_those_who_ask_together_share_one_drawing() -> None:
    clock, drawn, may_end = ManualClock(), [], asyncio.Event()
    parts = SharedParts(clock)

    async def draw() -> str:
        drawn.append(clock.monotonic())
        await may_end.wait()
        clock.advance(0.1)
        return f"drawing {len(drawn)}"

    asking = [asyncio.ensure_future(parts.text("a", draw)) for _ in range(100)]
    await asyncio.sleep(0)
    may_end.set()
    assert set(await asyncio.gather(*asking)) == {"drawing 1"}
    clock.advance(0.39)
    assert await parts.text("a", draw) == "drawing 1", "kept four times as long as it took"
    assert await parts.text("b", draw) == "drawing 2"
    clock.advance(0.02)
    assert await parts.text("a", draw) == "drawing 3"


async def test_what_is_drawn_at_once_is_never_old_and_little_is_kept() -> None:
    parts, number = SharedParts(ManualClock()), 0

    async def draw() -> str:
        nonlocal number
        number += 1
        return str(number)

    assert [await parts.text("a", draw) for _ in range(3)] == ["1", "2", "3"]
    for key in range(MAX_PARTS * 2):
        await parts.text(key, draw)
    assert len(parts._kept) <= MAX_PARTS
