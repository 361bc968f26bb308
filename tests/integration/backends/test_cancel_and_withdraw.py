"""What is taken back: what was asked before holds again, and is told; what was paused keeps its bytes."""

from __future__ import annotations

import asyncio

import pytest

from corral.kit.errors import Conflict
from tests.support.backend_fleet import Fleet
from tests.support.waiting import until


async def test_an_earlier_delete_that_holds_again_is_told_and_shown(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    away = await fleet.corral("away", joins=False, status="offline")
    await fleet.until_row(await fleet.install(), "barn", "success")
    deleted = await fleet.ask("delete", "vllm")
    await fleet.until_row(deleted, "barn", "success")
    again = await fleet.install()
    await fleet.until(again, "waiting")
    barn.script.hold = asyncio.Event()
    notes = await fleet.operations.cancel(again)
    assert notes == (f"vllm will be deleted again on barn, as asked earlier in operation {deleted[:8]}",)
    await until(lambda: barn.at_once)
    matrix = await fleet.first.backends.installed.matrix()
    (row,) = matrix.backends
    intent = row.nodes[barn.node_id].intent
    assert intent is not None
    assert (intent.kind, intent.operation) == ("delete", deleted)
    barn.script.hold.set()
    await until(lambda: not barn.installed)
    assert away.orders() == []


async def test_what_has_to_go_from_a_node_that_is_away_is_shown(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    await fleet.corral("away", joins=False, status="offline")
    await fleet.until_row(await fleet.install(), "barn", "success")
    deleted = await fleet.ask("delete", "vllm")
    await fleet.until_row(deleted, "barn", "success")
    again = await fleet.install()
    await fleet.until_row(again, "barn", "success")
    await until(lambda: _has(fleet, "barn"))
    await barn.stop()
    await fleet.set_node("barn", status="offline")
    assert await fleet.operations.cancel(again), "it is told though the node is away"
    (row,) = (await fleet.first.backends.installed.matrix()).backends
    intent = row.nodes[barn.node_id].intent
    assert intent is not None
    assert (intent.kind, intent.stage, intent.reason) == ("delete", "waiting", "node offline, will retry when healthy")
    assert intent.operation == deleted


async def test_an_upgrade_taken_back_says_where_the_old_version_returns(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    first = await fleet.install()
    await fleet.until(first, "done")
    fleet.catalogue.publish("vllm", "sha256:2")
    barn.script.hold = asyncio.Event()
    upgrade = await fleet.ask("upgrade", "vllm")
    await until(lambda: barn.at_once)
    (note,) = await fleet.operations.cancel(upgrade)
    assert note == f"vllm goes back to what it was on barn, as asked earlier in operation {first[:8]}"
    barn.script.hold.set()


async def test_nothing_to_tell_where_nothing_was_asked_before(fleet: Fleet) -> None:
    await fleet.corral("away", joins=False, status="offline")
    operation = await fleet.install()
    await fleet.until(operation, "waiting")
    assert await fleet.operations.cancel(operation) == ()


async def test_cancelled_on_every_node_one_by_one_is_cancelled(fleet: Fleet) -> None:
    for name in ("one", "two"):
        await fleet.corral(name, joins=False, status="offline")
    operation = await fleet.install()
    await fleet.until(operation, "waiting")
    await fleet.operations.cancel(operation, node="one")
    await fleet.operations.cancel(operation, node="two")
    view = await fleet.view(operation)
    assert (view.state, view.outcome) == ("done", "cancelled")


async def test_a_pause_tells_the_node_to_keep_what_came(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    paused = await fleet.install()
    await until(lambda: barn.at_once)
    await fleet.operations.pause(paused)
    await until(lambda: barn.at_once == 0)
    assert (await fleet.row(paused, "barn")).error == "paused: what was fetched is kept"
    cancels = [asked.body for asked in barn.asked if asked.subject == "backend.cancel"]
    assert cancels
    assert all(body == {"op_id": paused, "backend": "vllm", "keep": True} for body in cancels)


async def test_a_name_that_several_share_is_not_deleted_by_chance(fleet: Fleet) -> None:
    """One of them went, the other kept the name, and the operation failed for ever."""
    barn = await fleet.corral("barn")
    for name in ("one", "two"):
        barn.put(name, alias="shared", digest=f"sha256:{name}")
    await barn.beat()
    await until(lambda: _lists(fleet, "barn", ["one", "two"]))
    with pytest.raises(Conflict, match="shared is an alias of one, two: name one of them"):
        await fleet.ask("delete", "shared")
    await fleet.until(await fleet.ask("delete", "one"), "done")
    assert list(barn.installed) == ["two"]


async def _lists(fleet: Fleet, name: str, backends: list[str]) -> bool:
    return await fleet.inventory(name) == backends


async def _has(fleet: Fleet, name: str) -> bool:
    return await fleet.inventory(name) == ["vllm"]
