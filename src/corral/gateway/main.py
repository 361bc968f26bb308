"""The gateway's composition root for one process: read this first. It closes what it opens, in reverse order.

`serve` runs until it is stopped, then lets running requests end. `run` is the process around it: event loop, logging,
signals, exit code. With several processes (`--processes`), `run` starts `processes/` instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import uvloop

from corral.contract.view import FleetView
from corral.gateway import wiring
from corral.gateway.processes.child import FIRST_VIEW_S, read_inherited, serve_child
from corral.gateway.processes.parent import serve_processes
from corral.gateway.receipts.metrics import Metrics, RouteClass
from corral.gateway.receipts.running import RunningReporter
from corral.gateway.receipts.sender import ReceiptSender
from corral.gateway.routing.ingress_monitor import IngressMonitor
from corral.gateway.routing.load_watcher import LoadWatcher
from corral.gateway.routing.request import Router
from corral.gateway.routing.router import ReplicaRouter
from corral.gateway.settings import GatewaySettings
from corral.gateway.view.cache import ViewCache
from corral.gateway.view.controller_link import controller_trust, open_link, parse_controller
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import CorralError
from corral.kit.hosts import is_in_clear
from corral.kit.log import configure_logging, get_log
from corral.kit.process import freeze_gc_after_start
from corral.kit.settings import shown_changes
from corral.kit.sockets import report_ready, take_listeners
from corral.relay import RelayServer

log = get_log(__name__)


@dataclass(frozen=True)
class Gateway:
    """A gateway that serves."""

    settings: GatewaySettings
    server: RelayServer
    views: ViewCache
    metrics: Metrics
    running: RunningReporter
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{'https' if self.settings.tls_cert else 'http'}://{host}:{self.port}"

    async def drain(self) -> None:
        await wiring.drain(self.server, self.settings.drain_timeout_s)


async def serve(
    settings: GatewaySettings,
    *,
    clock: Clock | None = None,
    stopped: asyncio.Event | None = None,
    listeners: Sequence[socket.socket] = (),
) -> None:
    """Serve until `stopped` is set. Raises `CorralError` with one line that says what must be fixed before it can
    start. `listeners`: sockets that another process opened; without any, it listens on the settings' host and port."""
    async with open_gateway(settings, clock or SystemClock(), listeners=listeners) as gateway:
        report_ready(os.environ)
        log.info("gateway serves", url=gateway.url, controller=settings.controller)
        for owner, url in (("clients", gateway.url), ("the gateway", settings.controller)):
            if is_in_clear(url):
                log.warning("plain http beyond this machine: others can read the keys", keys_of=owner, url=url)
        await (stopped or asyncio.Event()).wait()
        await gateway.drain()


