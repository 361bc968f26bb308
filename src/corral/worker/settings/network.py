"""Settings of the network: the ingress, the bus, and the addresses of a LocalAI worker.

What the address settings mean together is `agent/join/registration.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.contract.budget import Amount, NoBudget, parse_budget
from corral.contract.local_sockets import check_socket_folder
from corral.kit.hosts import parse_host_port
from corral.kit.settings import BadSettings, Seconds, positive, setting, valid_port


def _host_port(value: str) -> str | None:
    try:
        parse_host_port(value)
    except ValueError as error:
        return str(error)
    return None


def _only_host(text: str) -> str:
    """LOCALAI_HTTP_ADDR is host:port in one; this reads its first half, `_only_port` the second."""
    return parse_host_port(text).host or "0.0.0.0"


def _only_port(text: str) -> int:
    digits = text if text.isdigit() else str(parse_host_port(text).port or "")
    if not digits.isdigit():
        raise ValueError(f"{text!r} has no port; give a number, or host:port")
    return int(digits)


def _last_port(value: int) -> str | None:
    return None if value >= 0 else f"{value} is not a port; give 0 for as many as there are"


def _size(value: str) -> str | None:
    try:
        _size_bytes(value)
    except ValueError as error:
        return str(error)
    return None


def _size_bytes(text: str) -> int:
    wrong = f"{text[:64]!r} is not a size; give one such as 50GiB, 900MB or a number of bytes; 0 = no limit"
    try:
        match parse_budget(text):
            case Amount(size_bytes):
                return size_bytes
            case NoBudget():
                return 0
    except ValueError:
        raise ValueError(wrong) from None
    raise ValueError(wrong)


@dataclass(frozen=True)
class IngressSettings:
    """Where the ingress listens, and the address that the cluster reaches it by."""

    host: str = setting(
        "address of the ingress; empty = loopback if the controller is on this machine, else every interface",
        default="",
        aliases=("LOCALAI_HTTP_ADDR",),
        parse=_only_host,
    )
    port: int | None = setting(
        "port of the ingress (50050, or a free one if that is in use); 0 = any free port",
        default=None,
        aliases=("LOCALAI_HTTP_ADDR",),
        parse=_only_port,
        check=valid_port,
    )
    advertise: str = setting(
        "host or host:port at which the cluster reaches the ingress; empty = the address that the controller sees",
        default="",
        aliases=("LOCALAI_ADVERTISE_HTTP_ADDR",),
        parse=str.strip,
        check=_host_port,
    )
    local_sockets: Path | None = setting(
        "folder for a unix socket of the ingress; a gateway on this machine that has the same folder uses it in place "
        "of TCP. `corral up` sets it",
        default=None,
        check=check_socket_folder,
        advanced=True,
    )


@dataclass(frozen=True)
class LocalAISettings:
    """Addresses and ports of backends that a LocalAI controller calls itself, and the files that it sends."""

    address: str = setting(
        "LocalAI's one reachable address, host:port: base of gRPC ports, the ingress one below",
        default="",
        aliases=("LOCALAI_ADDR",),
        check=_host_port,
        advanced=True,
    )
    advertise_address: str = setting(
        "gRPC address to register with a LocalAI controller",
        default="",
        aliases=("LOCALAI_ADVERTISE_ADDR",),
        check=_host_port,
        advanced=True,
    )
    serve_address: str = setting(
        "LocalAI's bind address of the first gRPC port",
        default="",
        aliases=("LOCALAI_SERVE_ADDR",),
        check=_host_port,
        advanced=True,
    )
    grpc_max_port: int = setting(
        "last port of backends that a LocalAI controller calls; 0 = 65535",
        default=0,
        aliases=("LOCALAI_GRPC_MAX_PORT",),
        check=_last_port,
        advanced=True,
    )
    upload_limit: str = setting(
        "largest file that a LocalAI controller may send to this node; 0 = no limit",
        default="50GiB",
        check=_size,
        advanced=True,
    )
    keep_request_files_s: Seconds = setting(
        "inputs and outputs of requests that a LocalAI controller left on this node are removed after this time",
        default=Seconds(6 * 3600),
        check=positive,
        advanced=True,
    )

    @property
    def upload_limit_bytes(self) -> int:
        return _size_bytes(self.upload_limit)


@dataclass(frozen=True)
class BusSettings:
    """Where the bus is, where the controller does not say so, and how to authenticate there."""

    bus_urls: tuple[str, ...] = setting(
        "URLs of the bus; empty = the URLs from the controller (a LocalAI controller sends none)",
        default=(),
        secret=True,  # a NATS URL may carry a password
        aliases=("LOCALAI_NATS_URL",),
        advanced=True,
    )
    bus_jwt: str = setting(
        "fixed bus credential of a LocalAI fleet", default="", secret=True, aliases=("LOCALAI_NATS_JWT",), advanced=True
    )
    bus_user_seed: str = setting(
        "seed of the fixed bus credential",
        default="",
        secret=True,
        aliases=("LOCALAI_NATS_USER_SEED",),
        advanced=True,
    )
    bus_require_auth: bool = setting(
        "never use the bus of a LocalAI controller without a credential",
        default=False,
        aliases=("LOCALAI_NATS_REQUIRE_AUTH", "LOCALAI_DISTRIBUTED_REQUIRE_AUTH"),
        advanced=True,
    )
    bus_ca: Path | None = setting(
        "CA of the bus (PEM); empty = the CA from the controller",
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

    def __post_init__(self) -> None:
        faults = []
        if bool(self.bus_jwt) != bool(self.bus_user_seed):
            faults.append("bus-jwt and bus-user-seed come together or not at all")
        if bool(self.bus_cert) != bool(self.bus_key):
            faults.append("bus-cert and bus-key come together or not at all")
        faults.extend(
            f"{name}: there is no file {str(path)!r}"
            for name, path in (("bus-ca", self.bus_ca), ("bus-cert", self.bus_cert), ("bus-key", self.bus_key))
            if path is not None and not path.is_file()
        )
        if faults:
            raise BadSettings(faults)
