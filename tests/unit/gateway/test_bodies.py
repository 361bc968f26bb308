"""A body that says not how long it is, and comes in crumbs: it takes the room it is counted with."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator

import pytest

from corral.contract.http import BodyTooLarge
from corral.gateway.http.bodies import BudgetExceeded, ByteBudget, read_whole

MANY = 200_000


class Crumbs:
    length = None

    async def chunks(self) -> AsyncIterator[bytes]:
        for number in range(MANY):
            yield b"%02d" % (number % 100)

    async def read(self, limit: int) -> bytes:
        raise AssertionError


async def test_crumbs_take_no_more_than_the_body_itself() -> None:
    room = ByteBudget(limit_bytes=2 * MANY)
    share = room.reserve()
    tracemalloc.start()
    try:
        whole = await read_whole(Crumbs(), 2 * MANY, share)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(whole) == room.used_bytes == 2 * MANY
    assert most < 4 * len(whole), "each crumb kept by itself took twenty times its size"
    share.close()
    assert room.used_bytes == 0


async def test_more_than_may_be_is_refused_while_it_comes() -> None:
    with pytest.raises(BodyTooLarge):
        await read_whole(Crumbs(), 2 * MANY - 1, ByteBudget(limit_bytes=2 * MANY).reserve())
    with pytest.raises(BudgetExceeded):
        await read_whole(Crumbs(), 2 * MANY, ByteBudget(limit_bytes=2 * MANY - 1).reserve())
