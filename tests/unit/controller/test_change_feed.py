"""Subscriptions of the change feed: a slow subscriber starts over, and all of them end when the controller stops."""

from __future__ import annotations

from corral.contract.admin import NodeView
from corral.controller.runtime import change_feed
from corral.controller.runtime.change_feed import END, Change, ChangeSubscription


async def drain(subscription: ChangeSubscription) -> list[str]:
    seen = []
    while True:
        change = await subscription.next()
        seen.append(change.kind)
        if change.kind in ("ready", "end"):
            return seen


def views(count: int) -> dict[str, NodeView]:
    return {str(number): NodeView(id=str(number)) for number in range(count)}


async def test_a_subscription_starts_with_the_current_state() -> None:
    assert await drain(ChangeSubscription(views(3))) == ["node", "node", "node", "ready"]


async def test_a_subscriber_that_lags_starts_over_however_large_the_fleet_has_grown() -> None:
    subscription = ChangeSubscription(views(0))
    for _ in range(change_feed._QUEUE_SIZE + 1):
        subscription.put(Change("changed", {}))
    states = [subscription.lagged]
    subscription.start_with(views(3 * change_feed._QUEUE_SIZE))
    states.append(subscription.lagged)
    assert states == [True, False]
    assert await drain(subscription) == ["node"] * (3 * change_feed._QUEUE_SIZE) + ["ready"]


async def test_the_end_comes_at_once_whatever_still_waits() -> None:
    subscription = ChangeSubscription(views(500))
    subscription.end()
    assert await subscription.next() is END
