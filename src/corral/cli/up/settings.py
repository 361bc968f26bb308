"""Every setting of `corral up`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from corral.kit.checks import a_port, positive
from corral.kit.data_folder import HOME_DATA, resolve_data
from corral.kit.settings import BadSettings, Seconds, setting


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class UpSettings:
    data: Path = setting(
        "folder of everything this fleet keeps; as root /var/lib/corral, unless the default exists",
        default=HOME_DATA,
    )
    host: str = setting(
        "address to serve on; empty = loopback, or every interface with --lan. Off loopback there is TLS", default=""
    )
    port: int = setting("port of the gateway, the one people and programs use", default=8080, check=a_port)
    bus_port: int | None = setting(
        "port of the bus, for workers (4222, or a free one when that is taken)", default=None, check=a_port
    )
    blob_port: int | None = setting(
        "port model files are fetched from, for workers (8090, or a free one when that is taken)",
        default=None,
        check=a_port,
    )
    ingress_port: int | None = setting(
        "port of this machine's worker, for gateways (50050, or a free one when that is taken)",
        default=None,
        check=a_port,
    )
    lan: bool = setting("let other machines join: every interface, with TLS from a CA made here", default=False)
    plain: bool = setting("no TLS with --lan: keys and answers can then be read on the network", default=False)
    worker: bool = setting("also run a worker on this machine", default=True)
    name: str = setting("name of this machine's node; empty = its host name", default="")
    context: str = setting(
        "name by which commands on this machine choose this fleet (`corral contexts`); empty = its data folder's name",
        default="",
    )
    gateway_processes: int = setting("processes of the gateway, which share its port", default=1, check=positive)
    show_key: bool = setting("print the admin key itself, not only where it lies", default=False)
    verbose: bool = setting("show the log of every process here too", default=False)

    ready_timeout_s: Seconds = setting(
        "say so when the fleet is not ready after so long", default=Seconds(60), check=positive, advanced=True
    )
    restart_first_s: Seconds = setting(
        "wait before a process whose start failed is started again; doubles with each failure",
        default=Seconds(0.5),
        check=positive,
        advanced=True,
    )
    restart_cap_s: Seconds = setting("longest such wait", default=Seconds(30), check=positive, advanced=True)
    steady_after_s: Seconds = setting(
        "a process that ran for so long had a good start, even where it did not report that it is ready",
        default=Seconds(30),
        check=positive,
        advanced=True,
    )
    stop_timeout_s: Seconds = setting(
        "how long one process may take to stop before it is killed", default=Seconds(65), check=positive, advanced=True
    )
    certificate_check_s: Seconds = setting(
        "how often the server certificate is looked at, to renew it before it ends",
        default=Seconds(3600),
        check=positive,
        advanced=True,
    )
    log_file_bytes: int = setting(
        "size at which a log file is put aside; three are kept",
        default=16 * 1024 * 1024,
        check=positive,
        advanced=True,
    )

    def __post_init__(self) -> None:
        faults = []
        if self.plain and not self.reaches_out:
            faults.append("--plain only makes sense with --lan: on this machine alone there is no TLS anyway")
        given = (self.port, self.bus_port, self.blob_port, self.ingress_port if self.worker else 0)
        ports = [port for port in given if port]
        if len(set(ports)) < len(ports):
            faults.append("--port, --bus-port, --blob-port and --ingress-port must differ")
        if faults:
            raise BadSettings(faults)
        object.__setattr__(self, "data", resolve_data(self.data))

    @property
    def reaches_out(self) -> bool:
        """Whether other machines can reach it. An address of the network says so as clearly as --lan does."""
        return self.lan or not is_loopback(self.host or "127.0.0.1")

    @property
    def tls(self) -> bool:
        return self.reaches_out and not self.plain

    @property
    def bind(self) -> str:
        return self.host or ("0.0.0.0" if self.lan else "127.0.0.1")
