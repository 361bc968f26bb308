"""Nodes: registration, heartbeats, credentials, leaving (docs/reference/wire/nodes.md)."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import msgspec

from corral.contract.codec import Message, always
from corral.contract.hardware import Device
from corral.contract.messages.backends import NodeBackend, OrderReport
from corral.contract.messages.replicas import ReplicaProcess
from corral.contract.subjects import event

NodeId = NewType("NodeId", str)  # UUID v4 text, assigned by the controller; never where a node's name is meant


class NodeStatus(StrEnum):
    PENDING = "pending"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    OFFLINE = "offline"
    DRAINING = "draining"


class NodeType(StrEnum):
    BACKEND = "backend"
    AGENT = "agent"


class IngressOffer(Message, frozen=True):
    """How the worker's one port can be reached. Since protocol 1."""

    port: int = 0
    advertise: str = ""  # host or host:port a person set; empty = the address the controller saw
    csr: str = ""  # PEM; the controller answers with a certificate when the cluster has a CA
    tls: bool = False  # the worker serves TLS with a certificate it already has


class RegisterNode(Message, frozen=True):
    name: str = always(str)
    node_type: str = ""
    address: str = ""
    http_address: str = ""
    token: str = ""
    total_vram: int = 0
    available_vram: int = 0
    total_ram: int = 0
    available_ram: int = 0
    total_disk: int = 0
    available_disk: int = 0
    gpu_vendor: str = ""
    gpu_compute_capability: str = ""
    capability: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    max_replicas_per_model: int = 0
    vram_budget: str = ""
    protocol: int = 0  # since protocol 1; 0 = a LocalAI worker
    enrolment: str = ""  # since protocol 1: secret made by the worker before its first try; proves it is the same node
    platform: str = ""  # since protocol 1: os/arch, e.g. linux/amd64
    devices: tuple[Device, ...] = ()  # since protocol 1
    ingress: IngressOffer | None = None  # since protocol 1
    boot_id: str = ""  # since protocol 1: fresh per start of the worker process
    version: str = ""  # since protocol 1
    python: str = ""  # since protocol 1: 3.11, of the interpreter that runs wheels; empty: unknown
    backend_user: str = ""  # since protocol 1: name or number of the user that backends run as; empty: unknown
    backend_user_warning: str = ""  # since protocol 1: why backends could read the worker's secrets
    backend_user_fix: str = ""  # since protocol 1: what a person can do about that


class BusAccess(Message, frozen=True):
    """Where the bus is and what to show it. Since protocol 1."""

    urls: tuple[str, ...] = ()
    ca: str = ""  # PEM
    inbox: str = ""  # this user's own inbox prefix
    user: str = ""  # only with plain shared credentials
    password: str = ""


class IngressGrant(Message, frozen=True):
    """Since protocol 1."""

    url: str = ""  # where the controller will look for the ingress
    certificate: str = ""  # PEM
    ca: str = ""  # PEM


class NodeRegistered(Message, frozen=True):
    """Answer to a registration. `nats_*` and everything below them is absent while the node is pending."""

    id: str = always(str)
    name: str = always(str)
    node_type: str = always(str)
    status: str = always(str)
    created_at: str = ""
    api_token: str = ""
    nats_jwt: str = ""
    nats_user_seed: str = ""
    node_token: str = ""  # since protocol 1: told once, when the node is new (or proved itself by its enrolment)
    protocol: int = 0  # since protocol 1
    bus: BusAccess | None = None  # since protocol 1
    expires_in_s: float = 0.0  # since protocol 1: lifetime left of nats_jwt, free of anybody's clock
    signing_key: str = ""  # since protocol 1: public half of the cluster's key
    blob_url: str = ""  # since protocol 1
    blob_token: str = ""  # since protocol 1: what opens it, for an hour
    ingress: IngressGrant | None = None  # since protocol 1
    server_time: float = 0.0  # since protocol 1: the controller's clock, seconds since the epoch
    release_key: str = ""  # since protocol 1: public half of the key that signs releases of Corral
    release_key_changes: tuple[str, ...] = ()  # since protocol 1: how it followed earlier keys, each signed by these


class HttpHeartbeat(Message, frozen=True):
    """All optional; absent keeps the last value."""

    available_vram: int | None = None
    total_vram: int | None = None
    available_ram: int | None = None
    available_disk: int | None = None
    total_disk: int | None = None
    gpu_vendor: str | None = None
    bus: str | None = None  # since protocol 1: "down" while the worker cannot reach the bus
    boot_id: str | None = None  # since protocol 1


class HeartbeatReceived(Message, frozen=True):
    message: str = always(str)
    status: str = ""  # since protocol 1
    server_time: float = 0.0  # since protocol 1
    ingress_url: str = ""  # since protocol 1: where the controller looks for the ingress
    ingress_ok: bool | None = None  # since protocol 1: whether it was reached there; None: not tried yet, or not said
    ingress_error: str = ""  # since protocol 1: why not


class BusHeartbeat(Message, frozen=True):
    """`nodes.{node}.heartbeat`, since protocol 1."""

    boot_id: str = ""
    status_seen: str = ""  # the status the worker believes it has
    available_vram: int | None = None
    total_vram: int | None = None
    available_ram: int | None = None
    total_ram: int | None = None
    available_disk: int | None = None
    total_disk: int | None = None
    gpu_vendor: str | None = None
    devices: tuple[Device, ...] | None = None
    inventory: tuple[NodeBackend, ...] | None = None  # as `backend.list`; None = not told this time
    inventory_seq: int = 0  # as its `seq`, so that a beat on its way does not undo a later answer
    orders: tuple[OrderReport, ...] | None = None  # of backends
    processes: tuple[ReplicaProcess, ...] | None = None  # all there are; None = not told this time


class StopNode(Message, frozen=True):
    """Any payload: the worker drains, deregisters and ends."""


NODE_HEARTBEAT = event("nodes.{node}.heartbeat", BusHeartbeat)
STOP_NODE = event("nodes.{node}.stop", StopNode)
HEARTBEAT_QUEUE = "controllers"
