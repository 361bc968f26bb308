"""What a node view says about replicas and requests: counted from rows and ingress reports, or said to be unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.bus.local import LocalHub
from corral.contract.messages.replicas import NODE_LOAD, NodeLoad
from corral.controller.inventory.activity import ActivityTracker
from corral.controller.registry.nodes import NodeAdmin
from corral.controller.runtime.node_views import node_view
from corral.store.tables import replicas
from tests.integration.store.rows import a_node, a_replica
from tests.support.manual_clock import ManualClock
from tests.support.registry import open_registry
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until

LISTENED_S = 8.0


async def test_requests_and_replicas_are_counted_per_node(tmp_path: Path) -> None:
    clock = ManualClock()
    hub = LocalHub(clock)
    async with (
        open_registry(sqlite_url(tmp_path), clock=clock, hub=hub) as registry,
        hub.join("worker") as worker,
    ):
        quiet = ActivityTracker(registry.bus, clock)
        await quiet.listen()
        admin = NodeAdmin(registry.store, registry.changes, registry.issuer, registry.revocations, quiet.of_node)
        barn = (await registry.join("barn", pre_approved=True)).id
        await registry.join("byre", pre_approved=True)
        async with registry.store.write() as tx:
            rows = [a_replica(node_id=barn, model=name, stage="running") for name in ("a", "b")]
            await replicas.put(tx, [*rows, a_replica(node_id=barn, model="c", stage="ordered")])

        fresh = await admin.view("barn")
        assert (fresh.model_count, fresh.in_flight_count) == (2, 0)
        assert "has not listened" in fresh.in_flight_unknown, "a controller that has just come knows nothing"

        clock.advance(LISTENED_S)
        assert (await admin.view("barn")).in_flight_unknown == ""
        await worker.publish(NODE_LOAD, NodeLoad(boot_id="b", seq=1, in_flight={"p1": 2, "p2": 1}), node=barn)
        await until(lambda: quiet.of_node(barn)[0] == 3)
        views = {view.name: view for view in await admin.list_views()}
        assert (views["barn"].in_flight_count, views["barn"].in_flight_unknown) == (3, "")
        assert (views["byre"].in_flight_count, views["byre"].model_count) == (0, 0)
        [paged] = await admin.list_views(limit=1)
        assert (paged.name, paged.model_count, paged.in_flight_count) == ("barn", 2, 3)

        await worker.publish(NODE_LOAD, NodeLoad(boot_id="b", seq=2), node=barn)
        await until(lambda: quiet.of_node(barn)[0] == 0)
        assert (await admin.view("barn")).in_flight_unknown == ""


@pytest.mark.parametrize(
    ("columns", "count", "unknown"),
    [
        ({"status": "healthy"}, 0, ""),
        ({"status": "draining"}, 0, ""),
        ({"status": "offline"}, 0, "the node is offline"),
        ({"status": "unhealthy"}, 0, "the node is unhealthy"),
        ({"status": "healthy", "bus_down": True}, 0, "the node cannot reach the bus"),
        ({"status": "healthy", "bus_down": True}, 2, ""),  # reported a moment ago
        ({"status": "pending", "approved": False}, 0, ""),
    ],
)
def test_a_node_that_cannot_report_is_not_said_to_be_idle(columns: dict[str, object], count: int, unknown: str) -> None:
    view = node_view(a_node(**{"approved": True} | columns), {}, 0, (count, True))
    assert (view.in_flight_count, view.in_flight_unknown) == (count, unknown)
