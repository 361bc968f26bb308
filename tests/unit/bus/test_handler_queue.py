from __future__ import annotations

import asyncio

from corral.bus.handler_queue import Delivery, HandlerQueue, QueueLimits
from tests.support.waiting import DEADLINE_S


class Counted(Delivery):
    settled = 0

    def settle(self) -> None:
        Counted.settled += 1


def deliveries(count: int) -> list[Delivery]:
    Counted.settled = 0
    return [Counted("s", str(number).encode()) for number in range(count)]


async def rest() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_every_message_is_settled_exactly_once_whatever_becomes_of_it() -> None:
    release = asyncio.Event()

    async def hold(delivery: Delivery) -> None:
        await release.wait()
        raise RuntimeError

    queue = HandlerQueue("s", hold, concurrency=1, limits=QueueLimits(messages=3))
    offered = deliveries(10)
    for delivery in offered:
        queue.offer(delivery)
    release.set()
    await rest()
    assert Counted.settled == 10
    assert queue.dropped == 7


async def test_an_offer_in_the_moment_a_runner_ends_is_not_stuck() -> None:
    handled: list[bytes] = []

    async def handle(delivery: Delivery) -> None:
        handled.append(delivery.payload)

    queue = HandlerQueue("s", handle, concurrency=1, limits=QueueLimits())
    for delivery in deliveries(20):
        queue.offer(delivery)
        await asyncio.sleep(0)  # one step: the runner may be at any point of its last one
    await rest()
    assert handled == [str(number).encode() for number in range(20)]


async def test_closing_forgets_what_waits_but_not_what_runs() -> None:
    release = asyncio.Event()
    handled: list[bytes] = []

    async def hold(delivery: Delivery) -> None:
        await release.wait()
        handled.append(delivery.payload)

    queue = HandlerQueue("s", hold, concurrency=1, limits=QueueLimits())
    for delivery in deliveries(3):
        queue.offer(delivery)
    await rest()
    queue.close()
    queue.offer(deliveries(1)[0])
    release.set()
    await rest()
    assert handled == [b"0"]


async def test_stopping_works_off_what_waits_within_the_grace() -> None:
    handled: list[bytes] = []

    async def handle(delivery: Delivery) -> None:
        await asyncio.sleep(0)
        handled.append(delivery.payload)

    queue = HandlerQueue("s", handle, concurrency=2, limits=QueueLimits())
    for delivery in deliveries(10):
        queue.offer(delivery)
    await queue.stop(DEADLINE_S)
    assert len(handled) == 10
    assert Counted.settled == 10


async def test_stopping_ends_what_does_not_end_itself() -> None:
    cancelled: list[str] = []

    async def endless(delivery: Delivery) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(delivery.subject)
            raise

    queue = HandlerQueue("s", endless, concurrency=2, limits=QueueLimits())
    for delivery in deliveries(5):
        queue.offer(delivery)
    await rest()
    await queue.stop(0.01)
    assert len(cancelled) == 2
    assert Counted.settled == 5


async def test_a_handler_that_never_waits_leaves_room_for_others() -> None:
    handled = 0

    async def greedy(delivery: Delivery) -> None:
        nonlocal handled
        handled += 1

    queue = HandlerQueue("s", greedy, concurrency=1, limits=QueueLimits(messages=10_000))
    for delivery in deliveries(5_000):
        queue.offer(delivery)
    await asyncio.sleep(0)
    assert 0 < handled < 5_000
    await queue.stop(DEADLINE_S)
    assert handled == 5_000
