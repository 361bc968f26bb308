"""What goes when a node is deleted, and what goes when it is long over; on both databases."""

from __future__ import annotations

from datetime import timedelta

import msgspec

from corral.controller.runtime.housekeeping import Housekeeping
from corral.controller.settings.nodes import RuntimeSettings
from corral.store.tables import (
    backend_intents,
    backend_rules,
    backend_targets,
    node_backends,
    nodes,
    operation_nodes,
    operations,
)
from tests.support.backend_fleet import Fleet
from tests.support.waiting import until


async def test_deleting_a_node_removes_its_intents_and_inventories_and_ends_its_rows(fleet: Fleet) -> None:
    barn, shed = await fleet.corral("barn"), await fleet.corral("shed")
    shed.script.failures = [{"error": "no space", "phase": "downloading"}]
    operation = await fleet.install()
    await fleet.until(operation, "failing")
    async with fleet.store.write() as tx:
        await nodes.delete(tx, shed.node_id)
    fleet.first.backends.reconciler.reconcile_changed()

    async def ended() -> bool:
        return (await fleet.row(operation, "shed")).status == "withdrawn"

    await until(ended)
    assert (await fleet.row(operation, "shed")).error == "the node was deleted"
    assert (await fleet.until(operation, "done")).outcome == "completed"
    async with fleet.store.read() as tx:
        assert {row.node_id for row in await backend_intents.list_(tx)} == {barn.node_id}
        assert {row.node_id for row in await node_backends.list_(tx)} == {barn.node_id}


async def test_a_heartbeat_of_a_deleted_node_brings_nothing_back(fleet: Fleet) -> None:
    barn, shed = await fleet.corral("barn"), await fleet.corral("shed")
    async with fleet.store.write() as tx:
        await nodes.delete(tx, shed.node_id)
    shed.put("piper")
    await shed.beat()
    barn.put("vllm")
    await barn.beat()

    async def heard() -> bool:
        return await fleet.inventory("barn") == ["vllm"]

    await until(heard)
    async with fleet.store.read() as tx:
        assert {row.node_id for row in await node_backends.list_(tx)} == {barn.node_id}


async def test_operations_of_long_ago_are_forgotten_and_what_they_asked_for_holds(fleet: Fleet) -> None:
    barn = await fleet.corral("barn")
    old = await fleet.install()
    await fleet.until(old, "done")
    withdrawn = await fleet.install("llama-cpp", node="barn")
    await fleet.until(withdrawn, "done")
    barn.script.failures = [{"error": "no space", "phase": "downloading"}]
    failing = await fleet.install("llama-cpp", force=True, node="barn")
    await fleet.until(failing, "failing")
    async with fleet.store.write() as tx:
        long_ago = await tx.now() - timedelta(days=40)
        rule = await backend_rules.find_for_operation(tx, withdrawn)
        assert rule is not None
        await tx.execute(
            backend_rules.table.update()
            .where(backend_rules.table.c.generation == rule.generation)
            .values(withdrawn_at=long_ago)
        )
        for operation in await operations.list_(tx, limit=9):
            finished = long_ago if operation.finished_at is not None else None
            await operations.replace(tx, msgspec.structs.replace(operation, created_at=long_ago, finished_at=finished))
    await _housekeeping(fleet).tidy()
    async with fleet.store.read() as tx:
        kept = [operation.id for operation in await operations.list_(tx, limit=9)]
        live = {one.operation_id: one for one in await backend_rules.list_live(tx)}
        targets = await backend_targets.list_for(tx, [rule.target, *(one.target for one in live.values())])
        rows = await operation_nodes.list_for(tx, [old, withdrawn, failing])
    assert kept == [failing], "what has not ended is never forgotten"
    assert set(rows) == {failing}, "rows go with their operation"
    assert set(live) == {old, failing}, "a rule that holds outlives its operation"
    assert {target.id for target in targets} == {one.target for one in live.values()}, "and so does what it means"
    later = await fleet.corral("later")
    await until(lambda: "vllm" in later.installed)


async def test_what_ended_lately_is_kept(fleet: Fleet) -> None:
    await fleet.corral("barn")
    operation = await fleet.install()
    await fleet.until(operation, "done")
    await _housekeeping(fleet).tidy()
    assert (await fleet.view(operation)).outcome == "completed"


def _housekeeping(fleet: Fleet) -> Housekeeping:
    return Housekeeping(fleet.store, fleet.first.leadership, fleet.clock, RuntimeSettings())
