"""A body that says not how long it is, and comes in crumbs: it takes the room it is counted with."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator

import pytest

from corral.contract.http import BodyTooLarge
from corral.gateway.bodies import BodyRoom, NoRoom, read_whole

MANY = 200_000


class Crumbs:
    length = None

    async def chunks(self) -> AsyncIterator[bytes]:
        for number in range(MANY):
            yield b"%02d" % (number % 100)

    async def read(self, limit: int) -> bytes:
        raise AssertionError


async def test_crumbs_take_no_more_than_the_body_itself() -> None:
    room = BodyRoom(limit_bytes=2 * MANY)
    share = room.share()
    tracemalloc.start()
    try:
        whole = await read_whole(Crumbs(), 2 * MANY, share)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(whole) == room.taken_bytes == 2 * MANY
    assert most < 4 * len(whole), "each crumb kept by itself took twenty times its size"
    share.close()
    assert room.taken_bytes == 0


async def test_more_than_may_be_is_refused_while_it_comes() -> None:
    with pytest.raises(BodyTooLarge):
        await read_whole(Crumbs(), 2 * MANY - 1, BodyRoom(limit_bytes=2 * MANY).share())
    with pytest.raises(NoRoom):
        await read_whole(Crumbs(), 2 * MANY, BodyRoom(limit_bytes=2 * MANY - 1).share())
