"""The parts that serve LocalAI workers, put together: what `main.py` opens, starts and mounts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from corral.blobs.object_store import ObjectStore
from corral.blobs.storage_settings import StorageSettings
from corral.controller.files.swarm.stored_blobs import fleet_mark
from corral.controller.localai.bridges import Bridges
from corral.controller.localai.calls import PeerCalls, PeerTimes
from corral.controller.localai.cleanup import ObjectSweep, PeerCleanup
from corral.controller.localai.file_server import FileServers
from corral.controller.localai.load import PeerLoads
from corral.controller.localai.needs import PeerDependencies
from corral.controller.localai.object_files import ObjectFiles
from corral.controller.localai.orders import PeerOrders
from corral.controller.localai.replica_routes import ReplicaRoutes
from corral.controller.localai.request_files import RequestFiles
from corral.controller.localai.staging import PeerStaging
from corral.controller.localai.start import PeerStarter
from corral.controller.localai.table import PeerTable
from corral.controller.localai.watch import PeerMonitor
from corral.controller.orders.replica_calls import ReplicaOrders
from corral.kit.clock import Clock
from corral.kit.tasks import run_every
from corral.store.records import BackendRequest

_TIDY_EVERY_S = 10.0


@dataclass(frozen=True)
class PeerSettings:
    token: str = field(repr=False)  # the registration token all LocalAI workers share
    folder: Path  # for files of requests that pass through
    instance: str
    lease: str  # of whoever orders replicas: the same looks after these
    storage: StorageSettings = field(default_factory=StorageSettings)
    check_every_s: float = 5.0
    times: PeerTimes = field(default_factory=PeerTimes)


@dataclass(frozen=True)
class Peers:
    orders: PeerOrders
    parts: tuple[Any, ...]  # each has a name and a `run`
    around: Callable[[Any], Any]  # the controller's application, and the routes of replicas before it


@contextlib.asynccontextmanager
async def open_peers(own: ReplicaOrders, needs: PeerDependencies, settings: PeerSettings) -> AsyncIterator[Peers]:
    """`own`: orders to workers that take them."""
    store, bus, clock = needs.store, needs.bus, needs.clock
    table = PeerTable(store, needs.leadership, needs.feed, clock, lease=settings.lease)

    async def galleries_with(backend: str) -> str:
        return msgspec.json.encode(list(await needs.catalogue.galleries_with(BackendRequest(backend)))).decode()

    calls = PeerCalls(bus, clock, settings.times, galleries_with=galleries_with)
    async with contextlib.AsyncExitStack() as opened:
        servers = await opened.enter_async_context(FileServers(settings.token, clock))
        objects = None
        if settings.storage.is_configured:
            fleet = fleet_mark(needs.public_key)
            objects = await opened.enter_async_context(ObjectFiles(ObjectStore(settings.storage), calls, fleet=fleet))
        requests = await opened.enter_async_context(
            RequestFiles(servers, calls, clock, settings.folder, objects=objects)
        )
        loads = PeerLoads(
            bus,
            clock,
            settings.instance,
            leads=lambda: table.leads,
            node_of=lambda process_id: row.node_id if (row := table.known().get(process_id)) is not None else None,
        )
        starting = PeerStarter(
            calls, PeerStaging(servers, needs.files, objects), needs.files, table, needs.logs, clock, settings.token
        )
        orders = await opened.enter_async_context(
            PeerOrders(
                own,
                store,
                bus,
                calls,
                starting,
                table,
                loads,
                clock,
                token=settings.token,
                on_unreachable=needs.on_unreachable,
            )
        )
        watching = PeerMonitor(store, calls, table, clock, token=settings.token, every_s=settings.check_every_s)
        sweeping = PeerCleanup(store, calls, servers, needs.files, requests, table, clock)
        bridges = Bridges(store, requests, settings.token, table.known)
        opened.push_async_callback(bridges.close)
        routes = ReplicaRoutes(table, bridges, loads, clock, needs.public_key, doubt=watching.doubt)
        parts = [table, loads, watching, sweeping, _Tidying(bridges, clock)]
        if objects is not None:
            parts.append(
                ObjectSweep(objects.store, clock, fleet=fleet, leads=lambda: table.leads, wanted=sweeping.wanted)
            )
        yield Peers(orders, tuple(parts), routes.around)


class _Tidying:
    name = "bridges of peers"

    def __init__(self, bridges: Bridges, clock: Clock) -> None:
        self._bridges = bridges
        self._clock = clock

    async def run(self) -> None:
        await run_every(self.name, _TIDY_EVERY_S, self._bridges.tidy, clock=self._clock)
