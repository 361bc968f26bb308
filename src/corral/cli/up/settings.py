"""Every setting of `corral up`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.kit.hosts import is_loopback
from corral.kit.process import HOME_DATA, resolve_data
from corral.kit.settings import BadSettings, Seconds, positive, setting, valid_port


@dataclass(frozen=True)
class UpSettings:
    data: Path = setting(
        "folder for all data of the fleet; root uses /var/lib/corral unless the default exists already",
        default=HOME_DATA,
    )
    host: str = setting(
        "address to listen on; empty = loopback, or every interface with --lan. Other addresses than loopback use TLS",
        default="",
    )
    port: int = setting("port of the gateway: inference API, admin API and web page", default=8080, check=valid_port)
    bus_port: int | None = setting(
        "port of the bus, for workers (default: 4222, or a free port if that is taken)", default=None, check=valid_port
    )
    blob_port: int | None = setting(
        "port from which workers fetch model files (default: 8090, or a free port if that is taken)",
        default=None,
        check=valid_port,
    )
    ingress_port: int | None = setting(
        "port of the worker of this machine, for gateways (default: 50050, or a free port if that is taken)",
        default=None,
        check=valid_port,
    )
    lan: bool = setting(
        "let other machines join: listen on every interface, with TLS and a CA of this fleet", default=False
    )
    tls_cert: Path | None = setting(
        "certificate of your own for its host names (PEM, with its chain); a changed file is used without a restart",
        default=None,
    )
    tls_key: Path | None = setting("key of that certificate (PEM)", default=None)
    plain: bool = setting("no TLS with --lan: others on the network can then read keys and answers", default=False)
    worker: bool = setting("also run a worker on this machine", default=True)
    name: str = setting("name of the node of this machine; empty = its host name", default="")
    context: str = setting(
        "name of this fleet for `--context` and `corral contexts`; empty = the name of its data folder",
        default="",
    )
    gateway_processes: int = setting("number of gateway processes, which share its port", default=1, check=positive)
    ingress_socket: bool = setting(
        "the gateway reaches the worker of this machine through a unix socket, which costs less than TCP",
        default=True,
        advanced=True,
    )
    show_key: bool = setting("print the admin key itself instead of the path of its file", default=False)
    verbose: bool = setting("also print the log of every process on the terminal", default=False)

    ready_timeout_s: Seconds = setting(
        "print a message when the fleet is not ready after this time",
        default=Seconds(60),
        check=positive,
        advanced=True,
    )
    restart_first_s: Seconds = setting(
        "delay before a process whose start failed is started again; doubles with each failure",
        default=Seconds(0.5),
        check=positive,
        advanced=True,
    )
    restart_cap_s: Seconds = setting(
        "longest delay before a process is started again", default=Seconds(30), check=positive, advanced=True
    )
    steady_after_s: Seconds = setting(
        "a process that ran for this time counts as started, even if it did not report that it is ready",
        default=Seconds(30),
        check=positive,
        advanced=True,
    )
    stop_timeout_s: Seconds = setting(
        "time that a process has to stop before it is killed", default=Seconds(65), check=positive, advanced=True
    )
    certificate_check_s: Seconds = setting(
        "interval between checks of the server certificate, which is renewed before it expires",
        default=Seconds(3600),
        check=positive,
        advanced=True,
    )
    log_file_bytes: int = setting(
        "size at which a log file is rotated; three files are kept",
        default=16 * 1024 * 1024,
        check=positive,
        advanced=True,
    )

    def __post_init__(self) -> None:
        faults = []
        if self.plain and not self.is_public:
            faults.append("--plain needs --lan or --host: a fleet for this machine only never uses TLS")
        if (self.tls_cert is None) != (self.tls_key is None):
            faults.append("--tls-cert and --tls-key must be given together")
        elif self.tls_cert is not None and not self.tls:
            faults.append("--tls-cert needs --lan or --host, without --plain")
        given = (self.port, self.bus_port, self.blob_port, self.ingress_port if self.worker else 0)
        ports = [port for port in given if port]
        if len(set(ports)) < len(ports):
            faults.append("--port, --bus-port, --blob-port and --ingress-port must differ")
        if faults:
            raise BadSettings(faults)
        object.__setattr__(self, "data", resolve_data(self.data))
        for name in ("tls_cert", "tls_key"):
            if path := getattr(self, name):
                object.__setattr__(self, name, path.expanduser().absolute())

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the fleet: with --lan, or with an address other than loopback."""
        return self.lan or not is_loopback(self.host or "127.0.0.1")

    @property
    def tls(self) -> bool:
        return self.is_public and not self.plain

    @property
    def bind(self) -> str:
        return self.host or ("0.0.0.0" if self.lan else "127.0.0.1")
