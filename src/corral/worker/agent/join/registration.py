"""What the registration says about this node: addresses, hardware, labels (docs/reference/wire/nodes.md#registration).
Pure.

A Corral worker has one port, and its controller sees the address itself. A LocalAI worker has a base port for gRPC
backends and an HTTP port one below it, and registers both (docs/reference/wire/localai-settings.md#addresses): its
settings keep their meaning here.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from corral import __version__
from corral.contract.codec import PROTOCOL
from corral.contract.hardware import HardwareReport
from corral.contract.labels import parse_labels
from corral.contract.messages.nodes import IngressOffer, NodeType, RegisterNode
from corral.gallery.pypi.pip import own_python
from corral.kit.hosts import HostPort, is_loopback, parse_host_port
from corral.worker.settings import WorkerSettings
from corral.worker.settings.node import NodeSettings
from corral.worker.system.users import BackendUser

INGRESS_PORT = 50050
LOOPBACK = "127.0.0.1"


def listen_address(settings: WorkerSettings, controller_url: str, last_port: int = 0) -> HostPort:
    """Where the ingress listens: on loopback when the controller is on this machine, as no other machine connects.
    `last_port`: of the last start. Without it two workers of one machine would exchange ports when it reboots."""
    given = settings.ingress
    port = given.port
    base = _port_of(settings.localai.address) or _port_of(settings.localai.serve_address)
    if port is None:
        port = base - 1 if base else last_port or INGRESS_PORT
    host = given.host or (LOOPBACK if is_loopback(urlsplit(controller_url).hostname or "") else "")
    return HostPort(host, port, is_chosen=given.port is not None or base is not None)


@dataclass(frozen=True)
class AdvertisedAddresses:
    """All empty: the controller uses the address it sees."""

    grpc: str = ""
    http: str = ""
    ingress: str = ""


def advertised_addresses(settings: WorkerSettings, *, port: int, host_name: str) -> AdvertisedAddresses:
    """`port` is the ingress's own. Without an explicit address only a LocalAI controller, recognised by the bus URL
    that has to be given for it, gets one made of the host name: a Corral controller sees the address itself."""
    localai = settings.localai
    explicit = settings.ingress.advertise or _ingress_at(localai.advertise_address or localai.address, port)
    if not explicit and not settings.bus.bus_urls:
        return AdvertisedAddresses()
    http = parse_host_port(explicit or host_name or "localhost")
    http = HostPort(http.host or host_name, http.port or port)
    grpc = localai.advertise_address or localai.address or str(HostPort(http.host, port + 1))
    return AdvertisedAddresses(grpc, str(http), ingress=str(parse_host_port(explicit)) if explicit else "")


def _port_of(address: str) -> int | None:
    return parse_host_port(address).port if address else None


def _ingress_at(grpc_address: str, port: int) -> str:
    """LocalAI's rule: the advertised host, and the port the ingress really has. An advertised gRPC port says nothing
    about the ingress's."""
    return str(HostPort(parse_host_port(grpc_address).host, port)) if grpc_address else ""


def describe_node(
    settings: NodeSettings,
    report: HardwareReport,
    addresses: AdvertisedAddresses,
    ingress: IngressOffer,
    user: BackendUser,
) -> RegisterNode:
    """The registration without name, token, enrolment and boot id, which `registrar.py` adds."""
    slots = settings.max_replicas_per_model
    return RegisterNode(
        node_type=NodeType.BACKEND.value,
        address=addresses.grpc,
        http_address=addresses.http,
        total_vram=report.total_vram,
        # Where usage cannot be measured, the registration reports all memory as free; heartbeats leave the number out.
        available_vram=report.total_vram if report.available_vram is None else report.available_vram,
        total_ram=report.total_ram,
        available_ram=report.available_ram or 0,
        total_disk=report.total_disk,
        available_disk=report.available_disk or 0,
        gpu_vendor=report.gpu_vendor,
        gpu_compute_capability=report.gpu_compute_capability,
        capability=report.capability,
        labels={**parse_labels(settings.labels), "node.replica-slots": str(slots)},
        max_replicas_per_model=slots,
        vram_budget=settings.vram_budget,
        protocol=PROTOCOL,
        platform=report.platform,
        devices=report.devices,
        ingress=ingress,
        version=__version__,
        python=own_python(),
        backend_user=user.shown,
        backend_user_warning=user.warning,
        backend_user_fix=user.fix,
    )
