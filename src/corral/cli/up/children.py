"""The commands, settings and environment of the processes that `up` starts. Pure.

Settings are passed in the environment and secrets as paths of files, because every user can read a command line.
"""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.cli.common.data_folder import DataFolder
from corral.cli.up.machine import loopback_of, url_host
from corral.kit.settings import describe, env_of

STOP_ORDER = ("worker", "gateway", "controller", "bus")


@dataclass(frozen=True)
class ChildSpec:
    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    stop_timeout_s: float
    listeners: tuple[socket.socket, ...] = ()  # passed to each run of the process (kit/sockets.py)
    steady_after_s: float = math.inf  # a process without readiness report counts as started after this time


@dataclass(frozen=True)
class Site:
    """The addresses, ports and folders of this fleet. Ports are final: none is 0."""

    folder: DataFolder
    run: Path
    bind: str
    port: int
    bus_port: int
    ingress_port: int
    lan: bool
    tls: bool
    address: str  # under which other machines reach this one
    host_name: str = ""  # that they use for the gateway instead, with a certificate of one's own
    tls_cert: Path | None = None  # of one's own
    tls_key: Path | None = None
    tls_names: tuple[str, ...] = ()  # its host names
    node_name: str = ""
    ingress_socket: bool = True
    blob_port: int = 0  # of the controller, for model files
    blob_port_moves: bool = False  # the user did not choose it: the controller may use another if it is taken
    blob_folder: Path | None = None  # of the model files; None: in the data folder

    @property
    def socket(self) -> Path:
        return self.run / "controller.sock"

    @property
    def local_sockets(self) -> str:
        """The folder in which the gateway finds the unix socket of the worker; empty: it uses TCP."""
        return str(self.run) if self.ingress_socket else ""

    @property
    def local_url(self) -> str:
        """The URL of the gateway for this machine."""
        return f"{self._scheme}://{url_host(loopback_of(self.bind))}:{self.port}"

    @property
    def public_url(self) -> str:
        return f"{self._scheme}://{url_host(self.host_name or self.address)}:{self.port}"

    @property
    def ingress_url(self) -> str:
        """The URL that the worker advertises."""
        host = self.address if self.lan else loopback_of(self.bind)
        return f"{self._scheme}://{url_host(host)}:{self.ingress_port}"

    @property
    def bus_url(self) -> str:
        return f"{self._bus_scheme}://{url_host(loopback_of(self.bind))}:{self.bus_port}"

    @property
    def bus_public_url(self) -> str:
        """The controller replaces `{host}` by the host name that a worker used to reach it."""
        return f"{self._bus_scheme}://{{host}}:{self.bus_port}" if self.lan else self.bus_url

    @property
    def blobs(self) -> Path:
        return self.blob_folder or self.folder.blobs

    @property
    def blob_url(self) -> str:
        """The URL of model files. The worker replaces `{host}`, the controller replaces `{port}`."""
        host = "{host}" if self.lan else url_host(loopback_of(self.bind))
        return f"{self._scheme}://{host}:{'{port}' if self.blob_port_moves else self.blob_port}"

    @property
    def _scheme(self) -> str:
        return "https" if self.tls else "http"

    @property
    def _bus_scheme(self) -> str:
        return "tls" if self.tls else "nats"


def controller_settings(site: Site) -> dict[str, str]:
    folder = site.folder
    return {
        "data": str(folder.controller),
        "socket": str(site.socket),
        "host": "",
        "port": "0",
        "tls_cert": "",
        "tls_key": "",
        "public_url": site.public_url,
        "admin_key_file": str(folder.admin_key),
        "gateway_key_file": str(folder.gateway_key),
        "ca_cert": str(folder.ca_cert) if site.tls else "",
        "ca_key": str(folder.ca_key) if site.tls else "",
        "gateway_cert": str(site.tls_cert or ""),
        "bus_urls": site.bus_url,
        "bus_public_urls": site.bus_public_url,
        "bus_keys": str(folder.bus_keys),
        "bus_ca": str(folder.ca_cert) if site.tls else "",
        "blobs": str(site.blobs),
        "blob_host": site.bind,
        "blob_port": str(site.blob_port),
        "blob_port_moves": "true" if site.blob_port_moves else "",
        "blob_url": site.blob_url,
        "blob_tls_cert": str(folder.server_cert) if site.tls else "",
        "blob_tls_key": str(folder.server_key) if site.tls else "",
    }


def gateway_settings(site: Site, processes: int = 1) -> dict[str, str]:
    return {
        "processes": str(processes),
        "controller": f"unix:{site.socket}",
        "controller_ca": "",
        "ingress_ca": str(site.folder.ca_cert) if site.tls else "",
        "local_sockets": site.local_sockets,
        "gateway_key_file": str(site.folder.gateway_key),
        "gateway_key": "",
        "host": site.bind,
        "port": str(site.port),
        "tls_cert": str(site.tls_cert or site.folder.server_cert) if site.tls else "",
        "tls_key": str(site.tls_key or site.folder.server_key) if site.tls else "",
        "fallback_cert": str(site.folder.server_cert) if site.tls_cert else "",
        "fallback_key": str(site.folder.server_key) if site.tls_cert else "",
    }


def worker_settings(site: Site) -> dict[str, str]:
    return {
        "controller": site.local_url,
        "token": "",
        "token_file": str(site.folder.worker_token),
        "ca": str(site.folder.ca_cert) if site.tls else "",
        "data": str(site.folder.worker),
        "name": site.node_name,
        "host": site.bind,
        "port": str(site.ingress_port),
        "advertise": site.address if site.lan else "",
        "local_sockets": site.local_sockets,
        # Same disk: the worker links the files of the controller instead of fetching them.
        "nearby_blobs": str(site.blobs / "sha256"),
        "bus_urls": "",
    }


def role_child(
    name: str,
    kind: type[Any],
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    stop_timeout_s: float,
    listeners: tuple[socket.socket, ...] = (),
) -> ChildSpec:
    return ChildSpec(name, role_command(name), role_env(kind, settings, environ), stop_timeout_s, listeners)


def role_command(name: str, python: str = sys.executable) -> tuple[str, ...]:
    return python, "-P", "-m", "corral.cli.main", name  # -P: import nothing from the current folder


def role_env(kind: type[Any], settings: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of one role: that of this process without settings, plus the settings of this role that the user
    gave (`CORRAL_STALE_AFTER=20s corral up`), plus the settings that `up` decides. An empty value means "not set"."""
    docs = {doc.name: doc for doc in describe(kind)}
    unknown = settings.keys() - docs.keys()
    if unknown:
        raise KeyError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    decided = {name for name in docs if name in settings}
    allowed: set[str] = {doc.env for doc in docs.values() if doc.name not in decided}
    allowed |= {alias for doc in docs.values() if doc.name not in decided for alias in doc.aliases}
    allowed -= {alias for name in decided for alias in docs[name].aliases}
    env = {key: value for key, value in environ.items() if key in allowed or not _is_setting(key)}
    env.update({env_of(name): value for name, value in settings.items() if value})
    return env


def _is_setting(key: str) -> bool:
    return key.startswith(("CORRAL_", "LOCALAI_"))
