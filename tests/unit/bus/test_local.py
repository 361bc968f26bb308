"""The twin's misbehaviour: by the seed, by the given clock, and by nothing else."""

from __future__ import annotations

import asyncio
import heapq
from datetime import UTC, datetime, timedelta

import pytest

from corral.bus.api import Tokens
from corral.bus.local import Faults, LocalHub
from corral.contract.messages.backends import INSTALL_BACKEND, InstallBackend, InstallReply
from corral.contract.messages.hints import VIEW_CHANGED, ViewChanged
from corral.kit.errors import Conflict, OutcomeUnknown


class JumpingClock:
    """Time passes only when told to, and then at once."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self._now_s)

    def monotonic(self) -> float:
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        self._count += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, self._count, done))
        await done

    async def advance(self, seconds: float) -> None:
        until = self._now_s + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            self._now_s, _, done = heapq.heappop(self._sleepers)
            if not done.done():
                done.set_result(None)
            await settle()
        self._now_s = until


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def run(seed: int, faults: Faults, count: int = 200) -> list[tuple[float, int]]:
    """When which message was heard."""
    clock = JumpingClock()
    hub = LocalHub(clock, seed=seed, faults=faults)
    heard: list[tuple[float, int]] = []

    async def hear(message: ViewChanged, tokens: Tokens) -> None:
        heard.append((clock.monotonic(), message.row_version))

    async with hub.join("a") as teller, hub.join("b") as listener:
        await listener.subscribe(VIEW_CHANGED, hear)
        for number in range(count):
            await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes", row_version=number))
            await clock.advance(0.01)
        await clock.advance(60)
    return heard


async def test_without_faults_everything_arrives_once_in_order_and_at_once() -> None:
    heard = await run(1, Faults())
    assert [number for _, number in heard] == list(range(200))
    assert [when for when, _ in heard] == pytest.approx([0.01 * number for number in range(200)])


async def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    faults = Faults(drop=0.1, duplicate=0.1, delay_s=(0.0, 0.5))
    first, again, other = await run(7, faults), await run(7, faults), await run(8, faults)
    assert first == again
    assert first != other


async def test_drops_lose_messages_and_nothing_else() -> None:
    numbers = [number for _, number in await run(3, Faults(drop=0.3))]
    assert 100 < len(numbers) < 180
    assert numbers == sorted(set(numbers))


async def test_doubles_repeat_messages() -> None:
    numbers = [number for _, number in await run(3, Faults(duplicate=0.3))]
    assert sorted(set(numbers)) == list(range(200))
    assert 220 < len(numbers) < 300


async def test_delays_keep_the_order_of_one_connection() -> None:
    heard = await run(3, Faults(delay_s=(0.1, 2.0)))
    assert [number for _, number in heard] == list(range(200))
    assert all(when >= 0.01 * number + 0.1 - 1e-9 for when, number in heard)
    assert max(when - 0.01 * number for when, number in heard) <= 2.0 + 1e-9


async def test_a_call_times_out_by_the_given_clock() -> None:
    clock = JumpingClock()
    hub = LocalHub(clock)

    async def never(request: InstallBackend, tokens: Tokens) -> InstallReply:
        await clock.sleep(1_000_000)
        return InstallReply()

    async with hub.join("c") as controller, hub.join("n") as node:
        await node.serve(INSTALL_BACKEND, never, node="n")
        order = asyncio.create_task(
            controller.call(INSTALL_BACKEND, InstallBackend(backend="x"), timeout_s=900, node="n")
        )
        await clock.advance(899)
        assert not order.done()
        await clock.advance(2)
        assert order.done()
        with pytest.raises(OutcomeUnknown, match="within 900 s"):
            await order


async def test_what_is_under_way_to_one_who_is_cut_off_is_lost() -> None:
    clock = JumpingClock()
    hub = LocalHub(clock, faults=Faults(delay_s=(1.0, 1.0)))
    heard: list[int] = []

    async def hear(message: ViewChanged, tokens: Tokens) -> None:
        heard.append(message.row_version)

    async with hub.join("a") as teller, hub.join("b") as listener:
        await listener.subscribe(VIEW_CHANGED, hear)
        await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes", row_version=1))
        await clock.advance(0.5)
        hub.cut("b")
        hub.heal("b")
        await teller.publish(VIEW_CHANGED, ViewChanged(kind="nodes", row_version=2))
        await clock.advance(5)
    assert heard == [2]


async def test_a_name_is_free_again_when_its_owner_has_left() -> None:
    hub = LocalHub(JumpingClock())
    async with hub.join("n"):
        with pytest.raises(Conflict):
            hub.join("n")
    async with hub.join("n") as again:
        assert again.connected
