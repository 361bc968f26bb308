"""The gateway's picture of the fleet, read whole from `GET /internal/view`. Keys travel here and nowhere else."""

from __future__ import annotations

from corral.contract.codec import Message, always
from corral.contract.manifest import Continues
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


class ViewSession(Message, frozen=True):
    """A web session whose playground tokens open `/v1`. One that is not listed has ended, and its tokens with it."""

    id: str = always(str)  # as its tokens name it (`contract/playground.py`)
    key_id: str = always(str)


class ViewNode(Message, frozen=True):
    id: str = always(str)
    name: str = always(str)
    status: str = always(str)
    ingress_url: str = ""  # over https its certificate is for `id`: verify that name, not the address
    ingress_token: str = ""  # signed, scope replicas, for this node alone: what the gateway shows at its ingress
    via_controller: bool = False  # it has no ingress: requests go to the controller, by the same path and token


class ViewPolicy(Message, frozen=True):
    """How replicas of one model are chosen (docs/reference/wire/routing.md#prefix-cache)."""

    prefix_cache: bool = True
    min_match: float = 0.3
    abs_slack: int = 2
    rel_factor: float = 1.5


class ViewModel(Message, frozen=True):
    id: str = always(str)
    created: int = 0
    owned_by: str = "corral"
    alias: str = ""  # requests for it are requests for that one
    revision: str = ""  # of its definition: only replicas of it may answer
    trial_revision: str = ""  # replicas of this one answer `trial_percent` of the requests
    trial_percent: int = 0
    disabled: bool = False
    while_loading: str = ""  # empty: wait; refuse; use
    stand_in: str = ""  # for `use`
    load_wait_s: float = 0.0  # 0: the gateway's setting
    policy: ViewPolicy | None = None  # None: the gateway's setting
    max_concurrent: int = 0  # requests under way and waiting, together; 0: as many as come
    retry_after_s: float = 0.0  # told to whom that turns away; 0: a second
    resume_streams: bool = False  # a stream that breaks off is continued on another replica that `continues`


class ViewReplica(Message, frozen=True):
    """A process that may be asked: ready, on a node that may serve, of its model's present revision."""

    process_id: str = always(str)
    node_id: str = always(str)
    model: str = always(str)
    replica: int = 0
    revision: str = ""
    slots: int = 1
    digest: str = ""  # of its backend, for receipts
    last_resort: bool = False  # its node did not answer lately: only when no other can
    continues: Continues | None = None  # how it goes on with the beginning of an answer; None: it cannot


class FleetView(Message, frozen=True):
    revision: int = always(int)
    keys: tuple[ViewKey, ...] = always(tuple)
    nodes: tuple[ViewNode, ...] = always(tuple)
    models: tuple[ViewModel, ...] = always(tuple)
    replicas: tuple[ViewReplica, ...] = ()
    server_time: float = 0.0
    sessions: tuple[ViewSession, ...] = ()
    signing_key: str = ""  # public, of playground tokens; empty: none is valid


class GatewayBus(Message, frozen=True):
    """Answer of `POST /internal/gateway/credentials`."""

    bus: BusAccess | None = None
    nats_jwt: str = ""
    nats_user_seed: str = ""
    expires_in_s: float = 0.0
