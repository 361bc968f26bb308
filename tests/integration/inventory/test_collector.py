"""A node is asked what it has, and something else is found out before its answer is written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from corral.contract.messages.backends import BackendList, NodeBackend
from corral.controller.orders.backend_calls import BackendCalls
from corral.store.tables import node_backends, nodes
from corral.store.tables.node_backends import Inventory
from tests.support.backend_fleet import Fleet
from tests.support.waiting import until

VLLM = (NodeBackend("vllm", False, False),)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], Awaitable[None]]], None]:
    """Every node says that it has nothing, and then the given happens before that is written."""

    def answer(meanwhile: Callable[[str], Awaitable[None]]) -> None:
        async def list_backends(_calls: object, node_id: str, *, accepts: bool) -> BackendList:
            await meanwhile(node_id)
            return BackendList()

        monkeypatch.setattr(BackendCalls, "list_backends", list_backends)

    return answer


async def test_what_was_written_since_stays(fleet: Fleet, answering: Any) -> None:
    await fleet.first.kill()
    node_id = await fleet.node("old-hand", protocol=0, boot_id="")

    async def is_found(node_id: str) -> None:
        async with fleet.store.write() as tx:
            await node_backends.put(
                tx, Inventory(node_id=node_id, boot_id="", seq=0, seen_at=await tx.now(), backends=VLLM)
            )

    answering(is_found)
    await fleet.first.backends.inventories.read_due()
    assert await fleet.inventory("old-hand") == ["vllm"]
    async with fleet.store.write() as tx:
        now = await tx.now()
        await node_backends.put_all(
            tx, [Inventory(node_id=node_id, boot_id="", seq=0, seen_at=now, backends=())], unless_since=now
        )
    assert await fleet.inventory("old-hand") == [], "nothing was written since"


async def test_a_worker_that_was_started_again_since_is_asked_anew(fleet: Fleet, answering: Any) -> None:
    """What the one before said may be from before its last work."""
    await fleet.first.kill()
    node_id = await fleet.node("barn", boot_id="boot-1")

    async def is_started_again(_node_id: str) -> None:
        await fleet.set_node("barn", boot_id="boot-2")

    answering(is_started_again)
    await fleet.first.backends.inventories.read_due()
    async with fleet.store.read() as tx:
        assert await node_backends.find(tx, node_id) is None


async def test_an_answer_does_not_wait_for_those_of_others(fleet: Fleet, answering: Any) -> None:
    await fleet.first.kill()
    quick, slow = [await fleet.node(name, protocol=0, boot_id="") for name in ("quick", "slow")]
    goes_on = asyncio.Event()

    async def takes_its_time(node_id: str) -> None:
        if node_id == slow:
            await goes_on.wait()

    answering(takes_its_time)

    async def known() -> set[str]:
        async with fleet.store.read() as tx:
            return {row.node_id for row in await node_backends.list_(tx)}

    async def is_quick_known() -> bool:
        return await known() == {quick}

    asking = asyncio.create_task(fleet.first.backends.inventories.read_due())
    await until(is_quick_known)
    goes_on.set()
    await asking
    assert await known() == {quick, slow}


async def test_a_worker_that_still_connects_to_the_bus_stays_healthy(fleet: Fleet) -> None:
    """Just approved, it is asked for its inventory before it listens. An old-hand that does not listen has no other way
    of saying that something is wrong."""
    await fleet.first.kill()
    await fleet.node("barn")
    await fleet.node("old-hand", protocol=0, boot_id="")
    await fleet.first.backends.inventories.read_due()
    async with fleet.store.read() as tx:
        statuses = {row.name: row.status for row in await nodes.list_outlines(tx)}
    assert statuses == {"barn": "healthy", "old-hand": "unhealthy"}
