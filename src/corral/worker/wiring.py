"""Builds the parts that handle backends: blobs, galleries, installer, model files, orders and heartbeat reports.

`main.py` builds the supervisor and passes it in with the processes it adopted; it outlives these parts.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from corral.blobs.contents import Contents
from corral.blobs.oci.credentials import DockerConfig
from corral.blobs.oci.registry import RegistryClient, RegistrySettings
from corral.blobs.sources.context import SourceContext
from corral.blobs.store import BlobStore
from corral.blobs.swarm.planner import SourceKind
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.transfer.fetcher import Fetcher
from corral.blobs.transfer.remote import HttpTimeouts, open_session
from corral.contract.hardware import HardwareReport
from corral.gallery.backends.factory import GalleryOptions
from corral.gallery.backends.library import LibraryOptions
from corral.gallery.backends.resolution import Machine
from corral.gallery.galleries import parse_galleries
from corral.gallery.pypi.pip import own_python
from corral.kit.clock import Clock
from corral.kit.tasks import Wake, background, run_every
from corral.worker.agent.heartbeat.reporter import HeartbeatReporter
from corral.worker.agent.orders.backend_changes import BackendChanges
from corral.worker.agent.orders.backends import BackendOrders, DirectOrders
from corral.worker.agent.orders.replacement import ProcessReplacer
from corral.worker.agent.orders.replicas import ReplicaOrders
from corral.worker.agent.orders.runner import EventPublisher, OrderRunner, Outcomes
from corral.worker.agent.orders.staging import StageOrders
from corral.worker.agent.orders.subscriptions import OrderSubscriptions
from corral.worker.files.blob_exchange import Announce, PeerExchange
from corral.worker.files.cleanup import CleanupPolicy
from corral.worker.files.fleet_blobs import FleetBlobs
from corral.worker.files.fleet_sources import Ask, FleetSources
from corral.worker.files.model_files import WorkerFiles
from corral.worker.files.served_blobs import ServedBlobs
from corral.worker.ingress.replicas import ReplicaRelay
from corral.worker.installer.installer import Installer
from corral.worker.installer.requests import InstallFolders
from corral.worker.installer.resolver import BackendResolver
from corral.worker.metrics import WorkerMetrics
from corral.worker.settings import WorkerSettings
from corral.worker.status import WorkerStatus
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.system.libraries import SystemLibraries
from corral.worker.system.packages import PackageManager
from corral.worker.upgrade.orders import CorralUpgradeOrders
from corral.worker.upgrade.release_pin import ReleasePin


@dataclass(frozen=True)
class Cluster:
    """How files are fetched from the cluster. `trust` None: the certificates that the system trusts."""

    url: str
    trust: ssl.SSLContext | None
    fresh_blob_token: Callable[[], Awaitable[str]]
    announce_blobs: Announce
    ask_artifacts: Ask
    served: ServedBlobs
    on_revoked: Callable[[str, int], None]
    release_pin: ReleasePin


@dataclass(frozen=True)
class BackendParts:
    """What `worker/localai` needs to carry out LocalAI's orders."""

    changes: BackendChanges
    installer: Installer
    supervisor: Supervisor
    files: WorkerFiles


@dataclass(frozen=True)
class BackendServices:
    """What the agent needs of the parts built here."""

    publisher: EventPublisher
    reporter: HeartbeatReporter
    subscriptions: OrderSubscriptions


