"""Every setting of `corral gateway`."""

# ruff: noqa: RUF009  (`_span` gives a dataclass field, as `setting` does)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.contract.local_sockets import check_socket_folder
from corral.gateway.routing.settings import RoutingSettings
from corral.gateway.view.controller_link import parse_controller
from corral.kit.settings import BadSettings, Seconds, group, positive, setting, valid_log_level, valid_port
from corral.kit.tracing.settings import TraceSettings

MIB = 1024 * 1024
MAX_PROCESSES = 64


def _processes(value: int) -> str | None:
    return None if 1 <= value <= MAX_PROCESSES else f"must be between 1 and {MAX_PROCESSES}"


def _controller(value: str) -> str | None:
    try:
        parse_controller(value)
    except ValueError as error:
        return str(error)
    return None


def _origins(value: tuple[str, ...]) -> str | None:
    bad = [origin for origin in value if origin != "*" and not origin.startswith(("http://", "https://"))]
    return f"{bad[0]!r} is not an origin; write https://host[:port] or *" if bad else None


def _span(help: str, seconds: float) -> Any:
    """One of the relay's patience limits: sound as they are, for most."""
    return setting(help, default=Seconds(seconds), check=positive, advanced=True)


@dataclass(frozen=True)
class GatewaySettings:
    controller: str = setting("address of the controller: unix:/path or http(s)://host:port", check=_controller)
    controller_ca: Path | None = setting("CA that signed the controller's certificate (PEM)", default=None)
    gateway_key_file: Path | None = setting("file with the key of this gateway for the controller", default=None)
    gateway_key: str = setting("the key itself, if a file is not possible; prefer the file", default="", secret=True)

    host: str = setting("address to listen on for clients", default="127.0.0.1")
    port: int = setting("port to listen on for clients", default=8080, check=valid_port)
    processes: int = setting(
        "number of processes that serve requests and share the port; at most the number of free cores",
        default=1,
        check=_processes,
    )
    tls_cert: Path | None = setting(
        "certificate for clients (PEM, with its chain); a changed file is used without a restart", default=None
    )
    tls_key: Path | None = setting("key of that certificate (PEM)", default=None)
    fallback_cert: Path | None = setting(
        "certificate for clients that ask for another host name than those of --tls-cert, or for an address (PEM)",
        default=None,
        advanced=True,
    )
    fallback_key: Path | None = setting("key of that certificate (PEM)", default=None, advanced=True)
    tls_check_s: Seconds = setting(
        "interval between looks at the files of the certificate", default=Seconds(10), check=positive, advanced=True
    )
    cors_origins: tuple[str, ...] = setting(
        "web origins whose pages may call /v1/…; * = any; empty = none", default=(), check=_origins
    )
    cors_max_age_s: Seconds = setting(
        "how long a browser may cache the answer to a preflight request",
        default=Seconds(600),
        check=positive,
        advanced=True,
    )
    hints: bool = setting("receive changes at once over the bus; without this the gateway polls for them", default=True)
    hints_retry_s: Seconds = setting(
        "longest delay before the gateway asks the controller again for the address of the bus",
        default=Seconds(30),
        check=positive,
        advanced=True,
    )

    bus_ca: Path | None = setting(
        "CA of the bus (PEM); empty = the one that the controller reports",
        default=None,
        aliases=("LOCALAI_NATS_TLS_CA",),
        advanced=True,
    )
    bus_cert: Path | None = setting(
        "client certificate for the bus (PEM)", default=None, aliases=("LOCALAI_NATS_TLS_CERT",), advanced=True
    )
    bus_key: Path | None = setting(
        "client key for the bus (PEM)", default=None, aliases=("LOCALAI_NATS_TLS_KEY",), advanced=True
    )

    view_check_interval_s: Seconds = setting(
        "interval between checks whether the view changed; a revoked key works at most this long without hints",
        default=Seconds(1),
        check=positive,
    )
    view_interval_s: Seconds = setting("interval between full reads of the view", default=Seconds(15), check=positive)
    view_gap_s: Seconds = setting(
        "minimum time between two reads of the view", default=Seconds(0.05), check=positive, advanced=True
    )
    controller_timeout_s: Seconds = setting(
        "timeout of requests of the gateway to the controller", default=Seconds(5), check=positive
    )
    drain_timeout_s: Seconds = setting(
        "how long running requests may continue when the gateway stops", default=Seconds(30)
    )

    routing: RoutingSettings = group(RoutingSettings)
    ingress_ca: Path | None = setting(
        "CA that signed the certificates of the workers (PEM); empty = the one that the controller reports",
        default=None,
    )
    local_sockets: Path | None = setting(
        "folder of unix sockets of workers on this machine, used in place of TCP; `corral up` sets it",
        default=None,
        check=check_socket_folder,
        advanced=True,
    )
    receipts_interval_s: Seconds = setting(
        "interval between sending receipts to the controller", default=Seconds(1), check=positive, advanced=True
    )
    receipts_limit: int = setting(
        "maximum number of receipts kept until then; further ones are only counted",
        default=4096,
        check=positive,
        advanced=True,
    )

    body_limit_bytes: int = setting("largest JSON body under /v1/", default=64 * MIB, check=positive)
    bodies_limit_bytes: int = setting(
        "maximum total size of JSON bodies of running requests; beyond it requests get 503. One body always fits",
        default=1024 * MIB,
        check=positive,
        advanced=True,
    )
    multipart_limit_bytes: int = setting(
        "largest multipart body under /v1/; stored on disk", default=256 * MIB, check=positive
    )
    spool_limit_bytes: int = setting(
        "maximum total size of multipart bodies of running requests; beyond it requests get 503. One body always fits",
        default=8192 * MIB,
        check=positive,
        advanced=True,
    )
    spool_folder: Path | None = setting(
        "folder of multipart bodies; empty = the folder for temporary files of the system", default=None, advanced=True
    )
    head_limit_bytes: int = setting("largest head of a request", default=64 * 1024, check=positive, advanced=True)
    max_connections: int = setting("maximum number of client connections", default=10_000, check=positive)
    client_handshake_s: Seconds = _span("timeout of the TLS handshake of a client", 10)
    client_head_s: Seconds = _span("timeout for a client to send the head of a request", 15)
    client_keep_alive_s: Seconds = _span("idle timeout of a client connection between two requests", 75)
    client_body_idle_s: Seconds = _span("longest pause of a client within a body", 30)
    client_body_grace_s: Seconds = _span("time after which a body must arrive with at least 128 bytes per second", 60)
    client_stall_s: Seconds = _span("longest time in which a client accepts no bytes", 60)
    tunnel_idle_s: Seconds = _span("idle timeout of a WebSocket", 3600)
    connect_timeout_s: Seconds = _span("timeout for connecting to the controller or a worker", 5)
    upstream_idle_s: Seconds = _span("how long an idle connection to the controller or a worker is kept", 30)
    upstream_stall_s: Seconds = _span(
        "longest time in which the controller or a worker accepts no bytes of a request", 60
    )
    upstream_dead_s: Seconds = _span(
        "time without TCP acknowledgement after which the machine of a worker counts as lost", 60
    )
    ingress_silent_s: Seconds = _span(
        "how long a worker's ingress may leave health probes unanswered, or a request unacknowledged, until another "
        "replica is asked; only requests that wait for their first byte count",
        3,
    )
    controller_first_byte_s: Seconds = _span("timeout for the first byte of an answer of the controller", 120)
    controller_idle_s: Seconds = _span("longest pause of the controller within an answer; live events send pings", 120)
    replica_first_byte_s: Seconds = _span(
        "timeout for the first byte of an answer of a replica; long prompts take long", 1800
    )
    replica_idle_s: Seconds = _span("longest pause of a replica within an answer", 600)

    traces: TraceSettings = group(TraceSettings)
    log_level: str = setting("debug, info, warning or error", default="info", check=valid_log_level)
    log_json: bool = setting("log lines as JSON", default=False)

    def __post_init__(self) -> None:
        """What only two settings together can get wrong."""
        files = {"bus-ca": self.bus_ca, "bus-cert": self.bus_cert, "bus-key": self.bus_key}
        faults = [
            f"{name}: there is no file {str(path)!r}" for name, path in files.items() if path and not path.is_file()
        ]
        if (self.bus_cert is None) != (self.bus_key is None):
            faults.append("set both bus-cert and bus-key, or neither")
        if faults:
            raise BadSettings(faults)
