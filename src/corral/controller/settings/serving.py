"""Where the controller serves, who may come in, and how it reaches the bus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.kit.settings import BadSettings, Seconds, positive, setting


def _port(value: int) -> str | None:
    return None if 0 <= value <= 65535 else "must be between 0 (none) and 65535"


@dataclass(frozen=True)
class ListenSettings:
    """Where the controller serves its API."""

    socket: Path | None = setting("Unix socket to listen on; the gateway of this machine uses it", default=None)
    host: str = setting("address to listen on in addition to the socket; needs --port", default="127.0.0.1")
    port: int = setting("port to listen on in addition to the socket; 0 = none", default=0, check=_port)
    tls_cert: Path | None = setting("certificate for host:port (PEM)", default=None)
    tls_key: Path | None = setting("key for host:port (PEM)", default=None)
    public_url: str = setting("URL under which users and workers reach the gateway; part of join commands", default="")

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadSettings(["--tls-cert and --tls-key must be given together"])


@dataclass(frozen=True)
class AccessSettings:
    """The first keys, the certificate authority, and web sessions."""

    admin_key_file: Path | None = setting("file with the first admin key; created if missing", default=None)
    gateway_key_file: Path | None = setting("file with the key of the gateways; created if missing", default=None)
    ca_cert: Path | None = setting("CA certificate of the fleet; it signs the certificates of workers", default=None)
    ca_key: Path | None = setting("CA key of the fleet", default=None)
    gateway_cert: Path | None = setting(
        "certificate of the gateways for its host names, if another CA issued it (PEM, with its chain); join lines of "
        "these names pin what verifies it",
        default=None,
    )
    session_ttl_s: Seconds = setting(
        "a web session ends after this time without use", default=Seconds(12 * 3600), check=positive
    )


@dataclass(frozen=True)
class BusSettings:
    """How the controller, and through it every node, reaches NATS."""

    bus_urls: tuple[str, ...] = setting(
        "URLs of NATS for this controller", default=("nats://127.0.0.1:4222",), aliases=("LOCALAI_NATS_URL",)
    )
    bus_public_urls: tuple[str, ...] = setting(
        "URLs of NATS for workers; `{host}` becomes the host with which a worker reached the fleet; empty = --bus-urls",
        default=(),
    )
    bus_keys: Path | None = setting(
        "folder with the bus keys (operator, account, system, service seeds) of the embedded server", default=None
    )
    bus_account_seed: str = setting(
        "account seed of an external NATS, to mint node credentials",
        default="",
        secret=True,
        aliases=("LOCALAI_NATS_ACCOUNT_SEED",),
    )
    bus_service_jwt: str = setting(
        "this controller's user JWT on an external NATS", default="", secret=True, aliases=("LOCALAI_NATS_SERVICE_JWT",)
    )
    bus_service_seed: str = setting(
        "this controller's user seed on an external NATS",
        default="",
        secret=True,
        aliases=("LOCALAI_NATS_SERVICE_SEED",),
    )
    bus_shared_credentials: bool = setting(
        "use the user and password of the bus URL for all nodes: no isolation between nodes", default=False
    )
    bus_ca: Path | None = setting("CA of the bus (PEM)", default=None, aliases=("LOCALAI_NATS_TLS_CA",))
    bus_cert: Path | None = setting(
        "client certificate for the bus (PEM)", default=None, aliases=("LOCALAI_NATS_TLS_CERT",), advanced=True
    )
    bus_key: Path | None = setting(
        "client key for the bus (PEM)", default=None, aliases=("LOCALAI_NATS_TLS_KEY",), advanced=True
    )
    bus_credential_ttl_s: Seconds = setting(
        "lifetime of the bus credential of a node",
        default=Seconds(3600),
        aliases=("LOCALAI_NATS_WORKER_JWT_TTL",),
        check=positive,
    )
