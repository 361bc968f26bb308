"""Changes of the status of nodes and definitions of models: the last few of each, on both databases."""

from __future__ import annotations

from datetime import timedelta

from corral.store import Store
from corral.store.tables import model_revisions, models, node_events
from corral.store.tables.model_revisions import MAX_OF_A_MODEL, ModelRevision
from corral.store.tables.node_events import MAX_OF_A_NODE, StatusChange
from tests.integration.store.rows import NOON, a_model


async def test_a_node_that_flaps_keeps_a_short_history(store: Store) -> None:
    async with store.write() as tx:
        await node_events.add(tx, StatusChange("other", NOON, "healthy"))
        for number in range(MAX_OF_A_NODE + 7):
            at = NOON + timedelta(minutes=number)
            await node_events.add(tx, StatusChange("n", at, "offline" if number % 2 else "healthy", f"reason {number}"))
        await node_events.add(tx, StatusChange("n", at, "again", "the same moment"))
        kept = await node_events.list_(tx, "n")
        assert [each.reason for each in kept] == [f"reason {n}" for n in range(MAX_OF_A_NODE + 6, 6, -1)]
        assert len(await node_events.list_(tx, "other")) == 1
        assert await node_events.prune(tx, NOON + timedelta(minutes=10)) == 4
        assert not await node_events.list_(tx, "other")


async def test_the_last_definitions_of_a_model_go_with_it(store: Store) -> None:
    async with store.write() as tx:
        await models.put(tx, a_model("m"))
        for number in range(1, MAX_OF_A_MODEL + 4):
            row = ModelRevision(model="m", row_version=number, at=NOON, revision="r", definition={"n": number})
            await model_revisions.add(tx, row)
            await model_revisions.add(tx, row)
        kept = await model_revisions.list_(tx, "m")
        assert [each.definition["n"] for each in kept] == list(range(MAX_OF_A_MODEL + 3, 3, -1))
        await models.delete(tx, "m")
        assert not await model_revisions.list_(tx, "m")
