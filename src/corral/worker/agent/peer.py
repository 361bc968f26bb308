"""Whom this worker works for, as far as backend processes are concerned (docs/reference/wire/README.md#localai-peers).
Pure.

A Corral controller reaches processes through the ingress, so they listen on loopback with a token of their own. A
LocalAI controller calls them itself: on every interface, in the contract's range of ports, with the shared token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from corral.worker.addresses import LOOPBACK, read_host_port
from corral.worker.supervisor.ports import PortRange

BASE_PORT = 50051
LAST_PORT = 65535
EVERY_INTERFACE = "0.0.0.0"


@dataclass(frozen=True)
class Peer:
    localai: bool = False
    host: str = LOOPBACK  # under which it knows the processes of this worker
    listen_host: str = LOOPBACK
    token: str = field(default="", repr=False)  # empty: each process has its own
    ports: PortRange | None = None  # None: the worker's own

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host,)


CORRAL = Peer()


class PortSettings(Protocol):
    @property
    def address(self) -> str: ...
    @property
    def advertise_address(self) -> str: ...
    @property
    def serve_address(self) -> str: ...
    @property
    def grpc_max_port(self) -> int: ...


def localai_peer(settings: PortSettings, *, told_address: str, token: str) -> Peer:
    """`told_address` is what the registration said: host and first port of the processes."""
    host = read_host_port(told_address).host if told_address else ""
    return Peer(True, host or LOOPBACK, EVERY_INTERFACE, token, _ports(settings, told_address))


def _ports(settings: PortSettings, told_address: str) -> PortRange:
    # What is advertised may be another port, mapped to the first one here.
    candidates = (settings.address, settings.serve_address, "" if settings.advertise_address else told_address)
    ports = (read_host_port(address).port for address in candidates if address)
    base = next((port for port in ports if port), BASE_PORT)
    last = min(settings.grpc_max_port or LAST_PORT, LAST_PORT)
    return PortRange(base, last if last >= base else LAST_PORT)
