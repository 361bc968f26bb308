"""How a controller reaches backend processes (docs/reference/wire/README.md#localai-peers). Pure.

A Corral controller reaches processes through the ingress: they listen on loopback, each with a token of its own. A
LocalAI controller calls them itself: on every interface, in LocalAI's range of ports, with the shared token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from corral.kit.hosts import parse_host_port
from corral.worker.settings.network import LocalAISettings
from corral.worker.settings.processes import PortRange

LOOPBACK = "127.0.0.1"
EVERY_INTERFACE = "0.0.0.0"
BASE_PORT = 50051
LAST_PORT = 65535


@dataclass(frozen=True)
class Peer:
    is_localai: bool = False
    host: str = LOOPBACK  # in the addresses of processes that the controller knows
    listen_host: str = LOOPBACK
    token: str = field(default="", repr=False)  # empty: each process has its own
    ports: PortRange | None = None  # None: the worker's own

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host,)


CORRAL = Peer()


def localai_peer(settings: LocalAISettings, *, grpc_address: str, token: str) -> Peer:
    """`grpc_address` is part of the registration: host and first port of the processes."""
    host = parse_host_port(grpc_address).host if grpc_address else ""
    return Peer(True, host or LOOPBACK, EVERY_INTERFACE, token, _ports(settings, grpc_address))


def _ports(settings: LocalAISettings, grpc_address: str) -> PortRange:
    # An advertised port may be another one, which a router maps to the first port here.
    candidates = (settings.address, settings.serve_address, "" if settings.advertise_address else grpc_address)
    ports = (parse_host_port(address).port for address in candidates if address)
    base = next((port for port in ports if port), BASE_PORT)
    last = min(settings.grpc_max_port or LAST_PORT, LAST_PORT)
    return PortRange(base, last if last >= base else LAST_PORT)
