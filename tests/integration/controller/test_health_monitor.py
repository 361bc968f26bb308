"""The health loop at its seams: what it decided a moment ago may be wrong by the time it writes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from corral.bus.local import LocalHub
from corral.controller.health.classify import Guard
from corral.controller.health.monitor import HealthMonitor
from corral.controller.health.observation_window import ObservationWindow
from corral.controller.runtime.leadership import Leadership
from corral.controller.runtime.presence import Presence
from corral.kit.clock import SystemClock
from corral.store.engine import leases
from corral.store.tables import nodes
from corral.store.tables.heartbeats import Heartbeat
from tests.support.registry import Registry, open_registry
from tests.support.sqlite import sqlite_url

SILENT_S = 600.0


class OpenEars(ObservationWindow):
    """Has been listening for as long as the test likes; tells the test when it is asked."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry.bus, registry.clock, longest_gap_s=30)
        self.told_s = 10_000.0
        self.asked: Callable[[int], None] = lambda _: None
        self.times = 0

    def seconds(self, at: datetime) -> float:
        self.times += 1
        self.asked(self.times)
        return self.told_s


def monitor(registry: Registry, ears: ObservationWindow) -> HealthMonitor:
    return HealthMonitor(
        registry.store,
        registry.changes,
        ears,
        registry.leadership,
        registry.clock,
        interval_s=5,
        stale_after_s=60,
        guard=Guard(),
        live_for_s=60,
    )


async def silent_node(registry: Registry) -> str:
    node_id = (await registry.join("barn", pre_approved=True)).id
    async with registry.store.write() as tx:
        long_ago = round(SILENT_S * 1_000_000)
        await tx.execute("UPDATE nodes SET last_heartbeat = last_heartbeat - :span", {"span": long_ago})
    return node_id


async def status(registry: Registry, node_id: str) -> str:
    async with registry.store.read() as tx:
        return (await nodes.get(tx, node_id)).status


async def test_a_silent_node_goes_offline_and_comes_back(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        node_id = await silent_node(registry)
        health = monitor(registry, OpenEars(registry))
        await health.run_once()
        assert await status(registry, node_id) == "offline"
        async with registry.store.write() as tx:
            await nodes.record_heartbeats(tx, [Heartbeat(node_id=node_id)])
        await health.run_once()
        assert await status(registry, node_id) == "healthy"


async def test_nodes_that_return_one_by_one_from_an_outage_are_not_taken_offline(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        node_ids = [(await registry.join(f"barn{n}", pre_approved=True)).id for n in range(4)]
        async with registry.store.write() as tx:
            long_ago = round(SILENT_S * 1_000_000)
            await tx.execute("UPDATE nodes SET last_heartbeat = last_heartbeat - :span", {"span": long_ago})
        health = monitor(registry, OpenEars(registry))
        await health.run_once()
        assert health.held == 4
        async with registry.store.write() as tx:
            await nodes.record_heartbeats(tx, [Heartbeat(node_id=node_id) for node_id in node_ids[1:]])
        await health.run_once()
        assert [await status(registry, node_id) for node_id in node_ids] == ["unhealthy", *["healthy"] * 3]
        assert health.held == 1


async def test_a_controller_stopped_between_verdict_and_deed_does_nothing(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        node_id = await silent_node(registry)
        ears = OpenEars(registry)

        def fall_asleep(times: int) -> None:
            ears.told_s = 10_000.0 if times == 1 else 0.0

        ears.asked = fall_asleep
        await monitor(registry, ears).run_once()
        assert ears.times == 2
        assert await status(registry, node_id) == "healthy"


async def test_what_another_controller_heard_meanwhile_counts(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        node_id = await silent_node(registry)
        health = monitor(registry, OpenEars(registry))
        apply = registry.changes.apply

        async def later(*arguments: object, **options: object) -> object:
            async with registry.store.write() as tx:
                await nodes.record_heartbeats(tx, [Heartbeat(node_id=node_id)])
            return await apply(*arguments, **options)  # type: ignore[arg-type]

        registry.changes.apply = later  # type: ignore[method-assign, assignment]
        await health.run_once()
        assert await status(registry, node_id) == "healthy"


async def test_a_leader_that_was_replaced_meanwhile_writes_nothing(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        node_id = await silent_node(registry)
        health = monitor(registry, OpenEars(registry))
        apply = registry.changes.apply

        async def later(*arguments: object, **options: object) -> object:
            async with registry.store.write() as tx:  # the lease ran out while we slept, and another took it
                await tx.execute("UPDATE leases SET expires_at = 0")
                assert await leases.claim_lease(tx, "health", "another", 60)
            return await apply(*arguments, **options)  # type: ignore[arg-type]

        registry.changes.apply = later  # type: ignore[method-assign, assignment]
        await health.run_once()
        assert await status(registry, node_id) == "healthy"


async def test_a_leader_that_hears_nothing_makes_way_for_one_that_does(tmp_path: Path) -> None:
    hub = LocalHub(SystemClock())
    async with open_registry(sqlite_url(tmp_path), hub=hub) as registry:
        health = monitor(registry, ObservationWindow(registry.bus, registry.clock, longest_gap_s=30))
        other = Leadership(registry.store, "other", ttl_s=60)
        presence = [Presence(registry.store, name, registry.clock, interval_s=5) for name in ("one", "two")]
        await presence[0].tell()
        await health.run_once()
        hub.cut("controller")
        await health.run_once()
        assert not await other.lead("health"), "alone it stays: nodes that are back over HTTP are still let in"
        await presence[1].tell()
        await health.run_once()
        assert await other.lead("health")
