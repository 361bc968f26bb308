"""Controllers that install backends, in this process, on one database and the bus's twin, with scripted workers.

async with open_fleet(sqlite_url(tmp_path)) as fleet:
    barn = await fleet.corral("barn")
    done = await fleet.install("vllm")
    await fleet.until(done, "done")
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from corral.bus.api import Bus
from corral.bus.local import LocalHub
from corral.contract.admin import OperationNodeView, OperationView
from corral.controller.health.classify import Guard
from corral.controller.health.monitor import HealthMonitor
from corral.controller.health.observation_window import ObservationWindow
from corral.controller.operations.requests import OperationKind, OperationRequest, parse_request
from corral.controller.registry.changes import NodeChanges
from corral.controller.registry.heartbeats import Heartbeats
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.controller.settings.backends import BackendSettings
from corral.controller.wiring.backends import BackendPace, Backends
from corral.kit.clock import Clock, SystemClock
from corral.kit.settings import Seconds
from corral.store import Store, open_store
from corral.store.records import BackendIntent, BackendRequest, Scope, ScopeKind
from corral.store.tables import backend_intents, node_backends, node_labels, nodes
from corral.store.tables.nodes import Node
from tests.support.buses import Yard
from tests.support.scripted_catalogue import ScriptedCatalogue
from tests.support.scripted_worker import CorralWorker, LocalAIWorker, ScriptedWorker
from tests.support.waiting import DEADLINE_S, until

QUICK = BackendSettings(
    backend_install_timeout_s=Seconds(5),
    backend_upgrade_timeout_s=Seconds(5),
    backend_delete_timeout_s=Seconds(2),
    backend_accept_timeout_s=Seconds(5),
    backend_list_timeout_s=Seconds(5),
    reconcile_interval_s=Seconds(0.5),
    inventory_interval_s=Seconds(0.2),
    progress_interval_s=Seconds(0.02),
    progress_write_interval_s=Seconds(0.05),
    upgrade_check_interval_s=Seconds(3600),
)
QUICK_PACE = BackendPace(
    renew_s=0.1,
    inventory_flush_s=0.02,
    silent_poll_s=0.05,
    upgrade_rest_s=0.05,
    upgrade_poll_s=0.2,
    rest_s=0.002,
    second_try_s=0.02,
)


@dataclass
class Controller:
    name: str
    store: Store
    bus: Bus
    feed: ChangeFeed
    leadership: Leadership
    changes: NodeChanges
    heartbeats: Heartbeats
    health: HealthMonitor
    backends: Backends
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        parts = (self.feed, self.heartbeats, self.health, *self.backends.parts)
        self.tasks = [asyncio.create_task(part.run(), name=f"{self.name} {part.name}") for part in parts]

    async def kill(self) -> None:
        """As `kill -9` does it: nothing is released, nothing is said."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks = []


