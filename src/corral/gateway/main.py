"""The gateway, composed: read this first. What is opened here is closed here, in reverse.

`serve` runs until it is told to stop, then lets running requests end. `run` is the process around it: event loop,
logging, signals, exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import uvloop

from corral.bus.api import BusTls
from corral.contract.http import Patience, Target
from corral.contract.view import FleetView
from corral.gateway.admission import FleetSource
from corral.gateway.bodies import BodyRoom, Rooms
from corral.gateway.controller_relay import ControllerRelay
from corral.gateway.cors import Cors
from corral.gateway.door import Door
from corral.gateway.hints import HintListener
from corral.gateway.inflight import Ejection, InFlight
from corral.gateway.ingress_monitor import IngressMonitor
from corral.gateway.keeper import ViewKeeper
from corral.gateway.limits import Limiters
from corral.gateway.link import controller_trust, ingress_trust, open_link, parse_controller
from corral.gateway.loads import Loads
from corral.gateway.metrics import Metrics, RouteClass
from corral.gateway.own import OwnRoutes, Siblings
from corral.gateway.pick import Policy
from corral.gateway.receipts import ReceiptRing, ReceiptSender
from corral.gateway.router import ReplicaRouter, RouterOptions
from corral.gateway.serving import Serving, ServingOptions
from corral.gateway.settings import GatewaySettings
from corral.gateway.shortcut import PromptRouter, Shortcut
from corral.gateway.v1 import V1, Router
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import CorralError, Invalid
from corral.kit.files import read_text
from corral.kit.hosts import is_in_clear
from corral.kit.log import configure_logging, get_log
from corral.kit.memory import settle_after_start
from corral.kit.settings import shown
from corral.kit.socket_activation import report_ready, take_listeners
from corral.relay import Limits, PoolLimits, RelayServer, Timeouts, UpstreamPool

log = get_log(__name__)
E = TypeVar("E", bound=Ejection)

LAST_RECEIPTS_S = 2.0  # how long the last ones may take when the gateway stops


@dataclass(frozen=True)
class Gateway:
    """A gateway that serves."""

    settings: GatewaySettings
    server: RelayServer
    keeper: ViewKeeper
    metrics: Metrics
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        return f"{'https' if self.settings.tls_cert else 'http'}://{host}:{self.port}"

    async def drain(self) -> None:
        await drain(self.server, self.settings.drain_timeout_s)


async def drain(server: RelayServer, timeout_s: float) -> None:
    """Take no more, let what runs end within its time, cut the rest."""
    log.info("gateway stops; running requests may end", running=server.running)
    cut = await server.drain(timeout_s)
    if cut:
        log.warning("requests were cut off", requests=cut, waited_s=float(timeout_s))


async def serve(
    settings: GatewaySettings,
    *,
    clock: Clock | None = None,
    stopped: asyncio.Event | None = None,
    listeners: Sequence[socket.socket] = (),
) -> None:
    """Until `stopped` is set. `CorralError` says in one line what a person must mend before it can start. `listeners`:
    sockets to accept on, opened by another process; without any, it listens where the settings say."""
    async with open_gateway(settings, clock or SystemClock(), listeners=listeners) as gateway:
        report_ready(os.environ)
        log.info("gateway serves", url=gateway.url, controller=settings.controller)
        for whose, url in (("clients", gateway.url), ("the gateway", settings.controller)):
            if is_in_clear(url):
                log.warning("plain http beyond this machine: keys can be read on the way", keys_of=whose, url=url)
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
    address = parse_controller(settings.controller)
    gateway_key = read_gateway_key(settings)
    tls = controller_trust(settings.controller_ca) if address.target.tls else None
    metrics = Metrics()
    state = State(settings)
    async with open_link(address, gateway_key, tls=tls, timeout_s=settings.controller_timeout_s) as link:
        keeper = ViewKeeper(
            link,
            metrics.view,
            clock,
            check_interval_s=settings.view_check_interval_s,
            full_interval_s=settings.view_interval_s,
            gap_s=settings.view_gap_s,
        )
        listener = HintListener(
            link,
            keeper.hint,
            metrics.view,
            clock,
            retry_first_s=settings.view_check_interval_s,
            retry_cap_s=settings.hints_retry_s,
            tls=BusTls(ca=settings.bus_ca, certificate=settings.bus_cert, key=settings.bus_key),
            loads=state.in_flight,
        )
        loads = Loads(link, keeper.hint, clock, poll_s=settings.load_poll_s)
        own = ReplicaRouter(
            state.in_flight,
            loads,
            clock,
            router_options(settings),
            keeper.look_again,
            controller=address.target,
        )

        def took(view: FleetView) -> None:
            state.limiters.keep({key.id for key in view.keys})
            own.took(view)

        keeper.on_view = took
        count_disturbed(metrics, own)
        count_waiting(metrics, own)
        counts = metrics.routes[RouteClass.INFERENCE]
        sender = ReceiptSender(
            state.ring,
            counts,
            link,
            clock,
            keeper.server_now,
            own.waiting,
            interval_s=settings.receipts_interval_s,
            take_pressure=own.take_pressure,
        )
        door = build_door(settings, keeper, router or own, metrics, clock, gateway_key=gateway_key, state=state)
        async with (
            open_server(settings, door, trust_of(settings, address.target, tls), metrics) as server,
            _listening(server, settings, listeners) as port,
            asyncio.TaskGroup() as tasks,
        ):
            monitor = IngressMonitor(
                server.pool, state.ejection, own.nodes_at, clock, silent_s=settings.ingress_silent_s
            )
            running = [
                tasks.create_task(keeper.run(), name="view"),
                tasks.create_task(monitor.run(), name="ingress monitor"),
                tasks.create_task(sender.run(), name="receipts"),
            ]
            if settings.hints:
                running.append(tasks.create_task(listener.run(), name="hints"))
            try:
                yield Gateway(settings, server, keeper, metrics, port)
            finally:
                for task in running:
                    task.cancel()
                await loads.close()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_RECEIPTS_S):
                        await sender.send()


def count_disturbed(metrics: Metrics, router: ReplicaRouter) -> None:
    metrics.totals["prefix_disturbed"] = (
        "Prompts that did not go where their beginning is known, because that replica was too busy.",
        lambda: router.disturbed,
    )


def count_waiting(metrics: Metrics, router: ReplicaRouter) -> None:
    metrics.gauges["waiting"] = (
        "Requests that wait for a slot or for a cold model.",
        lambda: sum(router.waiting().values()),
    )


class State:
    """What requests share, and what outlives every view."""

    def __init__(
        self, settings: GatewaySettings, in_flight: InFlight | None = None, limiters: Limiters | None = None
    ) -> None:
        self.in_flight = in_flight or InFlight()
        self.ring = ReceiptRing(settings.receipts_limit)
        self.limiters = limiters or Limiters()
        self.rooms = Rooms(
            memory=BodyRoom(max(settings.bodies_limit_bytes, settings.body_limit_bytes)),
            disk=BodyRoom(max(settings.spool_limit_bytes, settings.multipart_limit_bytes)),
        )
        self.ejection = new_ejection(Ejection, settings, self.in_flight)


def new_ejection(kind: type[E], settings: GatewaySettings, in_flight: InFlight) -> E:
    return kind(
        in_flight,
        lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call),
        first_s=settings.eject_s,
        cap_s=settings.eject_cap_s,
    )


def router_options(settings: GatewaySettings) -> RouterOptions:
    return RouterOptions(
        load_wait_s=settings.load_wait_s,
        queue_wait_s=settings.queue_wait_s,
        queue_limit=settings.queue_limit,
        policy=Policy(prefix_cache=settings.prefix_cache),
        prefix_ttl_s=settings.prefix_cache_ttl_s,
        prefix_half_life_s=settings.prefix_half_life_s,
        retry_after_s=settings.retry_after_s,
    )


def build_door(
    settings: GatewaySettings,
    fleets: FleetSource,
    router: Router,
    metrics: Metrics,
    clock: Clock,
    *,
    gateway_key: str,
    state: State | None = None,
    siblings: Siblings | None = None,
) -> Door:
    """The handler for the relay. `bench/` builds one too, around a fleet and a router that never change."""
    state = state or State(settings)
    cors = Cors(settings.cors_origins, max_age_s=settings.cors_max_age_s)
    patience = Patience(settings.replica_first_byte_s, settings.replica_idle_s)
    counts = metrics.routes[RouteClass.INFERENCE]
    counts.counted = state.ring.keep
    options = ServingOptions(patience, settings.retry_after_s, settings.tries, settings.expose_node_header)
    serving = Serving(fleets, router, counts, state.ring, state.ejection, clock, cors, options)
    metrics.totals |= {
        "replica_retries": ("Requests sent to another replica, the first not reached.", lambda: serving.retries),
        "ejections": ("Times a replica was left alone because it was not reached.", lambda: state.ejection.count),
        "receipts_lost": ("Receipts that found no room.", lambda: state.ring.lost),
    }
    metrics.gauges |= {
        "body_bytes": ("JSON bodies of requests under way.", lambda: state.rooms.memory.taken_bytes),
        "spooled_bytes": ("Bodies with files in them of requests under way.", lambda: state.rooms.disk.taken_bytes),
    }
    v1 = V1(
        fleets,
        serving,
        state.limiters,
        state.rooms,
        clock,
        cors=cors,
        body_limit_bytes=settings.body_limit_bytes,
        retry_after_s=settings.retry_after_s,
        multipart_limit_bytes=settings.multipart_limit_bytes,
        spool_folder=str(settings.spool_folder) if settings.spool_folder else None,
    )
    controller = ControllerRelay(
        parse_controller(settings.controller).target,
        gateway_key,
        metrics.routes[RouteClass.CONTROLLER],
        patience=Patience(settings.controller_first_byte_s, settings.controller_idle_s),
        retry_after_s=settings.retry_after_s,
    )
    own = OwnRoutes(fleets, metrics, clock, retry_after_s=settings.retry_after_s, siblings=siblings)
    door = Door(v1, own, controller, metrics, clock)
    # With either of them every answer is changed on its way.
    if isinstance(router, PromptRouter) and not cors.enabled and not settings.expose_node_header:
        door.shortcut = Shortcut(
            fleets,
            router,
            counts,
            door.carry_on,
            state.limiters,
            clock.monotonic,
            patience=patience,
            body_limit_bytes=settings.body_limit_bytes,
        )
    return door


def read_gateway_key(settings: GatewaySettings) -> str:
    file = settings.gateway_key_file
    if file is None:
        if not settings.gateway_key:
            raise Invalid("the gateway needs a key: --gateway-key-file (or CORRAL_GATEWAY_KEY_FILE)")
        return settings.gateway_key
    try:
        key = read_text(file)
    except OSError as error:
        raise Invalid(f"the gateway key cannot be read: {file}: {error.strerror}") from error
    if not key:
        raise Invalid(f"the gateway key is not there: {file} is {'absent' if key is None else 'empty'}")
    return key


def relay_limits(settings: GatewaySettings) -> Limits:
    return Limits(
        head_bytes=settings.head_limit_bytes,
        connections=settings.max_connections,
        timeouts=Timeouts(
            handshake_s=settings.client_handshake_s,
            head_s=settings.client_head_s,
            keep_alive_s=settings.client_keep_alive_s,
            body_idle_s=settings.client_body_idle_s,
            body_grace_s=settings.client_body_grace_s,
            write_stall_s=settings.client_stall_s,
            tunnel_idle_s=settings.tunnel_idle_s,
        ),
    )


def pool_limits(settings: GatewaySettings) -> PoolLimits:
    return PoolLimits(
        connect_s=settings.connect_timeout_s,
        patience=Patience(settings.replica_first_byte_s, settings.replica_idle_s),
        dead_after_s=settings.upstream_dead_s,
        send_stall_s=settings.upstream_stall_s,
        idle_s=settings.upstream_idle_s,
        tunnel_idle_s=settings.tunnel_idle_s,
    )


def trust_of(
    settings: GatewaySettings, controller: Target, tls: ssl.SSLContext | None
) -> Callable[[Target], ssl.SSLContext]:
    """What is believed about certificates: the controller's and the workers' may be signed by different CAs."""
    workers = ingress_trust(settings.ingress_ca or settings.controller_ca)

    def trust(target: Target) -> ssl.SSLContext:
        return tls if tls is not None and target == controller else workers

    return trust


@contextlib.asynccontextmanager
async def open_server(
    settings: GatewaySettings, door: Door, tls: Callable[[Target], ssl.SSLContext], metrics: Metrics
) -> AsyncIterator[RelayServer]:
    """It does not listen yet."""
    pool = UpstreamPool(pool_limits(settings), tls=tls, counters=metrics.relay)
    server = RelayServer(
        door,
        relay_limits(settings),
        pool=pool,
        ssl=server_tls(settings),
        counters=metrics.relay,
        shortcut=door.shortcut,
    )
    try:
        yield server
    finally:
        await server.close()
        await pool.close()


@contextlib.asynccontextmanager
async def _listening(
    server: RelayServer, settings: GatewaySettings, listeners: Sequence[socket.socket]
) -> AsyncIterator[int]:
    """The port. Closing the server ends it."""
    check_listeners(listeners)
    ports = [await server.listen_on(each) for each in listeners]
    if not ports:
        with explained_listening(settings):
            ports = [await server.listen(settings.host, settings.port)]
    yield ports[0]


def check_listeners(listeners: Sequence[socket.socket]) -> None:
    if any(each.family not in (socket.AF_INET, socket.AF_INET6) for each in listeners):
        raise Invalid("the socket handed to the gateway is not TCP: its unit needs ListenStream=ADDRESS:PORT")


@contextlib.contextmanager
def explained_listening(settings: GatewaySettings) -> Iterator[None]:
    where = f"{settings.host}:{settings.port}"
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Invalid(f"{where} is in use by another program; choose another with --port") from error
        raise Invalid(f"cannot listen on {where}: {error.strerror or error}") from error


def server_tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise Invalid("TLS needs both --tls-cert and --tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(str(settings.tls_cert), str(settings.tls_key))
    except (OSError, ssl.SSLError) as error:
        raise Invalid(
            f"TLS certificate and key cannot be used: {settings.tls_cert}, {settings.tls_key}: {error}"
        ) from error
    return context


def run(settings: GatewaySettings) -> int:
    """The process: 0 when it was told to stop, 1 with one line on stderr when a person must mend something."""
    from corral.gateway.processes.child import take_place  # they use what is above

    configure_logging(role="gateway", level=settings.log_level, json=settings.log_json)
    place = take_place(os.environ)
    if place is None:
        log.info("gateway starts", **shown(settings))
    _raise_file_limit()
    try:
        if place is not None:
            from corral.gateway.processes.child import serve_child

            uvloop.run(_until_signalled(partial(serve_child, settings, place)))
        elif settings.processes > 1:
            from corral.gateway.processes.parent import serve_processes

            uvloop.run(_until_signalled(partial(serve_processes, settings, take_listeners(os.environ))))
        else:
            uvloop.run(_until_signalled(partial(serve, settings, listeners=take_listeners(os.environ))))
    except CorralError as error:
        print(f"corral gateway: {error.message}", file=sys.stderr)
        return 1
    return 0


def _raise_file_limit() -> None:
    """Shells hand down 1,024 open files; every client connection is one, and so is every one to a worker."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _until_signalled(serving: Callable[..., Awaitable[None]]) -> None:
    """`serving` takes `stopped`, an event."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    settle_after_start(loop)
    task = asyncio.ensure_future(serving(stopped=stopped))

    def told_to_stop() -> None:
        if stopped.is_set():  # told twice: somebody is in a hurry
            task.cancel()
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop)
    with contextlib.suppress(asyncio.CancelledError):
        await task
