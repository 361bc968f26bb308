"""The whole controller on one page. What is opened here is closed here, in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import uuid

import uvloop

from corral.bus.nats import NatsBus
from corral.controller.access.active_nodes import ActiveNodes
from corral.controller.access.bootstrap import ensure_key_file, load_ca
from corral.controller.access.join_tokens import JoinTokens
from corral.controller.access.keys import Access
from corral.controller.access.principal import Role
from corral.controller.access.revocations import Revocations
from corral.controller.access.signing import open_ingress_tokens
from corral.controller.api.log_tunnel import LogTunnels
from corral.controller.api.metrics import ControllerMetrics
from corral.controller.api.overview import Overview
from corral.controller.api.server import serve_app
from corral.controller.backends.galleries import open_galleries
from corral.controller.backends.gallery_status import GalleryStatus
from corral.controller.files.deleted import Deleted
from corral.controller.files.fetches import Fetches
from corral.controller.fleetfile.service import FleetFiles
from corral.controller.gateways.demand import Demand
from corral.controller.gateways.receipts import ReceiptBook
from corral.controller.gateways.view import Views
from corral.controller.health.classify import Guard
from corral.controller.health.ingress_check import IngressCheck
from corral.controller.health.listening import Listening
from corral.controller.health.monitor import HealthMonitor
from corral.controller.localai.needs import PeerNeeds
from corral.controller.registry.admission import AdmissionRules, NodeApi
from corral.controller.registry.changes import NodeChanges
from corral.controller.registry.heartbeats import Heartbeats
from corral.controller.registry.ingress_client import IngressClient
from corral.controller.registry.nodes import NodeAdmin
from corral.controller.replicas.reconcile import LEASE as REPLICAS
from corral.controller.runtime.change_feed import Watch
from corral.controller.runtime.housekeeping import Housekeeping
from corral.controller.runtime.leadership import Leadership
from corral.controller.runtime.presence import Presence, hold_instance_id
from corral.controller.runtime.readiness import Readiness
from corral.controller.runtime.store_wait import open_store_when_there
from corral.controller.settings import ControllerSettings
from corral.controller.web.routes import dependencies as web_dependencies
from corral.controller.wiring.app import build_app
from corral.controller.wiring.backend_options import backend_options, gallery_options, registry_settings
from corral.controller.wiring.backends import Backends
from corral.controller.wiring.bus import set_up_bus
from corral.controller.wiring.files import fetch_pace, open_model_files
from corral.controller.wiring.localai import open_localai
from corral.controller.wiring.models import open_models
from corral.controller.wiring.replica_options import replica_settings
from corral.controller.wiring.replicas import Needs, Replicas
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import CorralError
from corral.kit.files import make_folder
from corral.kit.log import configure_logging, get_log
from corral.kit.memory import settle_after_start
from corral.kit.settings import shown
from corral.kit.socket_activation import report_ready
from corral.kit.tasks import leaves

log = get_log(__name__)

_FAREWELL_S = 3.0
_SHORT_SECRET = 16


async def serve(
    settings: ControllerSettings, *, clock: Clock | None = None, stopped: asyncio.Event | None = None
) -> None:
    clock = clock or SystemClock()
    stopped = stopped or asyncio.Event()
    make_folder(settings.data)
    ca = load_ca(settings.ca_cert, settings.ca_key)
    bus_setup = set_up_bus(settings, clock)
    async with contextlib.AsyncExitStack() as opened:
        instance = settings.instance_id or opened.enter_context(hold_instance_id(settings.data.expanduser()))
        store = await opened.enter_async_context(open_store_when_there(settings.store_url(), stopped))
        if store is None:
            return
        bus = await opened.enter_async_context(
            NatsBus(bus_setup.urls, bus_setup.credentials, tls=bus_setup.tls, inbox_prefix=bus_setup.inbox, clock=clock)
        )
        catalogue = await opened.enter_async_context(
            open_galleries(gallery_options(settings), registry_settings(settings), clock=clock, env=os.environ)
        )
        watch = Watch(store, bus, clock, interval_s=settings.watch_interval_s)
        changes = NodeChanges(store, watch)
        leadership = Leadership(store, f"{instance}/{uuid.uuid4().hex[:8]}", ttl_s=settings.lease_ttl_s)
        listening = Listening(bus, clock, longest_gap_s=max(settings.stale_after_s / 2, 2 * settings.heartbeat_flush_s))
        ingress_tokens = await open_ingress_tokens(store, clock)
        active_nodes = ActiveNodes(store, clock)
        await active_nodes.refresh()
        watch.on("nodes", active_nodes.wake.set)
        opened_files = await opened.enter_async_context(
            open_model_files(
                settings,
                store,
                ingress_tokens,
                active_nodes,
                registry_settings(settings),
                clock=clock,
                env=os.environ,
            )
        )
        issuer = bus_setup.issuer
        revoked = Revocations(
            store,
            bus,
            clock,
            keys=bus_setup.keys,
            urls=bus_setup.urls,
            tls=bus_setup.tls,
            ttl_s=settings.bus_credential_ttl_s,
        )
        health = HealthMonitor(
            store,
            changes,
            listening,
            leadership,
            clock,
            interval_s=settings.health_interval_s,
            stale_after_s=settings.stale_after_s,
            guard=Guard(settings.guard_share, settings.guard_floor),
            live_for_s=settings.lease_ttl_s,
        )
        ingresses = IngressClient(
            ingress_tokens,
            timeout_s=settings.ingress_check_timeout_s,
            ca_pem=ca.certificate_pem if ca else "",
            shared_token=settings.registration_token,
        )
        ingress_check = IngressCheck(
            store,
            ingresses,
            leadership,
            clock,
            changes,
            interval_s=settings.ingress_check_interval_s,
            silent_after_s=settings.stale_after_s / 2,
        )
        backends = Backends(store, bus, catalogue, leadership, changes, watch, clock, backend_options(settings))
        catalogued = await opened.enter_async_context(
            open_models(settings, store, watch, catalogue, opened_files.sizes, clock)
        )
        demand = Demand(bus, clock)
        receipts = ReceiptBook(store, clock, demand)
        fetches = Fetches(
            store,
            bus,
            opened_files.files,
            backends.progress,
            leadership,
            watch,
            clock,
            lease=REPLICAS,
            pace=fetch_pace(settings),
        )
        peers = await opened.enter_async_context(
            open_localai(
                settings,
                PeerNeeds(
                    store,
                    bus,
                    leadership,
                    watch,
                    clock,
                    catalogue,
                    opened_files.files,
                    ingresses,
                    ingress_tokens.public_key,
                    backends.reconciler.not_reached,
                ),
                instance,
            )
        )
        replicas = Replicas(
            store,
            bus,
            leadership,
            watch,
            clock,
            Needs(
                catalogued.models,
                fetches,
                catalogue,
                backends.accepting,
                changes,
                waiting=demand.waiting,
                pressure=demand.pressure,
                orders=peers.orders if peers is not None else None,
                keep_list=opened_files.files.keep_list,
            ),
            replica_settings(settings),
        )
        watch.in_flight_of = replicas.quiet.of_node
        heartbeats = Heartbeats(
            store,
            bus,
            clock,
            flush_s=settings.heartbeat_flush_s,
            recorded=listening.recorded,
            not_recorded=listening.not_recorded,
            back=health.wake.set,
            told=backends.inventories.heard,
        )
        changes.on_change(ingress_check.wake.set)
        access = Access(store, watch, clock, session_ttl_s=settings.session_ttl_s)
        await access.ensure(
            ensure_key_file(settings.admin_key_file or settings.data / "admin.key"), "admin", Role.ADMIN
        )
        await access.ensure(
            ensure_key_file(settings.gateway_key_file or settings.data / "gateway.key"), "gateway", Role.GATEWAY
        )
        if settings.compat_localai and len(settings.registration_token) < _SHORT_SECRET:
            log.warning("the shared registration token is short enough to be guessed; make it longer")
        rules = AdmissionRules(
            settings.auto_approve,
            settings.registration_token if settings.compat_localai else "",
            most_pending=settings.pending_limit,
        )
        node_admin = NodeAdmin(store, changes, issuer, revoked, replicas.quiet.of_node)
        gallery_status = GalleryStatus({"backends": catalogue.library, "models": catalogued.library})
        overview = Overview(
            store,
            bus,
            issuer,
            revoked,
            health,
            live_for_s=settings.lease_ttl_s,
            compat_localai=settings.compat_localai,
            more=lambda: [*catalogued.notices(), *gallery_status.notices()],
        )
        presence = Presence(store, instance, clock, interval_s=settings.lease_ttl_s / 3, blob_url=opened_files.url)
        app = build_app(
            {
                "access": access,
                "join_tokens": JoinTokens(store, watch, public_url=settings.public_url, ca=ca),
                "node_api": NodeApi(
                    store,
                    changes,
                    heartbeats,
                    issuer,
                    revoked,
                    ingress_tokens,
                    ca,
                    clock,
                    rules,
                    blob_url=opened_files.url,
                ),
                "nodes": node_admin,
                "ingresses": ingresses,
                "watch": watch,
                "views": Views(store, issuer, ingress_tokens, clock),
                "overview": overview,
                "operations": backends.operations,
                "installed": backends.installed,
                "integrity": backends.integrity,
                "upgrades": backends.upgrades,
                "catalogue": catalogue,
                "gallery_status": gallery_status,
                "preparing": backends.preparing,
                "models": catalogued.models,
                "fetches": fetches,
                "loads": replicas.loads,
                "replica_rows": replicas.rows,
                "explaining": replicas.why,  # not `why`: the login form has a parameter of that name
                "schedules": catalogued.schedules,
                "fleet_files": FleetFiles(
                    store, catalogued.models, catalogued.schedules, backends.operations, node_admin
                ),
                "receipts": receipts,
                "readiness": Readiness(store),
                "controller_metrics": ControllerMetrics(store, bus, heartbeats, health),
                **web_dependencies(clock),
            },
            access_service=access,
            ca_pem=ca.certificate_pem if ca else "",
        )
        async with asyncio.TaskGroup() as tasks:  # the first to fail takes the others down with it
            housekeeping = Housekeeping(
                store,
                leadership,
                clock,
                keep_operations_s=settings.keep_operations_s,
                keep_receipts_s=settings.keep_receipts_s,
            )
            parts = (
                watch,
                heartbeats,
                health,
                ingress_check,
                revoked,
                active_nodes,
                presence,
                housekeeping,
                *backends.parts,
                *catalogued.parts,
                *replicas.parts,
                demand,
                *(peers.parts if peers is not None else ()),
                fetches,
                *opened_files.parts,
                Deleted(store, bus, leadership, clock),
            )
            loops = [tasks.create_task(part.run(), name=part.name) for part in parts]
            async with (
                LogTunnels(access, node_admin, ingresses) as tunnels,
                serve_app(peers.around(app) if peers is not None else app, settings, tunnels.protocol) as places,
            ):
                report_ready(os.environ)
                log.info("controller ready", instance=instance, at=places, store=store.kind)
                await stopped.wait()
                watch.end()
            for loop in loops:
                loop.cancel()
        with contextlib.suppress(TimeoutError):  # others find out by themselves, a little later
            async with asyncio.timeout(_FAREWELL_S):
                await leadership.release_all()
                await presence.leave()


def run(settings: ControllerSettings) -> int:
    """The process: logging, signals, exit code. One clear line on stderr for what a person must mend."""
    configure_logging(role="controller", level=settings.log_level, json=settings.log_json)
    log.info("settings", **shown(settings))
    try:
        uvloop.run(_until_signalled(settings))
    except (CorralError, ExceptionGroup) as failure:
        faults = leaves(failure)
        if not all(isinstance(fault, CorralError) for fault in faults):
            raise
        for line in (line for fault in faults for line in str(fault).splitlines()):
            print(f"corral controller: {line}", file=sys.stderr)
        return 1
    return 0


async def _until_signalled(settings: ControllerSettings) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    settle_after_start(loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await serve(settings, stopped=stopped)