class Fleet:
    worker_kind: type[CorralWorker] = CorralWorker

    def __init__(
        self, store: Store, hub: LocalHub, clock: Clock, stack: contextlib.AsyncExitStack, yard: Yard | None = None
    ) -> None:
        """`yard`: where they meet instead of in the hub."""
        self.store = store
        self.hub = hub
        self._yard = yard
        self.clock = clock
        self.catalogue = ScriptedCatalogue()
        self.controllers: list[Controller] = []
        self.workers: dict[str, ScriptedWorker] = {}
        self._stack = stack

    @property
    def first(self) -> Controller:
        return self.controllers[0]

    @property
    def operations(self) -> Any:
        return self.first.backends.operations

    async def controller(
        self,
        name: str = "c1",
        *,
        settings: BackendSettings = QUICK,
        pace: BackendPace = QUICK_PACE,
        start: bool = True,
        lease_s: float = 1.0,
        url: str = "",
    ) -> Controller:
        store = await self._stack.enter_async_context(open_store(url)) if url else self.store
        bus = await self._bus(name)
        feed = ChangeFeed(store, bus, self.clock, interval_s=0.1)
        changes = NodeChanges(store, feed)
        leadership = Leadership(store, f"{name}/{uuid.uuid4().hex[:6]}", ttl_s=lease_s)
        backends = Backends(store, bus, self.catalogue, leadership, changes, feed, self.clock, settings, pace)
        listening = ObservationWindow(bus, self.clock, longest_gap_s=3600)
        health = HealthMonitor(
            store,
            changes,
            listening,
            leadership,
            self.clock,
            interval_s=0.1,
            stale_after_s=3600,
            guard=Guard(40, 3),
            live_for_s=15,
        )
        heartbeats = Heartbeats(
            store,
            bus,
            self.clock,
            flush_s=0.02,
            on_recorded=listening.recorded,
            on_not_recorded=listening.not_recorded,
            on_return=health.wake.set,
            on_heartbeat=backends.inventories.on_heartbeat,
        )
        made = Controller(name, store, bus, feed, leadership, changes, heartbeats, health, backends)
        self.controllers.append(made)
        self._stack.push_async_callback(made.kill)
        if start:
            made.start()
        return made

    async def node(self, name: str, **known: Any) -> str:
        """A node as the registry would have left it."""
        labels = known.pop("labels", {})
        async with self.store.write() as tx:
            now = await tx.now()
            usual: dict[str, Any] = {
                "id": f"id-of-{name}",
                "name": name,
                "created_at": now,
                "updated_at": now,
                "status_changed_at": now,
                "last_heartbeat": now,
                "status": "healthy",
                "approved": True,
                "protocol": 1,
                "capability": "default",
                "os": "linux",
                "arch": "amd64",
                "boot_id": "boot-1",
                "total_disk": 10**12,
                "available_disk": 10**11,
            }
            node = Node(**(usual | known))
            await nodes.insert(tx, node)
            await node_labels.merge(tx, node.id, labels, origin="admin")
        return node.id

    async def machine(self, name: str) -> CorralWorker:
        """A Corral worker that nobody knows of, and that does not listen yet."""
        worker = self.worker_kind(await self._bus(f"worker-{name}"), f"id-of-{name}")
        self.workers[name] = worker
        self._stack.push_async_callback(worker.stop)
        return worker

    async def corral(self, name: str, *, joins: bool = True, **known: Any) -> CorralWorker:
        """A node with a Corral worker that has told its inventory."""
        worker = await self.machine(name)
        if joins:  # it listens before anybody knows of it, or it would be found silent
            await worker.start()
        await self.node(name, **known)
        if joins:
            await worker.beat()
        return worker

    async def localai(self, name: str, *, upgrades: bool = True, **known: Any) -> LocalAIWorker:
        worker = LocalAIWorker(await self._bus(f"worker-{name}"), f"id-of-{name}", upgrades=upgrades)
        self.workers[name] = worker
        self._stack.push_async_callback(worker.stop)
        await worker.start()  # before anybody knows of it: it has no heartbeat with which to correct a first impression
        await self.node(name, **({"protocol": 0, "auth": "shared", "os": "", "arch": "", "boot_id": ""} | known))
        return worker

    async def until_heard(self, name: str) -> None:
        """Its heartbeat is on file: one that still waits to be written would speak for the node later."""

        async def heard() -> bool:
            async with self.store.read() as tx:
                node = await nodes.find_by_name(tx, name)
            return node is not None and node.last_heartbeat is not None and node.last_heartbeat > node.created_at

        await until(heard)

    async def set_node(self, name: str, **columns: Any) -> None:
        async with self.store.write() as tx:
            node = await nodes.find_by_name(tx, name)
            assert node is not None
            if "status" in columns:  # else a heartbeat from before would overturn it
                columns["status_changed_at"] = await tx.now()
            await nodes.update(tx, node.id, columns, expected=node.row_version)
        for controller in self.controllers:
            controller.backends.reconciler.reconcile_changed()

    async def ask(self, kind: str, backend: str, on: Controller | None = None, **more: Any) -> str:
        controller = on or self.first
        accepted = await controller.backends.operations.accept(operation_request(kind, backend, **more))
        return accepted.operation_id

    async def install(self, backend: str = "vllm", **more: Any) -> str:
        return await self.ask("install", backend, **more)

    async def view(self, operation: str, on: Controller | None = None) -> OperationView:
        found: OperationView = await (on or self.first).backends.operations.view(operation)
        return found

    async def row(self, operation: str, name: str) -> OperationNodeView:
        return next(row for row in (await self.view(operation)).nodes if row.node_name == name)

    async def intent(self, name: str, backend: str = "vllm") -> BackendIntent:
        async with self.store.read() as tx:
            found = await backend_intents.list_(tx, [f"id-of-{name}"])
        return next(row for row in found if row.backend == backend)

    async def time_passes(self, name: str, backend: str = "vllm") -> None:
        """The next try is due."""
        async with self.store.write() as tx:
            now = await tx.now()
            rows = [row for row in await backend_intents.list_(tx, [f"id-of-{name}"]) if row.backend == backend]
            due = [row for row in rows if row.next_try_at is not None]
            await backend_intents.put(tx, [msgspec.structs.replace(row, next_try_at=now) for row in due])

    async def until(self, operation: str, state: str, deadline_s: float = DEADLINE_S) -> OperationView:
        async def reached() -> bool:
            return (await self.view(operation)).state == state

        try:
            await until(reached, timeout_s=deadline_s)
        except AssertionError:
            raise AssertionError(f"not {state} but {await self.view(operation)}") from None
        return await self.view(operation)

    async def until_row(self, operation: str, name: str, status: str, deadline_s: float = DEADLINE_S) -> Any:
        async def reached() -> bool:
            return any(row.status == status for row in (await self.view(operation)).nodes if row.node_name == name)

        try:
            await until(reached, timeout_s=deadline_s)
        except AssertionError:
            raise AssertionError(f"{name} is not {status}: {await self.view(operation)}") from None
        return await self.row(operation, name)

    async def quiet(self, passes: int = 3) -> None:
        """The reconciler has looked at everybody so often, and nothing is on its way."""
        for _ in range(passes):
            for controller in self.controllers:
                if controller.tasks:
                    await controller.backends.reconciler.reconcile_once()

    async def inventory(self, name: str) -> list[str]:
        async with self.store.read() as tx:
            found = await node_backends.find(tx, f"id-of-{name}")
        return sorted(row.name for row in found.backends) if found else []

    async def _bus(self, name: str) -> Bus:
        if self._yard is not None:
            return await self._yard.join(name)
        bus = self.hub.join(name)
        self._stack.push_async_callback(bus.close)
        return bus


def operation_request(kind: str, backend: str, **more: Any) -> OperationRequest:
    node, selector = more.pop("node", ""), more.pop("selector", "")
    scope = Scope(ScopeKind.ALL)
    if node:
        scope = Scope(ScopeKind.NODE, f"id-of-{node}")
    elif selector:
        scope = Scope(ScopeKind.SELECTOR, selector)
    asked = BackendRequest(backend=backend, uri=more.pop("uri", ""), alias=more.pop("alias", ""))
    return parse_request(OperationKind(kind), asked, scope=scope, **more)


def quick(**changes: Any) -> BackendSettings:
    return replace(QUICK, **changes)


@contextlib.asynccontextmanager
async def open_fleet(
    url: str, *, clock: Clock | None = None, start: bool = True, lease_s: float = 1.0, yard: Yard | None = None
) -> AsyncIterator[Fleet]:
    clock = clock or SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(url))
        fleet = Fleet(store, LocalHub(clock), clock, stack, yard)
        await fleet.controller(start=start, lease_s=lease_s)
        yield fleet
