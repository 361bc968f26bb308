"""Every setting of `corral gateway`."""

# ruff: noqa: RUF009  (`_span` gives a dataclass field, as `setting` does)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.gateway.view.controller_link import parse_controller
from corral.kit.settings import BadSettings, Seconds, setting

MIB = 1024 * 1024
MAX_PROCESSES = 64


def _positive(value: float) -> str | None:
    return None if value > 0 else "must be more than zero"


def _not_negative(value: float) -> str | None:
    return None if value >= 0 else "must not be less than zero"


def _port(value: int) -> str | None:
    return None if 0 <= value <= 65535 else "must be between 0 and 65535; 0 = any free port"


def _processes(value: int) -> str | None:
    return None if 1 <= value <= MAX_PROCESSES else f"must be between 1 and {MAX_PROCESSES}"


def _controller(value: str) -> str | None:
    try:
        parse_controller(value)
    except ValueError as error:
        return str(error)
    return None


def _level(value: str) -> str | None:
    return None if value in ("debug", "info", "warning", "error") else "must be debug, info, warning or error"


def _origins(value: tuple[str, ...]) -> str | None:
    bad = [origin for origin in value if origin != "*" and not origin.startswith(("http://", "https://"))]
    return f"{bad[0]!r} is no origin; write https://host[:port] or *" if bad else None


def _span(help: str, seconds: float) -> Any:
    """One of the relay's patience limits: sound as they are, for most."""
    return setting(help, default=Seconds(seconds), check=_positive, advanced=True)