@contextlib.asynccontextmanager
async def open_backends(
    settings: WorkerSettings,
    supervisor: Supervisor,
    relay: ReplicaRelay,
    report: Callable[[], HardwareReport],
    cluster: Cluster,
    *,
    clock: Clock,
    env: Mapping[str, str],
    metrics: WorkerMetrics,
    wake: Wake,
    status: WorkerStatus,
    make_direct: Callable[[BackendParts], DirectOrders | None],
) -> AsyncIterator[BackendServices]:
    """`report` returns the latest hardware report; `make_direct` makes the handlers of LocalAI's orders, if any.
    Leaving the block cancels running orders; their downloads are kept."""
    shutdown, interval_s = settings.shutdown, settings.heartbeat.heartbeat_interval_s
    outcomes = Outcomes(settings.node.data / "outcomes.json", clock)
    outcomes.load()
    publisher = EventPublisher()
    async with (
        _open_fleet(settings, cluster, clock, metrics) as (fleet, exchange),
        _open_sources(settings, report().platform, fleet, cluster, clock, env) as sources,
        _make_resolver(settings, sources, report, clock, env) as resolver,
        OrderRunner(outcomes, publisher.publish_outcome, metrics=metrics, on_change=wake.set) as runner,
        background(sources.store.run(clock)),
        CorralUpgradeOrders(
            settings.node.data,
            cluster.release_pin,
            fleet,
            sources.store,
            settings=settings.upgrade,
            status=status,
        ) as upgrades,
    ):
        files = WorkerFiles(
            settings.node.models_dir,
            fleet,
            clock,
            nearby=settings.install.nearby_blobs,
            in_use=supervisor.model_files,
            cleanup=CleanupPolicy(
                unused_s=settings.install.keep_unused_files_s, limit_bytes=int(settings.install.cache_limit)
            ),
        )
        if (store := files.find_store()) is not None:
            cluster.served.add_store(store)
        libraries = SystemLibraries(PackageManager(settings.install.install_system_packages, env=env, clock=clock))
        installer = Installer(
            Contents(sources),
            InstallFolders(settings.node.backends_dir, settings.node.system_backends),
            in_use=supervisor.directories,
            capability=lambda: report().capability,
            clock=clock,
            libraries=libraries,
        )
        replacer = ProcessReplacer(supervisor, relay, drain_s=shutdown.upgrade_drain_s)
        await installer.start()
        await replacer.keep_one_each(await _current_folders(installer))
        changes = BackendChanges(installer, resolver, replacer)
        direct = make_direct(BackendParts(changes, installer, supervisor, files))
        backend_orders = BackendOrders(
            changes, installer, runner, outcomes, publisher, clock, libraries=libraries, direct=direct
        )
        replica_orders = ReplicaOrders(
            installer,
            supervisor,
            runner,
            publisher,
            settings.node.models_dir,
            files,
            clock,
            relay,
            drain_s=shutdown.drain_timeout_s,
        )
        reporter = HeartbeatReporter(installer, backend_orders.reports, supervisor.list_processes, wake)

        async def check_libraries() -> None:
            refused = (outcome.backend.missing for outcome in outcomes.refused_for_libraries() if outcome.backend)
            if await libraries.refresh(installer.needed_libraries.union(*refused)):
                wake.set()

        try:
            measure = run_every("usage", interval_s, supervisor.measure, clock=clock)
            check = run_every("libraries", interval_s, check_libraries, clock=clock)
            async with background(files.run(), measure, check):
                subscriptions = OrderSubscriptions(
                    backend_orders,
                    replica_orders,
                    StageOrders(runner, publisher, files, clock),
                    files,
                    upgrades,
                    on_revoked=cluster.on_revoked,
                    on_subscribed=exchange.announce_soon,
                )
                yield BackendServices(publisher, reporter, subscriptions)
        finally:
            sources.store.leave()
            files.leave()
            await runner.cancel_all()
            await reporter.close()


async def _current_folders(installer: Installer) -> frozenset[str]:
    return frozenset(str(build.directory) for build in (await installer.inventory()).builds.values())


@contextlib.asynccontextmanager
async def _open_fleet(
    settings: WorkerSettings, cluster: Cluster, clock: Clock, metrics: WorkerMetrics
) -> AsyncIterator[tuple[FleetBlobs, PeerExchange]]:
    times = HttpTimeouts(stall_s=settings.install.download_stall_s)
    max_download = RateLimit(settings.install.max_download, clock)

    def on_received(kind: SourceKind, count: int) -> None:
        metrics.received_blob_bytes.labels(source=kind.value).inc(count)

    async with open_session(times, trust=cluster.trust, inside=True) as session:
        exchange = PeerExchange(
            cluster.served,
            session,
            cluster.announce_blobs,
            clock,
            max_download=max_download,
            storage_ca=settings.storage.storage_ca,
        )
        fleet = FleetBlobs(
            session,
            controller=cluster.url,
            fresh_token=cluster.fresh_blob_token,
            exchange=exchange,
            max_download=max_download,
            clock=clock,
            on_received=on_received,
        )
        async with background(exchange.run()):
            yield fleet, exchange


@contextlib.asynccontextmanager
async def _open_sources(
    settings: WorkerSettings,
    platform: str,
    fleet: FleetBlobs,
    cluster: Cluster,
    clock: Clock,
    env: Mapping[str, str],
) -> AsyncIterator[SourceContext]:
    nearby = settings.install.nearby_blobs  # the folder of finished blobs; artifacts lie beside it
    async with open_session(HttpTimeouts(stall_s=settings.install.download_stall_s)) as session:
        registries = RegistrySettings(insecure=frozenset(settings.install.insecure_registries))
        yield SourceContext(
            BlobStore(settings.node.data / "blobs", Fetcher(clock=clock)),
            session,
            RegistryClient(session, credentials=DockerConfig(env), settings=registries),
            platform,
            provider=FleetSources(
                cluster.ask_artifacts,
                fleet,
                clock,
                nearby=nearby.parent / "artifacts" / nearby.name if nearby is not None else None,
            ),
            anonymous_registry=RegistryClient(session, settings=registries),
        )


def _make_resolver(
    settings: WorkerSettings,
    sources: SourceContext,
    report: Callable[[], HardwareReport],
    clock: Clock,
    env: Mapping[str, str],
) -> BackendResolver:
    options = GalleryOptions(
        galleries=parse_galleries(settings.install.galleries),
        base_folder=settings.install.gallery_folder or settings.node.data / "galleries",
        cache_folder=settings.node.data / "cache",
        library=LibraryOptions(candidate_s=settings.install.gallery_timeout_s),
    )

    def machine() -> Machine:
        now = report()
        return Machine(capability=now.capability, platform=now.platform, python=own_python())

    return BackendResolver(options, sources.registry, machine, clock=clock, env=env)
