"""Where the ingress listens and what it is called from outside (docs/reference/wire/localai-settings.md#addresses).
Pure.

Ours has one port and lets the controller see where the worker is. LocalAI has a base port for gRPC backends, an HTTP
port one below it, and tells both; its settings keep their meaning here.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from corral.kit.hosts import is_loopback

INGRESS_PORT = 50050
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class HostPort:
    host: str
    port: int | None
    chosen: bool = True  # by a person; else another port will do when this one is taken

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


def read_host_port(text: str) -> HostPort:
    """`host`, `host:port`, `:port`, `[v6]:port` or a bare IPv6 address. Raises ValueError with a sentence."""
    text = text.strip()
    if not text or any(letter in text for letter in "/@?# \t\\"):
        raise ValueError(f"{text!r} is not an address; write host or host:port")
    if text.count(":") > 1 and not text.startswith("["):
        return HostPort(_checked_v6(text), None)
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        if not closing or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not an address; write [IPv6]:port")
        return HostPort(_checked_v6(host), _read_port(rest[1:], text) if rest else None)
    host, colon, digits = text.partition(":")
    return HostPort(host, _read_port(digits, text) if colon else None)


def _checked_v6(host: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        raise ValueError(f"{host!r} is not an IPv6 address") from None


def _read_port(digits: str, whole: str) -> int:
    if not digits.isascii() or not digits.isdigit() or int(digits) > 65535:
        raise ValueError(f"{whole!r} has no usable port; write host:port with a port up to 65535")
    return int(digits)


class AddressSettings(Protocol):
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int | None: ...
    @property
    def advertise(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def advertise_address(self) -> str: ...
    @property
    def serve_address(self) -> str: ...
    @property
    def bus_urls(self) -> tuple[str, ...]: ...


def listen_on(settings: AddressSettings, controller_url: str) -> HostPort:
    """Where to bind. Nobody off this machine needs an ingress whose controller is on this machine."""
    port = settings.port
    base = _port_of(settings.address) or _port_of(settings.serve_address)
    if port is None:
        port = base - 1 if base else INGRESS_PORT
    host = settings.host or (LOOPBACK if is_loopback(urlsplit(controller_url).hostname or "") else "")
    return HostPort(host, port, chosen=settings.port is not None or base is not None)


@dataclass(frozen=True)
class Told:
    """What the registration says. All empty: the controller takes the address it sees."""

    address: str = ""
    http_address: str = ""
    advertise: str = ""


def tell(settings: AddressSettings, *, port: int, host_name: str) -> Told:
    """`port` is the ingress's own. Only a LocalAI controller, recognised by the bus URL that has to be given for it,
    gets a guess made of the host name: ours sees better."""
    explicit = settings.advertise or _ingress_at(settings.advertise_address or settings.address, port)
    if not explicit and not settings.bus_urls:
        return Told()
    http = read_host_port(explicit or host_name or "localhost")
    http = HostPort(http.host or host_name, http.port or port)
    grpc = settings.advertise_address or settings.address or str(HostPort(http.host, port + 1))
    return Told(grpc, str(http), advertise=str(read_host_port(explicit)) if explicit else "")


def _port_of(address: str) -> int | None:
    return read_host_port(address).port if address else None


def _ingress_at(grpc_address: str, port: int) -> str:
    """The contract's rule: the advertised host, and the port it really has, which is one below the first gRPC port
    unless it was set. An advertised gRPC port says nothing about it."""
    return str(HostPort(read_host_port(grpc_address).host, port)) if grpc_address else ""
