"""Every setting of `corral gateway`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.gateway.link import parse_controller
from corral.kit.settings import Seconds, setting

MIB = 1024 * 1024


def _positive(value: float) -> str | None:
    return None if value > 0 else "must be more than zero"


def _port(value: int) -> str | None:
    return None if 0 <= value <= 65535 else "must be between 0 and 65535; 0 = any free port"


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
    bus: bool = setting("hear hints of changes on the bus; without it they are seen by looking", default=True)

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

    body_limit_bytes: int = setting("largest JSON body under /v1/", default=64 * MIB, check=_positive)
    max_connections: int = setting("client connections at once", default=20_000, check=_positive)
    log_level: str = setting("debug, info, warning or error", default="info", check=_level)
    log_json: bool = setting("log lines as JSON", default=False)
