"""Rules, targets, intents, operations, inventories."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from corral.contract.messages.backends import NodeBackend
from corral.kit.errors import Conflict, NotFound
from corral.store import Store
from corral.store.records import BackendIntent
from corral.store.tables import (
    backend_intents,
    backend_rules,
    backend_targets,
    node_backends,
    nodes,
    operation_nodes,
    operations,
)
from tests.integration.store.rows import (
    NOON,
    a_node,
    a_rule,
    a_target,
    an_intent,
    an_inventory,
    an_op_row,
    an_operation,
)

MINUTE = timedelta(minutes=1)


async def keep_nodes(store: Store, count: int = 1) -> list[str]:
    made = [a_node() for _ in range(count)]
    async with store.write() as tx:
        for node in made:
            await nodes.insert(tx, node)
    return [node.id for node in made]


async def keep_intents(store: Store, intents: Iterable[BackendIntent]) -> None:
    async with store.write() as tx:
        await backend_intents.put(tx, intents)


async def test_rules_come_back_whole_and_in_their_order(store: Store) -> None:
    second = a_rule(generation=2, want="absent", target="", origin="load", excluded=("n1", "n2"))
    first = a_rule(generation=1, force=True, max_parallel="25%", scope_kind="selector", scope_value="tier=fast")
    other = a_rule(generation=3, backend="llama-cpp")
    async with store.write() as tx:
        for rule in (second, other, first):
            await backend_rules.insert(tx, rule)
    async with store.read() as tx:
        assert await backend_rules.list_live(tx) == [first, second, other]
        assert await backend_rules.list_live(tx, "vllm") == [first, second]
        assert await backend_rules.get(tx, 2) == second
        with pytest.raises(NotFound):
            await backend_rules.get(tx, 9)


async def test_a_withdrawn_rule_holds_no_more_and_is_forgotten_later(store: Store) -> None:
    async with store.write() as tx:
        await backend_rules.insert(tx, a_rule(generation=1, operation_id="op1"))
        await backend_targets.add(tx, [a_target()])
        assert await backend_rules.withdraw(tx, 1)
        assert not await backend_rules.withdraw(tx, 1)
        assert await backend_rules.list_live(tx) == []
        kept = await backend_rules.find_for_operation(tx, "op1")
        assert kept is not None
        assert kept.withdrawn_at is not None
        now = await tx.now()
        assert (await backend_rules.prune(tx, now - MINUTE), await backend_targets.prune(tx)) == (0, 0)
        assert (await backend_rules.prune(tx, now + MINUTE), await backend_targets.prune(tx)) == (1, 1)


async def test_a_node_is_excepted_from_a_rule(store: Store) -> None:
    async with store.write() as tx:
        await backend_rules.insert(tx, a_rule(generation=1))
        for node in ("n2", "n1", "n2"):
            await backend_rules.exclude(tx, 1, node)
        assert (await backend_rules.get(tx, 1)).excluded == ("n1", "n2")


async def test_what_was_found_out_first_stays(store: Store) -> None:
    first, later = a_target(), a_target(build=None, reason="gone")
    missing = a_target(platform="linux/arm64", build=None, reason="no linux/arm64 build")
    async with store.write() as tx:
        await backend_targets.add(tx, [first, missing])
        await backend_targets.add(tx, [later])
    async with store.read() as tx:
        assert await backend_targets.list_for(tx, ["t", "u"]) == [first, missing]
        assert await backend_targets.list_for(tx, []) == []
    async with store.write() as tx:
        assert await backend_targets.forget_missing(tx, "u") == 0
        assert await backend_targets.forget_missing(tx, "t") == 1
        assert await backend_targets.list_for(tx, ["t"]) == [first]
        await backend_targets.add(tx, [missing])
        assert await backend_targets.forget_missing(tx) == 1


async def test_intents_are_written_whole_and_read_by_node(store: Store) -> None:
    one, two = await keep_nodes(store, 2)
    full = an_intent(
        one,
        variant="cpu",
        digest="sha256:1",
        failures=3,
        reason="disk full",
        next_try_at=NOON,
        epoch=9,
        sent_at=NOON,
        accepted_at=NOON,
        boot_id="b",
        before="monday",
        running=True,
        answered=True,
        switch_failed=True,
    )
    other = an_intent(two, generation=8, operation_id="op8")
    await keep_intents(store, [an_intent(one), other])
    await keep_intents(store, [full])
    async with store.read() as tx:
        assert await backend_intents.list_(tx, [one]) == [full]
        assert {intent.node_id for intent in await backend_intents.list_(tx)} == {one, two}
        assert await backend_intents.list_generation(tx, 8) == [other]
    async with store.write() as tx:
        assert await backend_intents.lock_operation(tx, "op8") == [other]
        await nodes.delete(tx, two)
        assert await backend_intents.list_(tx) == [full], "a deleted node has nothing to do"
    with pytest.raises(Conflict):
        await keep_intents(store, [other])


async def test_when_the_next_try_is(store: Store) -> None:
    ids = await keep_nodes(store, 4)
    stages = ["waiting", "sent", "parked", "done"]
    await keep_intents(
        store,
        (an_intent(node, stage=stage, next_try_at=NOON + MINUTE) for node, stage in zip(ids, stages, strict=True)),
    )
    await keep_intents(store, [an_intent(ids[0], "other", next_try_at=NOON + 2 * MINUTE), an_intent(ids[1], "third")])
    async with store.read() as tx:
        assert await backend_intents.list_due(tx, NOON) == []
        assert set(await backend_intents.list_due(tx, NOON + MINUTE)) == set(ids[:2])
        assert await backend_intents.next_due(tx, NOON) == NOON + MINUTE
        assert await backend_intents.next_due(tx, NOON + MINUTE) == NOON + 2 * MINUTE
        assert await backend_intents.next_due(tx, NOON + 2 * MINUTE) is None


async def test_two_who_change_the_same_intents_do_it_one_after_the_other(store: Store, other: Store) -> None:
    ids = await keep_nodes(store, 5)
    await keep_intents(store, (an_intent(node, attempt=0) for node in ids))

    async def raise_all(chosen: Store, order: list[str]) -> None:
        for _ in range(10):
            async with chosen.write() as tx:
                found = await backend_intents.list_(tx, order)
                await backend_intents.put(tx, [msgspec.structs.replace(row, attempt=row.attempt + 1) for row in found])

    await asyncio.gather(raise_all(store, ids), raise_all(other, ids[::-1]))
    async with store.read() as tx:
        assert {row.attempt for row in await backend_intents.list_(tx)} == {20}


async def test_operations_open_shown_and_past(store: Store) -> None:
    running = an_operation(id="running")
    ended = an_operation(id="ended", finished_at=NOON, outcome="completed", created_at=NOON - MINUTE)
    given_up = an_operation(id="given-up", dismissed=True, outcome="failed", created_at=NOON - 2 * MINUTE)
    async with store.write() as tx:
        for operation in (ended, given_up, running):
            await operations.insert(tx, operation)
    async with store.read() as tx:
        assert await operations.list_open(tx) == [running, given_up]
        assert await operations.list_(tx, limit=2) == [running, ended]
        assert await operations.list_shown(tx, finished_since=NOON) == [running]
        assert await operations.list_shown(tx, finished_since=NOON - MINUTE) == [running, ended]
        assert {op.id for op in await operations.list_history(tx)} == {"ended", "given-up"}
        assert len(await operations.list_history(tx, limit=1)) == 1
        assert await operations.get(tx, "ended") == ended
        with pytest.raises(NotFound):
            await operations.get(tx, "nobody")
    changed = msgspec.structs.replace(running, cancelled_at=NOON, error="x")
    async with store.write() as tx:
        await operations.replace(tx, changed)
        assert await operations.list_for(tx, ["running", "nobody"]) == [changed]
        assert await operations.list_cancelled(tx, ["ended", "running"]) == ["running"]
        assert await operations.clear_history(tx) == 1
        assert [op.id for op in await operations.list_history(tx)] == ["given-up"]
        assert await operations.prune(tx, NOON + MINUTE) == 1


async def test_a_row_that_has_ended_stays_as_it_ended(store: Store) -> None:
    async with store.write() as tx:
        await operations.insert(tx, an_operation())
        await operation_nodes.put(tx, [an_op_row(), an_op_row(node_id="n2", node_name="annex")])
        came_from: dict[str, Any] = {"sources": {"barn": 2**40}, "bad_sources": ("attic",)}
        await operation_nodes.put(tx, [an_op_row(status="success", percentage=100.0, **came_from)])
        await operation_nodes.put(tx, [an_op_row(status="downloading", percentage=3.0)])
    async with store.read() as tx:
        annex, barn = await operation_nodes.list_(tx, "op")
        assert (annex.node_name, barn.status, barn.percentage) == ("annex", "success", 100.0)
        assert (barn.sources, barn.bad_sources) == ({"barn": 2**40}, ("attic",))
        assert await operation_nodes.list_open(tx) == [annex]
        assert await operation_nodes.list_open(tx, ["n1"]) == []
        assert await operation_nodes.list_for(tx, ["op", "none"]) == {"op": [annex, barn]}
        assert await operation_nodes.list_cancelled(tx, ["op"]) == {}
    async with store.write() as tx:
        await operation_nodes.put(tx, [msgspec.structs.replace(annex, status="cancelled", reason="enough")])
        assert await operation_nodes.list_cancelled(tx, ["op", "none"]) == {("op", "n2"): "enough"}
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await operation_nodes.put(tx, [an_op_row(operation_id="none")])


async def test_rows_go_with_their_operation_and_stay_without_their_node(store: Store) -> None:
    (node,) = await keep_nodes(store)
    async with store.write() as tx:
        await operations.insert(tx, an_operation())
        await operation_nodes.put(tx, [an_op_row(node_id=node)])
        assert await operation_nodes.count_for(tx, ["op", "none"]) == {"op": {"queued": 1}}
        assert await operation_nodes.list_orphans(tx) == []
        assert await operation_nodes.list_unfinished(tx, ["op", "none"]) == {"op"}
        await nodes.delete(tx, node)
        assert [row.node_id for row in await operation_nodes.list_orphans(tx)] == [node]
        assert len(await operation_nodes.list_(tx, "op")) == 1
        await operations.replace(tx, an_operation(finished_at=NOON))
        assert await operation_nodes.list_orphans(tx) == [], "one that has ended has no open rows"
        await operations.prune(tx, NOON + MINUTE)
        assert await operation_nodes.list_(tx, "op") == []


async def test_the_same_news_have_the_same_fingerprint(store: Store) -> None:
    one, two = await keep_nodes(store, 2)
    async with store.write() as tx:
        await node_backends.put(tx, an_inventory(one))
        assert await node_backends.list_fingerprints(tx, [one, two]) == {}, "an answer is not the node's own word"
        await node_backends.put(tx, an_inventory(one, reported_at=NOON))
        found = await node_backends.list_fingerprints(tx, [one, two])
    assert found == {one: node_backends.fingerprint_of(an_inventory(one))}
    assert found[one] != node_backends.fingerprint_of(an_inventory(one, backends=()))
    assert found[one] != node_backends.fingerprint_of(an_inventory(one, boot_id="b2"))


async def test_the_same_told_again_moves_the_time_and_wakes_nobody(store: Store) -> None:
    one, two = await keep_nodes(store, 2)
    async with store.write() as tx:
        await node_backends.put(tx, an_inventory(one, reported_at=NOON))
        await node_backends.put(tx, an_inventory(two))
        before = await node_backends.find(tx, one)
        later = NOON + MINUTE
        await node_backends.confirm(
            tx, [an_inventory(one, reported_at=later), an_inventory(two, seq=99, reported_at=later)]
        )
        after, other = await node_backends.find(tx, one), await node_backends.find(tx, two)
    assert before is not None
    assert after is not None
    assert (before.reported_at, after.reported_at, after.seen_at) == (NOON, later, before.seen_at)
    assert other is not None
    assert other.reported_at is None, "what it told is not what is on file"


async def test_which_nodes_may_be_at_an_order(store: Store) -> None:
    one, two, three = await keep_nodes(store, 3)
    async with store.write() as tx:
        await backend_intents.put(tx, [an_intent(one, stage="sent"), an_intent(two, stage="done")])
        await backend_intents.put(tx, [an_intent(three, stage="sent")])
        assert await backend_intents.list_sent_to(tx, [one, two]) == {one}


async def test_nodes_in_outline(store: Store) -> None:
    one, _ = await keep_nodes(store, 2)
    async with store.write() as tx:
        now = await tx.now()
        await nodes.update(tx, one, {"os": "linux", "arch": "arm64", "capability": "metal"}, expected=1)
        outlines = await nodes.list_outlines(tx, [one])
        assert [(node.id, node.platform, node.capability) for node in outlines] == [(one, "linux/arm64", "metal")]
        assert len(await nodes.list_outlines(tx)) == 2
        assert list(await nodes.list_changed(tx, now - MINUTE)) == [one]


async def test_an_inventory_replaces_the_one_before_unless_it_is_older(store: Store) -> None:
    (node,) = await keep_nodes(store)
    vllm = (NodeBackend("vllm", False, False),)
    async with store.write() as tx:
        assert await node_backends.find(tx, node) is None
        assert await node_backends.put(tx, an_inventory(node, seq=5))
        first = await node_backends.find(tx, node)
        assert first is not None
        assert (first.backends, first.orders) == (an_inventory(node).backends, an_inventory(node).orders)
        assert first.seen_at > NOON, "the database's clock, not the caller's"
        assert not await node_backends.put(tx, an_inventory(node, seq=4, backends=()))
        assert await node_backends.put(tx, an_inventory(node, seq=5, backends=()))
        assert await node_backends.put(tx, an_inventory(node, seq=0, backends=vllm)), "a worker that does not number"
        assert await node_backends.put(tx, an_inventory(node, seq=9, backends=()))
        assert await node_backends.put(tx, an_inventory(node, seq=2, boot_id="b2", backends=vllm)), "another machine"
        (kept,) = await node_backends.list_(tx, [node])
        assert kept.backends == vllm
        assert await node_backends.put(tx, an_inventory(node, seq=3, boot_id="b2", backends=vllm, reported_at=NOON))
        late = an_inventory(node, seq=9, boot_id="b1", backends=(), reported_at=NOON - MINUTE)
        assert not await node_backends.put(tx, late), "of the worker before, and written only now"
        assert await node_backends.list_boots(tx, [node]) == {node: "b2"}
        assert list(await node_backends.list_changed(tx, first.seen_at - MINUTE)) == [node]
        (kept,) = await node_backends.list_(tx, [node])
        assert await node_backends.list_changed(tx, kept.seen_at) == {}
        await nodes.delete(tx, node)
        assert await node_backends.list_(tx) == []
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await node_backends.put(tx, an_inventory(node))
