"""The worker's composition root: read this first. What is opened here is closed here, in reverse order.

`run` is the process, `serve` the worker in it. The order matters: processes of an earlier worker are adopted before the
ingress listens, the ingress listens before the worker registers, and orders are served only by a registered node.
`worker/localai` is imported in functions only: without that package a worker serves Corral controllers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvloop

from corral import __version__
from corral.blobs.swarm.rate_limit import RateLimit
from corral.bus.api import Bus
from corral.contract.messages.blobs import AnnounceBlobs, BlobHints
from corral.contract.messages.nodes import NodeRegistered, RegisterNode
from corral.kit.clock import Clock, SystemClock
from corral.kit.hosts import is_in_clear
from corral.kit.log import configure_logging, get_log, mask_secrets
from corral.kit.process import freeze_gc_after_start
from corral.kit.retry import Backoff
from corral.kit.settings import shown_changes
from corral.kit.tasks import Wake, background, run_until
from corral.kit.tracing.tracer import Tracer, open_tracer
from corral.worker.agent.agent import Agent
from corral.worker.agent.controller import ControllerApi, open_controller
from corral.worker.agent.join.bus_access import BusOpener
from corral.worker.agent.join.identity import IdentityFile, hold_folder
from corral.worker.agent.join.registrar import Registrar
from corral.worker.agent.join.registration import advertised_addresses, describe_node, listen_address
from corral.worker.agent.join.trust import establish_trust
from corral.worker.agent.leave import at_most, stop_backends
from corral.worker.agent.server_clock import ServerClock
from corral.worker.files.blob_exchange import RevokedNodes
from corral.worker.files.served_blobs import ServedBlobs
from corral.worker.hardware.monitor import HardwareMonitor
from corral.worker.hardware.probe import HardwareProbe
from corral.worker.ingress.blobs import BlobRoutes
from corral.worker.ingress.bridges import open_request_files
from corral.worker.ingress.certificate import IngressCertificate
from corral.worker.ingress.load_reports import LoadReports
from corral.worker.ingress.routes import IngressRoutes
from corral.worker.ingress.server import Ingress
from corral.worker.ingress.tokens import TokenVerifier
from corral.worker.metrics import WorkerMetrics
from corral.worker.own_log import record_own_log
from corral.worker.reload.handover import HandOver, Successors, inherit, is_successor
from corral.worker.settings import WorkerSettings, saved
from corral.worker.status import FatalError, WorkerStatus
from corral.worker.supervisor.logs import LogBook
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.system.users import BackendUser, choose_backend_user
from corral.worker.upgrade import readiness
from corral.worker.upgrade.release_pin import ReleasePin
from corral.worker.upgrade.versions import reload_command
from corral.worker.wiring import BackendParts, BackendServices, Cluster, open_backends

if TYPE_CHECKING:
    from corral.worker.localai.orders import LocalAIOrders

log = get_log(__name__)
THREADS = 64
Watch = Callable[[WorkerStatus], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Parts:
    """The parts that exist before the worker listens."""

    clock: Clock
    identity: IdentityFile
    url: str  # of the controller
    join_token: str
    user: BackendUser
    status: WorkerStatus
    metrics: WorkerMetrics
    server_clock: ServerClock
    tokens: TokenVerifier
    wake: Wake  # of the next heartbeat
    supervisor: Supervisor
    routes: IngressRoutes
    tracer: Tracer | None
    hardware: HardwareMonitor
    served: ServedBlobs
    revoked: RevokedNodes
    release_pin: ReleasePin


async def serve(
    settings: WorkerSettings,
    *,
    clock: Clock | None = None,
    stopped: asyncio.Event | None = None,
    hurry: asyncio.Event | None = None,
    succeeds: bool = False,
    given: Mapping[str, str | bool] | None = None,
    with_localai: bool = True,
    watch: Watch | None = None,
) -> bool:
    """Join the cluster, work, and leave when `stopped` is set; faster when `hurry` is set. `succeeds`: take over from
    the running worker. `given`: flags of this start to keep for later ones. `with_localai`: also serve LocalAI
    controllers. `watch` runs along and reads the status. Returns True when a new worker has taken over. Raises
    `FatalError`."""
    stopped, hurry = stopped or asyncio.Event(), hurry or asyncio.Event()
    shutdown = settings.shutdown
    inherited = await inherit(settings.node.data, timeout_s=shutdown.reload_timeout_s) if succeeds else None
    with record_own_log(settings.processes.backend_log_lines) as own_log, hold_folder(settings.node.data) as lock:
        log.info("worker starts", version=__version__, **shown_changes(settings))
        saved.save(settings.node.data, given or {})
        parts = make_parts(settings, clock or SystemClock(), own_log)
        if with_localai:
            from corral.worker.localai.wiring import mount_file_server

            mount_file_server(settings, parts.routes, parts.user)
        status, supervisor = parts.status, parts.supervisor

        def on_successor() -> None:
            if not stopped.is_set():  # a worker that is leaving does not hand over, and its successor sees that
                status.handing_over = True
                stopped.set()

        where = listen_address(settings, parts.url, parts.identity.current.ingress_port)
        async with (
            # Before the ingress listens: no request may learn that a running process is gone.
            adopted_processes(supervisor, status, leave_timeout_s=shutdown.leave_timeout_s),
            Ingress(
                where,
                parts.routes,
                parts.tokens,
                IngressCertificate(settings.node.data),
                parts.server_clock.now,
                shared_token=parts.join_token,
                node_id=parts.identity.current.node_id,
                local_sockets=settings.ingress.local_sockets,
                inherited=inherited.listeners if inherited is not None else (),
            ) as ingress,
            HandOver(settings.node.data, on_successor=on_successor) as handover,
            background(*([watch(status)] if watch is not None else [])),
            background(readiness.announce(status, settings.node.data)),
            background(*([parts.tracer.exporter.run()] if parts.tracer is not None else [])),
        ):
            if not where.is_chosen:
                parts.identity.keep_ingress_port(ingress.port)
            if inherited is not None:
                inherited.confirm_serving()
            await work(settings, parts, ingress, stopped, hurry, with_localai=with_localai)
            if status.handing_over:
                parts.routes.replicas.freeze(supervisor.serving())
                await supervisor.release_all()
                lock.release()
                if not await handover.give(ingress.descriptors(), timeout_s=shutdown.reload_timeout_s):
                    raise FatalError(
                        "the new worker did not take over: start this worker again, it adopts its processes"
                    )
                await ingress.retire(shutdown.reload_drain_s, hurry)
            return status.handing_over


def make_parts(settings: WorkerSettings, clock: Clock, own_log: LogBook) -> Parts:
    node = settings.node
    make_folders(settings)
    user = choose_backend_user(node, settings.processes.backend_user)
    identity = IdentityFile.open(node.data, name=node.name)
    url = identity.choose_controller(node.controller)
    if is_in_clear(url):
        log.warning("the controller's URL is plain http: tokens and credentials are sent without encryption", url=url)
    metrics, server_clock, wake = WorkerMetrics(), ServerClock(clock), Wake()
    status = WorkerStatus(boot_id=str(uuid.uuid4()), name=identity.current.name, controller=url)
    tokens = TokenVerifier(server_clock.now)
    tokens.trust(identity.current.signing_key, identity.current.node_id)
    probe = HardwareProbe(node.models_dir, env=os.environ)
    hardware = HardwareMonitor(probe, clock, refresh_every_s=settings.heartbeat.heartbeat_interval_s)
    supervisor = Supervisor(
        settings.processes,
        settings.processes.processes or node.data / "processes",
        user=user,
        builds=node.backends_dir,
        gauge=probe.gauge(lambda: hardware.report.devices),
        clock=clock,
        on_change=wake.set,
    )
    files = open_request_files(node.data / "requests", user.name)
    served, revoked = ServedBlobs(), RevokedNodes(server_clock.now)
    max_upload = RateLimit(settings.install.max_upload, clock)
    blobs = BlobRoutes(served, tokens, revoked, max_upload, on_sent=metrics.sent_blob_bytes.inc)
    tracer = open_tracer(settings.traces, "corral-worker", server_clock.now)
    if tracer is not None:
        tracer.exporter.on_sent, tracer.exporter.on_dropped = metrics.spans_sent.inc, metrics.traces_dropped.inc
    return Parts(
        clock=clock,
        identity=identity,
        url=url,
        join_token=read_join_token(settings),
        user=user,
        status=status,
        metrics=metrics,
        server_clock=server_clock,
        tokens=tokens,
        wake=wake,
        supervisor=supervisor,
        routes=IngressRoutes(status, tokens, metrics, supervisor.find, supervisor.logs, files, blobs, tracer, own_log),
        tracer=tracer,
        hardware=hardware,
        served=served,
        revoked=revoked,
        release_pin=ReleasePin(node.data, chosen_key=settings.upgrade.release_key),
    )


async def work(
    settings: WorkerSettings,
    parts: Parts,
    ingress: Ingress,
    stopped: asyncio.Event,
    hurry: asyncio.Event,
    *,
    with_localai: bool,
) -> None:
    """Join and serve orders until `stopped` is set."""
    registration, clock = settings.registration, parts.clock
    http_timeout_s, retry = registration.http_timeout_s, Backoff(registration.retry_first_s, registration.retry_cap_s)
    trust = await run_until(
        stopped,
        establish_trust(
            settings.node.ca, parts.url, parts.identity, timeout_s=http_timeout_s, backoff=retry, clock=clock
        ),
    )
    async with open_controller(parts.url, timeout_s=http_timeout_s, trust=trust) as api:
        registrar = make_registrar(settings, parts, ingress, api, hurry)

        async def fresh_blob_token() -> str:
            return (await registrar.renew()).blob_token

        async def announce_blobs(announced: AnnounceBlobs) -> BlobHints | None:
            who = parts.identity.current
            if not who.node_id or not who.node_token:  # not a member, or of a LocalAI controller
                return None
            return await api.announce_blobs(who.node_id, who.node_token, announced)

        localai: LocalAIOrders | None = None

        def make_localai(backend_parts: BackendParts) -> LocalAIOrders | None:
            nonlocal localai
            if with_localai:
                from corral.worker.localai.wiring import make_localai_orders

                localai = make_localai_orders(settings, backend_parts, parts.user, token=parts.join_token)
            return localai

        await run_until(stopped, parts.hardware.measure_all())
        async with (
            background(parts.hardware.run(), *([sweep_files(settings, clock)] if with_localai else ())),
            open_backends(
                settings,
                parts.supervisor,
                parts.routes.replicas,
                lambda: parts.hardware.report,
                Cluster(
                    parts.url,
                    trust,
                    fresh_blob_token,
                    announce_blobs,
                    registrar.ask_artifacts,
                    parts.served,
                    parts.revoked.revoke,
                    parts.release_pin,
                ),
                clock=clock,
                env=os.environ,
                metrics=parts.metrics,
                wake=parts.wake,
                status=parts.status,
                make_direct=make_localai,
            ) as backends,
        ):
            agent = make_agent(settings, parts, ingress, api, registrar, backends, localai)
            await agent.run(stopped, hurry)


def make_registrar(
    settings: WorkerSettings, parts: Parts, ingress: Ingress, api: ControllerApi, hurry: asyncio.Event
) -> Registrar:
    def describe() -> RegisterNode:
        addresses = advertised_addresses(settings, port=ingress.port, host_name=socket.gethostname())
        offer = ingress.offer(addresses.ingress)
        return describe_node(settings.node, parts.hardware.report, addresses, offer, parts.user)

    async def end_replicas() -> None:
        """The controller does not count the replicas of a deleted node, and the new node may wait for its approval for
        days."""
        await at_most(settings.shutdown.drain_timeout_s, hurry, ingress.wait_idle())
        await parts.supervisor.stop_all()

    return Registrar(
        api,
        parts.identity,
        parts.status,
        parts.metrics,
        settings.registration,
        join_token=parts.join_token,
        describe=describe,
        require_jwt=settings.bus.bus_require_auth and not settings.bus.bus_jwt,
        server_clock=parts.server_clock,
        on_deleted=end_replicas,
        on_release_key=parts.release_pin.learn,
        clock=parts.clock,
    )


async def sweep_files(settings: WorkerSettings, clock: Clock) -> None:
    from corral.worker.localai.wiring import make_file_sweep

    await make_file_sweep(settings, clock).run()


def make_agent(
    settings: WorkerSettings,
    parts: Parts,
    ingress: Ingress,
    api: ControllerApi,
    registrar: Registrar,
    backends: BackendServices,
    localai: LocalAIOrders | None,
) -> Agent:
    async def subscribe(bus: Bus, reply: NodeRegistered, on_stop: Callable[[], None]) -> None:
        if localai is not None:
            addresses = advertised_addresses(settings, port=ingress.port, host_name=socket.gethostname())
            localai.start_session(reply, grpc_address=addresses.grpc)
            await localai.subscribe(bus, reply.id)
        elif reply.protocol == 0:
            raise FatalError("the controller is LocalAI's, and this worker has no LocalAI support")
        await backends.subscriptions.subscribe(bus, reply.id, on_stop=on_stop)

    load_interval_s = settings.heartbeat.load_interval_s
    return Agent(
        settings=settings,
        api=api,
        registrar=registrar,
        hardware=parts.hardware,
        status=parts.status,
        server_clock=parts.server_clock,
        metrics=parts.metrics,
        open_bus=BusOpener(settings.bus, settings.node.data, parts.clock),
        ingress=ingress,
        supervisor=parts.supervisor,
        load=LoadReports(parts.routes.in_flight, boot_id=parts.status.boot_id, interval_s=load_interval_s),
        publisher=backends.publisher,
        reporter=backends.reporter,
        subscribe=subscribe,
        clock=parts.clock,
    )


@contextlib.asynccontextmanager
async def adopted_processes(
    supervisor: Supervisor, status: WorkerStatus, *, leave_timeout_s: float
) -> AsyncIterator[None]:
    """Adopt the processes of an earlier worker. They run on when the block is left, unless a `FatalError` leaves it:
    the node is offline then, and its backends would hold memory and ports that nobody uses."""
    async with supervisor:
        adopted = await supervisor.adopt()
        if adopted:
            log.info("processes adopted", count=len(adopted))
        try:
            yield
        except FatalError:
            if not status.handing_over:  # else the next start adopts them
                await stop_backends(supervisor, asyncio.Event(), leave_timeout_s)
            raise


def make_folders(settings: WorkerSettings) -> None:
    chosen = settings.ingress.local_sockets
    for folder in (settings.node.models_dir, settings.node.backends_dir, *([chosen] if chosen else [])):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700 if folder == chosen else 0o777)
        except OSError as error:
            raise FatalError(f"cannot create the folder {folder}: {error.strerror}; fix its permissions") from error


def read_join_token(settings: WorkerSettings) -> str:
    """A missing token file is no error: a node that has joined needs no join token."""
    if settings.node.token or settings.node.token_file is None:
        return settings.node.token
    try:
        return settings.node.token_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        log.warning("the token file cannot be read", file=str(settings.node.token_file), reason=str(error))
        return ""


def run(settings: WorkerSettings, given: Mapping[str, str | bool] | None = None, watch: Watch | None = None) -> int:
    """The process: logging, signals, exit code. A `FatalError` becomes one line on stderr. `given`, `watch`: see
    `serve`."""
    configure_logging(role="worker", level=settings.log_level, json=settings.log_json)
    successors = Successors(reload_command())
    try:
        succeeds = is_successor(os.environ)
        if succeeds:
            successors.bind_to_keeper()
            watch = None
        return uvloop.run(_serve_until_signalled(settings, successors, succeeds, given or {}, watch))
    except FatalError as error:
        print(f"corral worker: {mask_secrets(error.message)}", file=sys.stderr)
        return 1


async def _serve_until_signalled(
    settings: WorkerSettings,
    successors: Successors,
    succeeds: bool,
    given: Mapping[str, str | bool],
    watch: Watch | None,
) -> int:
    """The exit code; a worker that has handed over may become a keeper instead."""
    stopped, hurry = asyncio.Event(), asyncio.Event()
    requests = iter((stopped, hurry))  # the first signal stops, the second hurries; an order to stop does not count

    def on_signal(number: int) -> None:
        successors.signal_all(number)  # the sender of the signal knows only this process
        next(requests, hurry).set()

    loop = asyncio.get_running_loop()
    freeze_gc_after_start(loop)
    # Unpacking occupies a thread for minutes; other disk access must not wait for it.
    loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="worker"))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGUSR2, successors.start)
    async with background(successors.watch()):
        handed_over = await serve(settings, stopped=stopped, hurry=hurry, succeeds=succeeds, given=given, watch=watch)
    if handed_over:
        log.info("worker has handed over")
        return await successors.keep()
    successors.dismiss()
    log.info("worker has left")
    return 0
