"""The whole controller on one page: each subsystem is opened in order and closed in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

import uvloop

from corral.controller.api.log_tunnel import LogTunnels
from corral.controller.api.server import serve_app
from corral.controller.backends.galleries import open_galleries
from corral.controller.bundles.library import Bundles
from corral.controller.files.fetches import Fetches
from corral.controller.files.kept_models import KeptModelsPublisher
from corral.controller.files.upload_operations import UploadOperations
from corral.controller.gateways.demand import Demand
from corral.controller.gateways.running import RunningRequests
from corral.controller.install.catalogue_fits import SizeLookups
from corral.controller.metrics.replicas import ReplicaMetrics
from corral.controller.replicas.reconcile import LEASE as REPLICAS
from corral.controller.runtime.housekeeping import Housekeeping
from corral.controller.runtime.leadership import Leadership
from corral.controller.runtime.presence import Presence
from corral.controller.samples.recorder import SampleRecorder
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.access import open_trust
from corral.controller.wiring.app import build_app
from corral.controller.wiring.backends import BackendPace, Backends, gallery_options, registry_settings
from corral.controller.wiring.files import blobs_folder, open_model_files
from corral.controller.wiring.localai import open_localai
from corral.controller.wiring.models import open_models
from corral.controller.wiring.nodes import assemble_nodes
from corral.controller.wiring.releases import ReleaseParts
from corral.controller.wiring.replicas import ReplicaDependencies, Replicas, replica_pace
from corral.controller.wiring.runtime import open_runtime, run_parts
from corral.controller.wiring.services import api_services, make_bundle_service
from corral.controller.wiring.staging import Staging
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import CorralError
from corral.kit.log import configure_logging, get_log
from corral.kit.process import freeze_gc_after_start
from corral.kit.settings import shown
from corral.kit.sockets import report_ready
from corral.kit.tasks import flatten_errors

log = get_log(__name__)

_FAREWELL_S = 3.0


async def serve(
    settings: ControllerSettings, *, clock: Clock | None = None, stopped: asyncio.Event | None = None
) -> None:
    stopped = stopped or asyncio.Event()
    async with contextlib.AsyncExitStack() as opened:
        runtime = await opened.enter_async_context(open_runtime(settings, clock or SystemClock(), stopped))
        if runtime is None:
            return
        store, bus, clock, leadership = runtime.store, runtime.bus, runtime.clock, runtime.leadership
        changes, feed = runtime.changes, runtime.feed
        trust = await open_trust(settings, runtime)
        registries, demand = registry_settings(settings), Demand(bus, clock)
        bundles = Bundles(blobs_folder(settings) / "bundles", clock)
        catalogue = await opened.enter_async_context(
            open_galleries(
                gallery_options(settings, settings.gallery.galleries),
                registries,
                clock=clock,
                env=os.environ,
                bundled=bundles,
            )
        )
        files = await opened.enter_async_context(
            open_model_files(settings, runtime, trust, registries, os.environ, bundles)
        )
        pace = BackendPace.of(settings)
        backends = Backends(store, bus, catalogue, leadership, changes, feed, clock, settings.backends, pace)
        models = await opened.enter_async_context(
            open_models(settings, store, feed, catalogue, files.sizes, clock, bundles)
        )
        progress, acceptor = backends.progress, backends.acceptor
        fetches = Fetches(store, bus, files.files, progress, leadership, feed, clock, settings.backends, lease=REPLICAS)
        uploads = UploadOperations(
            store, bus, progress, leadership, feed, clock, lease=REPLICAS, kept_s=settings.files.keep_blobs_s
        )
        staging = Staging(runtime, files.files, fetches, progress, settings.backends)
        releases = ReleaseParts(settings, runtime, trust, files, backends.operations)
        localai = await opened.enter_async_context(
            open_localai(settings, runtime, trust, catalogue, files.files, changes.mark_unreachable)
        )
        replica_metrics = ReplicaMetrics()
        dependencies = ReplicaDependencies(
            models.models,
            fetches,
            catalogue,
            acceptor,
            changes,
            counter=replica_metrics,
            waiting=demand.waiting,
            pressure=demand.pressure,
            orders=localai.orders if localai is not None else None,
            keep_list=files.files.keep_list,
        )
        replica_rules = replica_pace(settings)
        replicas = Replicas(store, bus, leadership, feed, clock, dependencies, settings.replicas, replica_rules)
        nodes = assemble_nodes(
            settings,
            runtime,
            trust,
            on_heartbeat=backends.inventories.on_heartbeat,
            in_flight_of=replicas.activity.of_node,
            blob_url=files.url,
        )
        presence = Presence(
            store, runtime.instance, clock, interval_s=settings.runtime.lease_ttl_s / 3, blob_url=files.url
        )
        lookups = SizeLookups(files.resolver.find, clock)
        samples = SampleRecorder(
            store,
            leadership,
            clock,
            in_flight_of=lambda node, process: replicas.activity.find(node, process).in_flight,
            waiting=demand.waiting,
        )
        running = RunningRequests(store, bus, clock)
        services = api_services(
            settings,
            runtime,
            trust,
            nodes,
            catalogue,
            backends,
            models,
            fetches,
            files,
            staging,
            replicas,
            lookups,
            demand,
            replica_metrics,
            samples,
            make_bundle_service(settings, store, catalogue, files, fetches, bundles),
            running,
            releases,
            uploads,
        )
        app = build_app(services, access_service=trust.access, trust=trust.gateways)
        parts = (
            feed,
            *nodes.parts,
            *trust.parts,
            presence,
            Housekeeping(store, leadership, clock, settings.runtime),
            *backends.parts,
            *models.parts,
            *replicas.parts,
            demand,
            running,
            samples,
            lookups,
            *(localai.parts if localai is not None else ()),
            fetches,
            uploads,
            staging.stages,
            releases.upgrades,
            *files.parts,
            bundles,
            KeptModelsPublisher(store, bus, leadership, clock),
        )
        async with (
            run_parts(parts),
            LogTunnels(trust.access, nodes.admin, trust.ingresses) as tunnels,
            serve_app(app if localai is None else localai.around(app), settings.listen, tunnels.protocol) as urls,
        ):
            report_ready(os.environ)
            log.info("controller ready", instance=runtime.instance, at=urls, store=store.kind)
            await stopped.wait()
            feed.end()
        await _leave(leadership, presence)


async def _leave(leadership: Leadership, presence: Presence) -> None:
    with contextlib.suppress(TimeoutError):  # others find out by themselves, a little later
        async with asyncio.timeout(_FAREWELL_S):
            await leadership.release_all()
            await presence.leave()


def run(settings: ControllerSettings) -> int:
    """The process: logging, signals, exit code. One clear line on stderr for each fault that a person must fix."""
    configure_logging(role="controller", level=settings.log_level, json=settings.log_json)
    log.info("settings", **shown(settings))
    try:
        uvloop.run(_until_signalled(settings))
    except (CorralError, ExceptionGroup) as failure:
        faults = flatten_errors(failure)
        if not all(isinstance(fault, CorralError) for fault in faults):
            raise
        for line in (line for fault in faults for line in str(fault).splitlines()):
            print(f"corral controller: {line}", file=sys.stderr)
        return 1
    return 0


async def _until_signalled(settings: ControllerSettings) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    freeze_gc_after_start(loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await serve(settings, stopped=stopped)
