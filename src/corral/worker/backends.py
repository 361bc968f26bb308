"""Everything about backends on this machine, put together: installer, galleries, orders, and what heartbeats tell.

The supervisor is handed in, with what it adopted; it outlives this."""

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
from corral.blobs.transfer.fetcher import Fetcher
from corral.blobs.transfer.remote import HttpTimeouts, open_session
from corral.contract.hardware import HardwareReport
from corral.gallery.backends.factory import GalleryOptions
from corral.gallery.backends.library import LibraryOptions
from corral.gallery.backends.resolution import Machine
from corral.gallery.galleries import parse_galleries
from corral.gallery.pypi.pip import own_python
from corral.kit.clock import Clock
from corral.kit.tasks import Wake, run_every
from corral.worker.agent.backend_changes import BackendChanges
from corral.worker.agent.backend_orders import BackendOrders
from corral.worker.agent.model_orders import ModelOrders
from corral.worker.agent.news import News
from corral.worker.agent.order_runs import OrderRuns
from corral.worker.agent.orders import Orders
from corral.worker.agent.outcomes import Outcomes
from corral.worker.agent.peer import Peer
from corral.worker.agent.replacing import Replacing, Traffic
from corral.worker.agent.replica_orders import ReplicaOrders
from corral.worker.agent.resolving import Resolving
from corral.worker.agent.voice import Voice
from corral.worker.agent.waiting import alongside
from corral.worker.files.model_files import FilesUpkeep, WorkerFiles
from corral.worker.installer.installer import Installer
from corral.worker.installer.requests import InstallFolders
from corral.worker.libraries import SystemLibraries
from corral.worker.metrics import WorkerMetrics
from corral.worker.settings import WorkerSettings
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.system_packages import PackageManager


@dataclass(frozen=True)
class Backends:
    """What the agent needs of it."""

    voice: Voice
    news: News
    orders: Callable[[Callable[[], None]], Orders]  # given what to call when told to leave
    work_for: Callable[[Peer], None]  # before the orders of a session are heard


@contextlib.asynccontextmanager
async def open_backends(
    settings: WorkerSettings,
    supervisor: Supervisor,
    traffic: Traffic,
    report: Callable[[], HardwareReport],
    *,
    clock: Clock,
    env: Mapping[str, str],
    metrics: WorkerMetrics,
    wake: Wake,
    controller: str = "",
    fresh_blob_token: Callable[[], Awaitable[str]] | None = None,
    trust: ssl.SSLContext | None = None,
) -> AsyncIterator[Backends]:
    """`report` is what this machine is now; `controller` the URL the cluster is reached by, `trust` whom to believe
    there (None: whom the system believes). Orders under way when this is left are given up, their bytes kept."""
    outcomes = Outcomes(settings.data / "outcomes.json", clock)
    outcomes.load()
    async with (
        _open_means(settings, report().platform, clock, env) as means,
        open_session(HttpTimeouts(stall_s=settings.download_stall_s), trust=trust, inside=True) as cluster,
        _open_resolving(settings, means, report, clock, env) as resolving,
        OrderRuns(outcomes, metrics=metrics, changed=wake.set) as runs,
        alongside(means.store.run(clock)),
    ):
        files = WorkerFiles(
            settings.models_dir,
            cluster,
            clock,
            controller=controller,
            nearby=settings.nearby_blobs,
            fresh_token=fresh_blob_token,
            in_use=supervisor.model_files,
            upkeep=FilesUpkeep(unused_s=settings.keep_unused_files_s),
        )
        libraries = SystemLibraries(PackageManager(settings.install_system_packages, env=env, clock=clock))
        installer = Installer(
            Contents(means),
            InstallFolders(settings.backends_dir, settings.system_backends),
            in_use=supervisor.directories,
            capability=lambda: report().capability,
            clock=clock,
            libraries=libraries,
        )
        replacing = Replacing(supervisor, traffic, drain_s=settings.drain_timeout_s)
        await installer.start()
        await replacing.keep_one_each(await _current_folders(installer))
        changes = BackendChanges(installer, supervisor, resolving, replacing)
        voice = Voice()
        backend_orders = BackendOrders(
            changes, installer, supervisor, runs, outcomes, voice, clock, libraries=libraries
        )
        model_orders = ModelOrders(supervisor, settings.models_dir, lambda: changes.peer.hosts, files=files)
        replica_orders = ReplicaOrders(
            installer,
            supervisor,
            runs,
            voice,
            settings.models_dir,
            files,
            clock,
            traffic,
            drain_s=settings.drain_timeout_s,
        )
        own_ports = supervisor.ports

        def work_for(peer: Peer) -> None:
            changes.peer = peer
            supervisor.use_ports(peer.ports or own_ports)

        async def look_for_libraries() -> None:
            refused = (outcome.backend.missing for outcome in outcomes.refused_for_libraries() if outcome.backend)
            if await libraries.look(installer.needed_libraries.union(*refused)):
                wake.set()

        news = News(installer, backend_orders.reports, supervisor.list_processes, wake)
        try:
            measuring = run_every("usage", settings.heartbeat_interval_s, supervisor.measure, clock=clock)
            looking = run_every("libraries", settings.heartbeat_interval_s, look_for_libraries, clock=clock)
            async with alongside(files.run(), measuring, looking):
                yield Backends(
                    voice=voice,
                    news=news,
                    orders=lambda leave: Orders(backend_orders, model_orders, replica_orders, leave=leave),
                    work_for=work_for,
                )
        finally:
            means.store.leave()
            files.leave()
            await runs.end()
            await news.close()


async def _current_folders(installer: Installer) -> frozenset[str]:
    return frozenset(str(build.directory) for build in (await installer.inventory()).builds.values())


@contextlib.asynccontextmanager
async def _open_means(
    settings: WorkerSettings, platform: str, clock: Clock, env: Mapping[str, str]
) -> AsyncIterator[SourceContext]:
    async with open_session(HttpTimeouts(stall_s=settings.download_stall_s)) as session:
        registry = RegistryClient(
            session,
            credentials=DockerConfig(env),
            settings=RegistrySettings(insecure=frozenset(settings.insecure_registries)),
        )
        store = BlobStore(settings.data / "blobs", Fetcher(clock=clock))
        yield SourceContext(store, session, registry, platform)


def _open_resolving(
    settings: WorkerSettings,
    means: SourceContext,
    report: Callable[[], HardwareReport],
    clock: Clock,
    env: Mapping[str, str],
) -> Resolving:
    options = GalleryOptions(
        galleries=parse_galleries(settings.galleries),
        base_folder=settings.gallery_folder or settings.data / "galleries",
        cache_folder=settings.data / "cache",
        library=LibraryOptions(candidate_s=settings.gallery_timeout_s),
    )

    def machine() -> Machine:
        now = report()
        return Machine(capability=now.capability, platform=now.platform, python=own_python())

    return Resolving(options, means.registry, machine, clock=clock, env=env)
