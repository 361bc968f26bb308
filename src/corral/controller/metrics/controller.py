"""The metrics of one controller. Gauges that need the database are read at each scrape."""

from __future__ import annotations

import asyncio
from collections import Counter

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client import Counter as PromCounter

from corral import __version__
from corral.bus.api import Bus
from corral.contract.messages.nodes import NodeStatus
from corral.controller.health.monitor import HealthMonitor
from corral.controller.metrics.fleet import FleetMetrics
from corral.controller.metrics.replicas import ReplicaMetrics
from corral.controller.metrics.requests import RequestMetrics
from corral.controller.registry.heartbeats import Heartbeats
from corral.kit.errors import CorralError
from corral.store.engine.transactions import Store
from corral.store.tables import nodes


class ControllerMetrics:
    def __init__(
        self,
        store: Store,
        bus: Bus,
        heartbeats: Heartbeats,
        health: HealthMonitor,
        requests: RequestMetrics,
        replicas: ReplicaMetrics,
        fleet: FleetMetrics,
    ) -> None:
        self._store = store
        self._bus = bus
        self._heartbeats = heartbeats
        self._health = health
        self._requests = requests
        self._fleet = fleet
        self._counted = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self._nodes = Gauge("corral_nodes", "Nodes by status", ["status"], registry=self.registry)
        self._held = Gauge("corral_nodes_held", "Silent nodes the guard leaves alone", registry=self.registry)
        self._bus_up = Gauge("corral_bus_connected", "1 while the bus is connected", registry=self.registry)
        self._store_up = Gauge("corral_store_reachable", "1 while the database answers", registry=self.registry)
        self._beats = PromCounter("corral_heartbeats", "Heartbeats heard by this controller", registry=self.registry)
        build = Gauge("corral_build_info", "Version of this controller", ["version"], registry=self.registry)
        build.labels(__version__).set(1)
        self.registry.register(replicas)
        self.registry.register(fleet)
        self.request_registry = CollectorRegistry(auto_describe=False)
        self.request_registry.register(requests)

    async def render(self) -> bytes:
        await self._refresh()
        # At its limits this text has 25,000 lines: 150 ms, in which the loop must go on.
        by_request = await asyncio.to_thread(generate_latest, self.request_registry)
        return generate_latest(self.registry) + by_request

    async def _refresh(self) -> None:
        self._bus_up.set(self._bus.connected)
        self._held.set(self._health.held)
        self._beats.inc(self._heartbeats.received - self._counted)
        self._counted = self._heartbeats.received
        try:
            async with self._store.read() as tx:
                by_status = Counter(row.status for row in await nodes.list_pulses(tx))
                await self._fleet.refresh(tx)
            await self._requests.read_names()
        except CorralError:
            self._store_up.set(0)
            return
        self._store_up.set(1)
        for status in NodeStatus:
            self._nodes.labels(status.value).set(by_status[status.value])
