"""One follower's place in the stream: slow ones start over, and all are told when the controller stops."""

from __future__ import annotations

from corral.contract.admin import NodeView
from corral.controller.runtime import change_feed as watch
from corral.controller.runtime.change_feed import END, Change, Following


async def drain(following: Following) -> list[str]:
    seen = []
    while True:
        change = await following.next()
        seen.append(change.kind)
        if change.kind in ("ready", "end"):
            return seen


def views(count: int) -> dict[str, NodeView]:
    return {str(number): NodeView(id=str(number)) for number in range(count)}


async def test_it_starts_with_the_present() -> None:
    assert await drain(Following(views(3))) == ["node", "node", "node", "ready"]


async def test_a_follower_that_lags_starts_over_however_large_the_fleet_has_grown() -> None:
    following = Following(views(0))
    for _ in range(watch._QUEUE + 1):
        following.tell(Change("changed", {}))
    states = [following.lagged]
    following.start_with(views(3 * watch._QUEUE))
    states.append(following.lagged)
    assert states == [True, False]
    assert await drain(following) == ["node"] * (3 * watch._QUEUE) + ["ready"]


async def test_the_end_comes_at_once_whatever_still_waits() -> None:
    following = Following(views(500))
    following.end()
    assert await following.next() is END