@dataclass(frozen=True)
class GatewaySettings:
    controller: str = setting("where the controller is: unix:/path or http(s)://host:port", check=_controller)
    controller_ca: Path | None = setting("CA that signed the controller's certificate (PEM)", default=None)
    gateway_key_file: Path | None = setting("file with the key this gateway shows to the controller", default=None)
    gateway_key: str = setting(
        "the key itself, where a file cannot be had; the file is preferred", default="", secret=True
    )

    host: str = setting("address to serve clients on", default="127.0.0.1")
    port: int = setting("port to serve clients on", default=8080, check=_port)
    processes: int = setting(
        "processes that serve requests and share the port; as many as there are cores to spare",
        default=1,
        check=_processes,
    )
    tls_cert: Path | None = setting("certificate for clients (PEM, with its chain)", default=None)
    tls_key: Path | None = setting("key of that certificate (PEM)", default=None)
    cors_origins: tuple[str, ...] = setting(
        "web origins whose pages may call /v1/…; * = any; empty = none", default=(), check=_origins
    )
    cors_max_age_s: Seconds = setting(
        "how long a browser may remember the answer to its preflight",
        default=Seconds(600),
        check=_positive,
        advanced=True,
    )
    hints: bool = setting("hear of changes on the bus at once; without it they are seen by looking", default=True)
    hints_retry_s: Seconds = setting(
        "longest wait before the controller is asked again where the bus is",
        default=Seconds(30),
        check=_positive,
        advanced=True,
    )

    bus_ca: Path | None = setting(
        "CA of the bus (PEM); empty = what the controller says",
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
        "how often the controller is asked whether the view changed; bounds how long a revoked key works without hints",
        default=Seconds(1),
        check=_positive,
    )
    view_interval_s: Seconds = setting(
        "how often the view is read whole, changed or not", default=Seconds(15), check=_positive
    )
    view_gap_s: Seconds = setting(
        "rest between two looks, however many hints arrive", default=Seconds(0.05), check=_positive, advanced=True
    )
    controller_timeout_s: Seconds = setting(
        "how long the controller may take to answer the gateway's own questions", default=Seconds(5), check=_positive
    )
    retry_after_s: Seconds = setting(
        "what clients are told to wait when the controller or a replica is away",
        default=Seconds(2),
        check=_positive,
        advanced=True,
    )
    drain_timeout_s: Seconds = setting(
        "how long running requests may take to end when the gateway is told to stop", default=Seconds(30)
    )

    load_wait_s: Seconds = setting(
        "how long a request waits for a cold model, unless the model says otherwise; 0 = as long as it takes",
        default=Seconds(60),
        check=_not_negative,
        aliases=("LOCALAI_MODEL_LOAD_WAIT",),
    )
    load_poll_s: Seconds = _span("how long one question to the controller about a load stays open", 20)
    queue_wait_s: Seconds = setting(
        "how long a request waits for a replica that is not busy", default=Seconds(60), check=_positive
    )
    queue_limit: int = setting(
        "requests that may wait for one model, unless the model says otherwise", default=1000, check=_positive
    )
    tries: int = setting(
        "how many replicas a request is sent to, where the ones before could not be reached",
        default=4,
        check=_positive,
        advanced=True,
    )
    eject_s: Seconds = _span("how long a replica that could not be reached is left alone, at first", 1)
    eject_cap_s: Seconds = _span("the same, at most: it doubles each time", 30)
    prefix_cache: bool = setting(
        "send prompts that begin alike to the replica that has seen the beginning, unless the model says otherwise",
        default=True,
        aliases=("LOCALAI_DISTRIBUTED_PREFIX_CACHE",),
    )
    prefix_cache_ttl_s: Seconds = setting(
        "how long a beginning is remembered",
        default=Seconds(300),
        check=_positive,
        aliases=("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL",),
        advanced=True,
    )
    prefix_half_life_s: Seconds = _span("in what time what a replica has in its cache counts half", 120)
    expose_node_header: bool = setting(
        "name the node that answered, in X-Corral-Node and X-LocalAI-Node",
        default=False,
        aliases=("LOCALAI_EXPOSE_NODE_HEADER",),
    )
    ingress_ca: Path | None = setting(
        "CA that signed the workers' certificates (PEM); empty = the controller's", default=None
    )
    receipts_interval_s: Seconds = setting(
        "how often the controller is told what became of requests", default=Seconds(1), check=_positive, advanced=True
    )
    receipts_limit: int = setting(
        "requests of which this is remembered until then; what comes on top is only counted",
        default=4096,
        check=_positive,
        advanced=True,
    )

    body_limit_bytes: int = setting("largest JSON body under /v1/", default=64 * MIB, check=_positive)
    bodies_limit_bytes: int = setting(
        "all JSON bodies together whose requests are under way; one more waits outside (503). At least one fits",
        default=1024 * MIB,
        check=_positive,
        advanced=True,
    )
    multipart_limit_bytes: int = setting(
        "largest body with files in it under /v1/; kept on disk", default=256 * MIB, check=_positive
    )
    spool_limit_bytes: int = setting(
        "all such bodies together whose requests are under way; one more waits outside (503). At least one fits",
        default=8192 * MIB,
        check=_positive,
        advanced=True,
    )
    spool_folder: Path | None = setting(
        "where such bodies are kept; empty = the system's folder for temporary files", default=None, advanced=True
    )
    head_limit_bytes: int = setting("largest head of a request", default=64 * 1024, check=_positive, advanced=True)
    max_connections: int = setting("client connections at once", default=10_000, check=_positive)
    client_handshake_s: Seconds = _span("TLS: how long a client may take for its handshake", 10)
    client_head_s: Seconds = _span("how long a client may take to send a request's head", 15)
    client_keep_alive_s: Seconds = _span("how long a client's connection may be idle between two requests", 75)
    client_body_idle_s: Seconds = _span("how long a client may pause within a body", 30)
    client_body_grace_s: Seconds = _span("how long a body may take before it must also come at 128 bytes a second", 60)
    client_stall_s: Seconds = _span("how long a client may take none of the bytes waiting for it", 60)
    tunnel_idle_s: Seconds = _span("how long a WebSocket may be silent", 3600)
    connect_timeout_s: Seconds = _span("how long connecting to the controller or a worker may take", 5)
    upstream_idle_s: Seconds = _span("how long an unused connection to the controller or a worker is kept", 30)
    upstream_stall_s: Seconds = _span("how long the controller or a worker may take none of a request's bytes", 60)
    upstream_dead_s: Seconds = _span("how long a worker's machine may acknowledge nothing until it counts as gone", 60)
    ingress_silent_s: Seconds = _span(
        "how long a worker's ingress may leave health probes unanswered, or a request unacknowledged, until another "
        "replica is asked; only requests that wait for their first byte count",
        3,
    )
    controller_first_byte_s: Seconds = _span("how long the controller may take to begin to answer a client", 120)
    controller_idle_s: Seconds = _span("how long the controller may pause within an answer; live events ping", 120)
    replica_first_byte_s: Seconds = _span(
        "how long a replica may take to begin to answer: a long prompt takes long", 1800
    )
    replica_idle_s: Seconds = _span("how long a replica may pause within an answer", 600)

    log_level: str = setting("debug, info, warning or error", default="info", check=_level)
    log_json: bool = setting("log lines as JSON", default=False)

    def __post_init__(self) -> None:
        """What only two settings together can get wrong."""
        files = {"bus-ca": self.bus_ca, "bus-cert": self.bus_cert, "bus-key": self.bus_key}
        faults = [
            f"{name}: there is no file {str(path)!r}" for name, path in files.items() if path and not path.is_file()
        ]
        if (self.bus_cert is None) != (self.bus_key is None):
            faults.append("bus-cert and bus-key come together or not at all")
        if faults:
            raise BadSettings(faults)
