"""What the admin API shows and takes (contract: http.md §3.1), for the API, the page, the client and the CLI."""

from __future__ import annotations

import msgspec

from corral.contract.codec import Message, always
from corral.contract.hardware import Device
from corral.contract.view import KeyLimits


class NodeView(Message, frozen=True):
    """The contract's node object, then ours."""

    id: str = always(str)
    name: str = always(str)
    node_type: str = always(str)
    address: str = always(str)
    http_address: str = always(str)
    status: str = always(str)
    total_vram: int = always(int)
    available_vram: int = always(int)
    reserved_vram: int = always(int)
    total_ram: int = always(int)
    available_ram: int = always(int)
    total_disk: int = always(int)
    available_disk: int = always(int)
    gpu_vendor: str = always(str)
    gpu_compute_capability: str = always(str)
    capability: str = ""
    max_replicas_per_model: int = always(int)
    max_replicas_per_model_manually_set: bool = always(bool)
    vram_budget: str = ""
    vram_budget_bytes: int = 0
    vram_budget_manually_set: bool = always(bool)
    last_heartbeat: str = always(str)
    created_at: str = always(str)
    updated_at: str = always(str)
    model_count: int = always(int)
    in_flight_count: int = always(int)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    status_reason: str = ""  # ours from here on: why it has this status, in words
    platform: str = ""
    devices: tuple[Device, ...] = ()
    ingress_url: str = ""
    ingress_error: str = ""  # why the ingress could not be reached at `ingress_url`; empty = it answers, or not tried
    bus_down: bool = False
    compat: bool = False  # a LocalAI worker on the shared token
    version: str = ""
    row_version: int = 0


class JoinTokenView(Message, frozen=True):
    id: str = always(str)
    name: str = always(str)
    uses: int = always(int)
    uses_left: int | None = None  # None = unlimited
    pre_approved: bool = always(bool)
    state: str = always(str)  # active, used, expired, revoked
    created_at: str = always(str)
    expires_at: str = ""
    last_used_at: str = ""


class CreateJoinToken(Message, frozen=True):
    name: str = ""
    uses: int | None = 1  # None = unlimited
    ttl_s: float | None = 3600.0  # None = never expires
    pre_approved: bool = False


class JoinTokenCreated(Message, frozen=True):
    """The secret is shown here once and stored only as a hash."""

    token: JoinTokenView
    secret: str
    join_command: str = ""


class KeyView(Message, frozen=True):
    id: str = always(str)
    name: str = always(str)
    role: str = always(str)
    state: str = always(str)  # active, expired, revoked
    created_at: str = always(str)
    models: tuple[str, ...] | None = None
    limits: KeyLimits | None = None
    expires_at: str = ""
    last_used_at: str = ""


class CreateKey(Message, frozen=True):
    name: str = ""
    role: str = "inference"
    models: tuple[str, ...] | None = None
    limits: KeyLimits | None = None
    ttl_s: float | None = None


class KeyCreated(Message, frozen=True):
    key: KeyView
    secret: str


class ControllerView(Message, frozen=True):
    id: str = always(str)
    host: str = always(str)
    version: str = always(str)
    started_at: str = always(str)
    seen_at: str = always(str)
    live: bool = always(bool)


class Cluster(Message, frozen=True):
    """`GET /api/cluster`: what the CLI and the page say about the whole."""

    version: str = always(str)
    protocol: int = always(int)
    controllers: tuple[ControllerView, ...] = always(tuple)
    nodes_by_status: dict[str, int] = always(dict)
    bus: dict[str, object] = always(dict)  # connected, urls, isolation, revocation
    store: str = always(str)  # sqlite or postgresql
    attention: tuple[str, ...] = always(tuple)  # sentences a person should act on
    compat_localai: bool = False
    notices: tuple[str, ...] = ()  # those of `attention` that are about the fleet as a whole, not about single nodes


class BudgetBody(Message, frozen=True):
    value: str = always(str)


class MaxReplicasBody(Message, frozen=True):
    value: int = always(int)
