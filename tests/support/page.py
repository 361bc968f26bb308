"""The controller's doors in the test's own process: real store, real services, an in-process bus; for the page's tests.

Nodes are rows written by hand, so that a test has the fleet it wants at once, be it of one or of a thousand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from litestar import Litestar

from corral.bus.api import Bus
from corral.bus.jwt import KeyKind, new_seed
from corral.bus.local import LocalHub
from corral.contract.admin import CreateKey
from corral.contract.hardware import Device
from corral.controller.access.bus_issuer import BusEndpoint, BusIssuer
from corral.controller.access.gateway_trust import GatewayTrust
from corral.controller.access.join_tokens import JoinTokens
from corral.controller.access.keys import Access
from corral.controller.access.revocations import Revocations
from corral.controller.access.signing import IngressTokens
from corral.controller.api.overview import Overview
from corral.controller.api.server import serve_app
from corral.controller.backends.gallery_status import GalleryStatus
from corral.controller.distribution.installer import install_command
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.gateways.running import RunningRequests
from corral.controller.health.classify import Guard
from corral.controller.health.monitor import HealthMonitor
from corral.controller.health.observation_window import ObservationWindow
from corral.controller.install.catalogue_fits import CatalogueFits, SizeLookups
from corral.controller.install.planner import InstallPlanner
from corral.controller.inventory.activity import ActivityTracker
from corral.controller.models.schedules import Schedules
from corral.controller.operations.service import Operations
from corral.controller.registry.changes import NodeChanges
from corral.controller.registry.nodes import NodeAdmin
from corral.controller.replicas.listing import ReplicaListing
from corral.controller.replicas.loads import LoadService
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.controller.runtime.presence import Presence
from corral.controller.samples.service import SampleService
from corral.controller.settings import ControllerSettings
from corral.controller.settings.serving import ListenSettings
from corral.controller.web.routes import dependencies
from corral.controller.web.settings import EffectiveSettings
from corral.controller.wiring.backends import Backends
from corral.kit.clock import Clock, SystemClock
from corral.kit.settings import describe, shown
from corral.kit.signing import Signer
from corral.store import Store, open_store
from corral.store.tables import node_labels, nodes, revisions
from corral.store.tables.nodes import Node
from tests.support.backend_api import EmptyFleet, not_found
from tests.support.backend_fleet import QUICK, QUICK_PACE, Controller, Fleet, open_fleet
from tests.support.model_catalogue import NothingToFetch, models_of
from tests.support.replica_fleet import ReplicaFleet, open_replica_fleet
from tests.support.scripted_catalogue import ScriptedCatalogue
from tests.support.shared_app import shared_app
from tests.support.sqlite import sqlite_url
from tests.support.trials import NoTrials

GIB = 1024**3


@dataclass
class PageApp:
    app: Litestar
    store: Store
    access: Access
    feed: ChangeFeed
    nodes: NodeAdmin
    join_tokens: JoinTokens
    ingress_tokens: IngressTokens
    operations: Operations

    async def key(self, role: str = "admin", name: str = "", **more: Any) -> str:
        return (await self.access.create(CreateKey(name=name or f"{role} key", role=role, **more))).secret

    async def put(self, *made: Node, labels: dict[str, str] | None = None) -> None:
        """New nodes, told to whoever watches."""
        async with self.store.write() as tx:
            for node in made:
                await nodes.insert(tx, node)
                if labels:
                    await node_labels.replace_all(tx, node.id, labels, origin="admin")
            await revisions.bump(tx, "nodes")
        self.feed.notify("nodes")

    async def change(self, name: str, **columns: Any) -> None:
        async with self.store.write() as tx:
            node = await nodes.find_by_name(tx, name)
            assert node is not None
            await nodes.update(tx, node.id, columns, expected=node.row_version)
            await revisions.bump(tx, "nodes")
        self.feed.notify("nodes")

    async def remove(self, name: str) -> None:
        await self.nodes.delete(name)


@contextlib.asynccontextmanager
async def open_page_app(
    folder: Path, *, door_clock: Clock | None = None, session_ttl_s: float = 600.0
) -> AsyncIterator[PageApp]:
    """`door_clock` is the one that counts tries and tells ages. Nobody installs anything here: there are no workers."""
    clock = SystemClock()
    async with (
        open_store(sqlite_url(folder)) as store,
        LocalHub(clock, seed=1).join("controller") as bus,
        asyncio.TaskGroup() as tasks,
    ):
        feed = ChangeFeed(store, bus, clock, interval_s=0.1, refresh_s=0.3)
        changes = NodeChanges(store, feed)
        leadership = Leadership(store, "here", ttl_s=60)
        health = HealthMonitor(
            store,
            changes,
            ObservationWindow(bus, clock, longest_gap_s=300),
            leadership,
            clock,
            interval_s=60,
            stale_after_s=600,
            guard=Guard(),
            live_for_s=60,
        )
        backends = Backends(store, bus, ScriptedCatalogue(), leadership, changes, feed, clock, QUICK, QUICK_PACE)
        presence = Presence(store, "here", clock, interval_s=60)
        loops = [tasks.create_task(feed.run()), tasks.create_task(presence.run())]
        with _page_app(store, bus, feed, changes, health, backends, clock, door_clock or clock, session_ttl_s) as page:
            yield page
        for loop in loops:
            loop.cancel()


@contextlib.asynccontextmanager
async def open_backend_page(folder: Path) -> AsyncIterator[tuple[PageApp, Fleet]]:
    """The same in front of a controller that installs, with scripted workers."""
    async with open_fleet(sqlite_url(folder)) as fleet:
        with _page_app_of(fleet.first, fleet.clock) as page:
            yield page, fleet


@contextlib.asynccontextmanager
async def open_model_page(folder: Path) -> AsyncIterator[tuple[PageApp, ReplicaFleet]]:
    """The same in front of a controller that loads models."""
    async with open_replica_fleet(sqlite_url(folder)) as fleet:
        parts = fleet.replicas["c1"]
        more = {"loads": parts.loads, "replica_rows": parts.rows, "explaining": parts.why, "trials": parts.trials}
        with _page_app_of(fleet.fleet.first, fleet.fleet.clock, **more) as page:
            yield page, fleet


def _page_app_of(own: Controller, clock: Clock, **more: Any) -> contextlib.AbstractContextManager[PageApp]:
    return _page_app(own.store, own.bus, own.feed, own.changes, own.health, own.backends, clock, clock, 600.0, **more)


@contextlib.contextmanager
def _page_app(
    store: Store,
    bus: Bus,
    feed: ChangeFeed,
    changes: NodeChanges,
    health: HealthMonitor,
    backends: Backends,
    clock: Clock,
    door_clock: Clock,
    session_ttl_s: float,
    **more: Any,
) -> Iterator[PageApp]:
    """`more`: services by the names their doors know them by."""
    issuer = BusIssuer(
        BusEndpoint(()), clock, account_seed=new_seed(KeyKind.ACCOUNT, os.urandom), ttl_s=60, install_timeout_s=60
    )
    revoked = Revocations(store, bus, clock, keys=None, urls=(), tls=None, ttl_s=60)
    access = Access(store, feed, clock, session_ttl_s=session_ttl_s)
    admin = NodeAdmin(store, changes, issuer, revoked)

    async def command(url: str, token: str, pin: str = "") -> str:
        return install_command(url, "0" * 64, token, pin)

    tokens = JoinTokens(
        store, feed, public_url="http://127.0.0.1:8080", trust=GatewayTrust(None), install_command=command
    )
    overview = Overview(store, bus, issuer, revoked, health, live_for_s=600, compat_localai=False)
    services = {"access": access, "join_tokens": tokens, "nodes": admin, "feed": feed, "overview": overview}
    services |= {"operations": backends.operations, "installed": backends.installed, "integrity": backends.integrity}
    services |= {
        "fetches": NothingToFetch(),
        "trials": NoTrials(),
        "planner": NoSources(),
        "gallery_status": GalleryStatus({}),
    }
    services |= {"fits": CatalogueFits(EmptyFleet(), SizeLookups(not_found, clock), wait_s=0.01)}
    services |= {"upgrades": backends.upgrades, "catalogue": backends.catalogue, "preparing": backends.resolver}
    models = models_of(store, feed)
    ingress_tokens = IngressTokens(Signer(Signer.new_private_key()), clock)
    settings = ControllerSettings()
    effective = EffectiveSettings(
        describe(ControllerSettings), shown(settings), {"health_interval_s": "--health-interval"}
    )
    services |= {"ingress_tokens": ingress_tokens, "effective_settings": effective}
    services |= {"models": models, "schedules": Schedules(store, feed), "receipts": ReceiptService(store, clock)}
    services["running"] = RunningRequests(store, bus, clock)
    services |= {"samples": SampleService(store, clock), "rollouts": backends.rollouts}
    services |= {
        "loads": LoadService(store, models, feed, clock),
        "replica_rows": ReplicaListing(store, ActivityTracker(bus, clock)),
    }
    unused = dict.fromkeys(
        (
            "node_api",
            "bundles",
            "locations",
            "blob_peers",
            "views",
            "readiness",
            "controller_metrics",
            "ingresses",
            "fleet_files",
            "explaining",
            "planner",
            "fits",
            "uploads",
            "upload_operations",
            "bundles",
        )
    )
    given = unused | services | more | dependencies(door_clock)
    with shared_app(given, access_service=access, trust=GatewayTrust(None)) as app:
        yield PageApp(app, store, access, feed, admin, tokens, ingress_tokens, backends.operations)


class NoSources(InstallPlanner):
    """These pages install models of galleries only."""

    def __init__(self) -> None:
        pass


@contextlib.asynccontextmanager
async def served(page: PageApp, port: int) -> AsyncIterator[str]:
    """On a real port, for a real browser; leaving is the server going away."""
    async with serve_app(page.app, ListenSettings(host="127.0.0.1", port=port)):
        yield f"http://127.0.0.1:{port}"


def made_node(name: str, status: str = "healthy", **more: Any) -> Node:
    """A machine with one graphics card that beat a moment ago."""
    now = datetime.now(UTC)
    columns: dict[str, Any] = {
        "id": str(uuid.uuid4()),
        "name": name,
        "status": status,
        "approved": status != "pending",
        "created_at": now - timedelta(minutes=3),
        "updated_at": now,
        "status_changed_at": now,
        "last_heartbeat": now,
        "protocol": 1,
        "version": "0.1.0",
        "os": "linux",
        "arch": "amd64",
        "gpu_vendor": "nvidia",
        "capability": "nvidia-cuda-12",
        "devices": (Device(index=0, vendor="nvidia", name="GeForce RTX 4090", total_bytes=24 * GIB),),
        "total_vram": 24 * GIB,
        "available_vram": 20 * GIB,
        "total_ram": 64 * GIB,
        "available_ram": 40 * GIB,
        "total_disk": 2000 * GIB,
        "available_disk": 900 * GIB,
    }
    return Node(**(columns | more))
