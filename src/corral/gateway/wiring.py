"""Assembles the parts that a gateway of one process and the processes of a larger one have in common.

`main.py` composes the gateway of one process, `processes/` the gateway of several.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TypeVar

from corral.bus.api import BusTls
from corral.contract.http import Patience, Target
from corral.gateway.http.bodies import BodyBudgets, ByteBudget
from corral.gateway.http.controller_relay import ControllerRelay
from corral.gateway.http.cors import Cors
from corral.gateway.http.fast_path import ImmediateRouter, InferenceFastPath
from corral.gateway.http.forward import Forwarder
from corral.gateway.http.handler import GatewayHandler
from corral.gateway.http.inference_api import InferenceApi
from corral.gateway.http.rate_limits import Limiters
from corral.gateway.http.status_routes import GatewayProcesses, StatusRoutes
from corral.gateway.receipts.buffer import FinishedRequest, ReceiptBuffer
from corral.gateway.receipts.metrics import Metrics, RouteClass
from corral.gateway.receipts.running import RunningRequests
from corral.gateway.receipts.sender import ReceiptSender
from corral.gateway.receipts.spans import RequestSpans
from corral.gateway.routing.in_flight import Ejection, InFlight
from corral.gateway.routing.local_sockets import LocalSockets
from corral.gateway.routing.request import Router
from corral.gateway.routing.router import ReplicaRouter
from corral.gateway.settings import GatewaySettings
from corral.gateway.view.cache import ViewCache
from corral.gateway.view.controller_link import ControllerLink, ingress_trust, parse_controller
from corral.gateway.view.fleet import FleetSource
from corral.gateway.view.hints import HintListener
from corral.kit.clock import Clock
from corral.kit.errors import Invalid
from corral.kit.files import read_text
from corral.kit.log import get_log
from corral.kit.server_certificate import ServerCertificate, choose_by_name
from corral.kit.tasks import run_every
from corral.kit.tracing.tracer import Tracer, open_tracer
from corral.relay import Limits, PoolLimits, RelayServer, Timeouts, UpstreamPool

log = get_log(__name__)
E = TypeVar("E", bound=Ejection)

_LAST_RECEIPTS_S = 2.0  # how long sending the last receipts may take when the gateway stops


class GatewayState:
    """The state that requests share and that outlives every view."""

    def __init__(
        self, settings: GatewaySettings, in_flight: InFlight | None = None, limiters: Limiters | None = None
    ) -> None:
        self.in_flight = in_flight or InFlight()
        self.receipts = ReceiptBuffer(settings.receipts_limit)
        self.running = RunningRequests()
        self.limiters = limiters or Limiters()
        self.budgets = BodyBudgets(
            memory=ByteBudget(max(settings.bodies_limit_bytes, settings.body_limit_bytes)),
            disk=ByteBudget(max(settings.spool_limit_bytes, settings.multipart_limit_bytes)),
        )
        self.ejection = new_ejection(Ejection, settings, self.in_flight)


def new_view_cache(settings: GatewaySettings, source: ControllerLink, metrics: Metrics, clock: Clock) -> ViewCache:
    return ViewCache(
        source,
        metrics.view,
        clock,
        check_interval_s=settings.view_check_interval_s,
        full_interval_s=settings.view_interval_s,
        gap_s=settings.view_gap_s,
    )


def new_hint_listener(
    settings: GatewaySettings,
    link: ControllerLink,
    views: ViewCache,
    metrics: Metrics,
    in_flight: InFlight,
    clock: Clock,
    on_running_wanted: Callable[[float], None],
) -> HintListener:
    return HintListener(
        link,
        views.hint,
        metrics.view,
        clock,
        retry_first_s=settings.view_check_interval_s,
        retry_cap_s=settings.hints_retry_s,
        tls=BusTls(ca=settings.bus_ca, certificate=settings.bus_cert, key=settings.bus_key),
        loads=in_flight,
        on_running_wanted=on_running_wanted,
    )


def count_prefix_misses(metrics: Metrics, router: ReplicaRouter) -> None:
    metrics.totals["prefix_disturbed"] = (
        "Prompts that did not go to the replica with their prefix, because it was too busy.",
        lambda: router.prefix_misses,
    )


def count_waiting(metrics: Metrics, router: ReplicaRouter) -> None:
    metrics.gauges["waiting"] = (
        "Requests that wait for a slot or for a cold model.",
        lambda: sum(router.waiting().values()),
    )


def new_ejection(kind: type[E], settings: GatewaySettings, in_flight: InFlight) -> E:
    return kind(
        in_flight,
        lambda seconds, call: asyncio.get_running_loop().call_later(seconds, call),
        first_s=settings.routing.eject_s,
        cap_s=settings.routing.eject_cap_s,
    )


def local_sockets(settings: GatewaySettings, clock: Clock) -> LocalSockets | None:
    return None if settings.local_sockets is None else LocalSockets(settings.local_sockets, clock.monotonic)


def build_handler(
    settings: GatewaySettings,
    fleets: FleetSource,
    router: Router,
    metrics: Metrics,
    clock: Clock,
    *,
    gateway_key: str,
    state: GatewayState | None = None,
    processes: GatewayProcesses | None = None,
    tracer: Tracer | None = None,
) -> GatewayHandler:
    """The handler for the relay. `bench/` builds one too, with a fleet and a router that never change."""
    state = state or GatewayState(settings)
    spans = None if tracer is None else RequestSpans(tracer, state.receipts)
    cors = Cors(settings.cors_origins, max_age_s=settings.cors_max_age_s)
    patience = Patience(settings.replica_first_byte_s, settings.replica_idle_s)
    counts = metrics.routes[RouteClass.INFERENCE]
    counts.on_counted = state.receipts.add_finished if spans is None else _with_spans(state.receipts, spans)
    forwarder = Forwarder(
        fleets,
        router,
        counts,
        state.receipts,
        state.ejection,
        clock,
        cors,
        settings.routing,
        patience,
        spans,
        state.running,
    )
    metrics.totals |= {
        "streams_resumed": (
            "Streams that a replica broke off and that were completed.",
            lambda: forwarder.resumer.resumed,
        ),
        "streams_not_resumed": (
            "Streams of models with resume_streams that a replica broke off and that could not be completed.",
            lambda: forwarder.resumer.given_up,
        ),
        "replica_retries": (
            "Requests sent to another replica after the first was not reached.",
            lambda: forwarder.retries,
        ),
        "ejections": (
            "Times a replica got no requests for a while because it was not reached.",
            lambda: state.ejection.count,
        ),
        "receipts_lost": ("Receipts dropped because the buffer was full.", lambda: state.receipts.lost),
    }
    metrics.gauges |= {
        "body_bytes": ("Bytes of JSON bodies of requests in progress.", lambda: state.budgets.memory.used_bytes),
        "spooled_bytes": ("Bytes of multipart bodies of requests in progress.", lambda: state.budgets.disk.used_bytes),
    }
    api = InferenceApi(
        fleets,
        forwarder,
        state.limiters,
        state.budgets,
        clock,
        cors=cors,
        body_limit_bytes=settings.body_limit_bytes,
        retry_after_s=settings.routing.retry_after_s,
        multipart_limit_bytes=settings.multipart_limit_bytes,
        spool_folder=str(settings.spool_folder) if settings.spool_folder else None,
    )
    controller = ControllerRelay(
        parse_controller(settings.controller).target,
        gateway_key,
        metrics.routes[RouteClass.CONTROLLER],
        patience=Patience(settings.controller_first_byte_s, settings.controller_idle_s),
        retry_after_s=settings.routing.retry_after_s,
    )
    status = StatusRoutes(fleets, metrics, clock, retry_after_s=settings.routing.retry_after_s, processes=processes)
    handler = GatewayHandler(api, forwarder, status, controller, metrics, clock)
    # Both settings add headers to every response, which the fast path cannot.
    if isinstance(router, ImmediateRouter) and not cors.enabled and not settings.routing.expose_node_header:
        handler.fast_path = InferenceFastPath(
            fleets,
            router,
            counts,
            handler.handle_prepared,
            state.limiters,
            clock.monotonic,
            patience=patience,
            body_limit_bytes=settings.body_limit_bytes,
            spans=spans,
        )
    return handler


def _with_spans(receipts: ReceiptBuffer, spans: RequestSpans) -> Callable[[list[FinishedRequest]], None]:
    def on_counted(finished: list[FinishedRequest]) -> None:
        receipts.add_finished(finished)
        spans.record_finished()

    return on_counted


def new_tracer(settings: GatewaySettings, metrics: Metrics, server_now: Callable[[], float]) -> Tracer | None:
    tracer = open_tracer(settings.traces, "corral-gateway", server_now)
    exporter = None if tracer is None else tracer.exporter
    if exporter is not None:
        exporter.before_sending = metrics.routes[RouteClass.INFERENCE].count_finished
    metrics.totals |= {
        "spans_sent": ("Spans that the collector of traces accepted.", lambda: exporter.sent if exporter else 0),
        "traces_dropped": (
            "Traced requests whose spans were not sent: the collector was away for too long, or refused them.",
            lambda: exporter.dropped if exporter else 0,
        ),
    }
    return tracer


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
        raise Invalid(f"there is no gateway key: {file} is {'absent' if key is None else 'empty'}")
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


def new_trust(
    settings: GatewaySettings, controller: Target, tls: ssl.SSLContext | None
) -> Callable[[Target], ssl.SSLContext]:
    """TLS trust by target: different CAs may sign the controller's and the workers' certificates."""
    workers = ingress_trust(settings.ingress_ca or settings.controller_ca)

    def trust(target: Target) -> ssl.SSLContext:
        return tls if tls is not None and target == controller else workers

    return trust


@contextlib.asynccontextmanager
async def open_server(
    settings: GatewaySettings,
    handler: GatewayHandler,
    tls: Callable[[Target], ssl.SSLContext],
    metrics: Metrics,
    tls_context: ssl.SSLContext | None,
) -> AsyncIterator[RelayServer]:
    """A server that does not listen yet."""
    pool = UpstreamPool(pool_limits(settings), tls=tls, counters=metrics.relay)
    server = RelayServer(
        handler,
        relay_limits(settings),
        pool=pool,
        ssl=tls_context,
        counters=metrics.relay,
        fast_path=handler.fast_path,
    )
    try:
        yield server
    finally:
        await server.close()
        await pool.close()


async def send_last_receipts(sender: ReceiptSender) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_RECEIPTS_S):
            await sender.run_once()


async def drain(server: RelayServer, timeout_s: float) -> None:
    """Accept no more connections, let running requests end within `timeout_s`, cut the rest."""
    log.info("gateway stops; running requests may end", running=server.running)
    cut = await server.drain(timeout_s)
    if cut:
        log.warning("requests were cut off", requests=cut, waited_s=float(timeout_s))


def check_listeners(listeners: Sequence[socket.socket]) -> None:
    if any(each.family not in (socket.AF_INET, socket.AF_INET6) for each in listeners):
        raise Invalid("the socket passed to the gateway is not TCP: its systemd unit needs ListenStream=ADDRESS:PORT")


@contextlib.contextmanager
def explain_listen_errors(settings: GatewaySettings) -> Iterator[None]:
    where = f"{settings.host}:{settings.port}"
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Invalid(f"{where} is in use by another program; choose another with --port") from error
        raise Invalid(f"cannot listen on {where}: {error.strerror or error}") from error


async def watch_certificates(
    certificates: Sequence[ServerCertificate], settings: GatewaySettings, clock: Clock
) -> None:
    async def reload() -> None:
        for each in certificates:
            await each.reload_if_changed()

    await run_every("certificate", settings.tls_check_s, reload, clock=clock)


def server_certificates(settings: GatewaySettings) -> tuple[ServerCertificate, ...]:
    """Of the public port, the fallback last; empty without TLS. Raises Invalid."""
    pairs = (
        ("tls", settings.tls_cert, settings.tls_key),
        ("fallback", settings.fallback_cert, settings.fallback_key),
    )
    found = []
    for flag, certificate, key in pairs:
        if certificate is not None and key is not None:
            found.append(ServerCertificate(certificate, key, protocols=("http/1.1",)))
        elif certificate is not None or key is not None:
            raise Invalid(f"TLS needs both --{flag}-cert and --{flag}-key")
    if settings.fallback_cert is not None and settings.tls_cert is None:
        raise Invalid("--fallback-cert needs --tls-cert")
    return tuple(found)


def tls_context(certificates: Sequence[ServerCertificate]) -> ssl.SSLContext | None:
    if len(certificates) == 2:
        return choose_by_name(*certificates)
    return certificates[0].context if certificates else None
