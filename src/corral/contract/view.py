"""The gateway's picture of the fleet, read whole from `GET /internal/view`. Keys travel here and nowhere else."""

from __future__ import annotations

from corral.contract.codec import Message, always
from corral.contract.messages.nodes import BusAccess


class KeyLimits(Message, frozen=True):
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrent: int | None = None


class ViewKey(Message, frozen=True):
    id: str = always(str)
    secret_hash: str = always(str)  # SHA-256 hex
    role: str = always(str)
    name: str = ""
    models: tuple[str, ...] | None = None  # None = every model
    limits: KeyLimits | None = None
    expires_at: float | None = None  # seconds since the epoch


class ViewNode(Message, frozen=True):
    id: str = always(str)
    name: str = always(str)
    status: str = always(str)
    ingress_url: str = ""  # over https its certificate is for `id`: verify that name, not the address
    ingress_token: str = ""  # signed, scope replicas, for this node alone: what the gateway shows at its ingress


class ViewModel(Message, frozen=True):
    id: str = always(str)
    created: int = 0
    owned_by: str = "corral"


class FleetView(Message, frozen=True):
    revision: int = always(int)
    keys: tuple[ViewKey, ...] = always(tuple)
    nodes: tuple[ViewNode, ...] = always(tuple)
    models: tuple[ViewModel, ...] = always(tuple)
    server_time: float = 0.0


class GatewayBus(Message, frozen=True):
    """Answer of `POST /internal/gateway/credentials`."""

    bus: BusAccess | None = None
    nats_jwt: str = ""
    nats_user_seed: str = ""
    expires_in_s: float = 0.0