@contextlib.asynccontextmanager
async def open_gateway(
    settings: GatewaySettings,
    clock: Clock,
    *,
    router: Router | None = None,
    listeners: Sequence[socket.socket] = (),
) -> AsyncIterator[Gateway]:
    """`router` replaces the gateway's own, in tests."""
    address = parse_controller(settings.controller)
    gateway_key = wiring.read_gateway_key(settings)
    tls = controller_trust(settings.controller_ca) if address.target.tls else None
    metrics = Metrics()
    state = wiring.GatewayState(settings)
    async with open_link(address, gateway_key, tls=tls, timeout_s=settings.controller_timeout_s) as link:
        views = wiring.new_view_cache(settings, link, metrics, clock)
        running = RunningReporter(link, clock, views.server_now, state.running)
        listener = wiring.new_hint_listener(settings, link, views, metrics, state.in_flight, clock, running.on_wanted)
        loads = LoadWatcher(link, views.hint, clock, poll_s=settings.routing.load_poll_s)
        replicas = ReplicaRouter(
            state.in_flight,
            loads,
            clock,
            settings.routing,
            views.refresh,
            controller=address.target,
            local_sockets=wiring.local_sockets(settings, clock),
        )

        def on_view(view: FleetView) -> None:
            state.limiters.retain({key.id for key in view.keys})
            replicas.apply_view(view)

        views.on_view = on_view
        wiring.count_prefix_misses(metrics, replicas)
        wiring.count_waiting(metrics, replicas)
        sender = ReceiptSender(
            state.receipts,
            metrics.routes[RouteClass.INFERENCE],
            link,
            clock,
            views.server_now,
            replicas.waiting,
            interval_s=settings.receipts_interval_s,
            take_pressure=replicas.take_pressure,
        )
        tracer = wiring.new_tracer(settings, metrics, views.server_now)
        handler = wiring.build_handler(
            settings, views, router or replicas, metrics, clock, gateway_key=gateway_key, state=state, tracer=tracer
        )
        trust = wiring.new_trust(settings, address.target, tls)
        certificates = wiring.server_certificates(settings)
        context = wiring.tls_context(certificates)
        async with wiring.open_server(settings, handler, trust, metrics, context) as server:
            if listeners:
                await _read_first_view(views)
            port = await _listen(server, settings, listeners)  # before the task group, which would wrap its error
            monitor = IngressMonitor(
                server.pool, state.ejection, replicas.nodes_at, clock, silent_s=settings.ingress_silent_s
            )
            running.use(server.running_forwards)
            loops = {
                "view": views.run,
                "ingress monitor": monitor.run,
                "receipts": sender.run,
                "requests under way": running.run,
            }
            if tracer is not None:
                loops["traces"] = tracer.exporter.run
            if settings.hints:
                loops["hints"] = listener.run
            if certificates:
                loops["certificate"] = partial(wiring.watch_certificates, certificates, settings, clock)
            async with asyncio.TaskGroup() as tasks:
                tasks_of_loops = [tasks.create_task(loop(), name=name) for name, loop in loops.items()]
                try:
                    yield Gateway(settings, server, views, metrics, running, port)
                finally:
                    for task in tasks_of_loops:
                        task.cancel()
                    await loads.close()
                    await wiring.send_last_receipts(sender)


async def _read_first_view(views: ViewCache) -> None:
    """Who restarts a gateway keeps its listening sockets: clients wait in their queues for this moment, instead of
    getting 503 from a gateway that knows no key yet. Without a controller it serves as it is."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_VIEW_S):
            await views.run_once()


async def _listen(server: RelayServer, settings: GatewaySettings, listeners: Sequence[socket.socket]) -> int:
    """Returns the port."""
    wiring.check_listeners(listeners)
    ports = [await server.listen_on(each) for each in listeners]
    if not ports:
        with wiring.explain_listen_errors(settings):
            ports = [await server.listen(settings.host, settings.port)]
    return ports[0]


def run(settings: GatewaySettings) -> int:
    """The process. Returns 0 after it was stopped, and 1, with one line on stderr, for an error that needs a fix."""
    configure_logging(role="gateway", level=settings.log_level, json=settings.log_json)
    inherited = read_inherited(os.environ)
    if inherited is None:
        log.info("gateway starts", **shown_changes(settings))
    _raise_file_limit()
    try:
        if inherited is not None:
            uvloop.run(_until_signalled(partial(serve_child, settings, inherited)))
        elif settings.processes > 1:
            uvloop.run(_until_signalled(partial(serve_processes, settings, take_listeners(os.environ))))
        else:
            uvloop.run(_until_signalled(partial(serve, settings, listeners=take_listeners(os.environ))))
    except CorralError as error:
        print(f"corral gateway: {error.message}", file=sys.stderr)
        return 1
    return 0


def _raise_file_limit() -> None:
    """Shells allow 1,024 open files; every connection to a client or a worker is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _until_signalled(serving: Callable[..., Awaitable[None]]) -> None:
    """`serving` takes `stopped`, an event."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    freeze_gc_after_start(loop)
    task = asyncio.ensure_future(serving(stopped=stopped))

    def on_signal() -> None:
        if stopped.is_set():  # the second signal: stop at once
            task.cancel()
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        await task
