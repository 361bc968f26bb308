"""What the admin API shows and takes (docs/reference/wire/http-nodes.md), for the API, the page, the client and the
CLI."""

from __future__ import annotations

import msgspec

from corral.contract.codec import Message, always
from corral.contract.hardware import Device
from corral.contract.messages.backends import UpgradeInfo
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
    in_flight_count: int = always(int)  # requests that its backends serve now, as its ingress counts them
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
    backend_user: str = ""  # name or number of the user that backends run as; empty = the node does not say
    backend_user_warning: str = ""  # why backends could read the worker's secrets; empty = they cannot, or not said
    backend_user_fix: str = ""  # what a person can do about that
    in_flight_unknown: str = ""  # why `in_flight_count` may be too low; empty = it is right


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
    url: str = ""  # of the fleet for the other machine, where the controller has no public URL


class JoinTokenCreated(Message, frozen=True):
    """The secret is shown here once and stored only as a hash."""

    token: JoinTokenView
    secret: str
    join_command: str = ""  # for a machine that has Corral
    install_command: str = ""  # for one that has not: it installs Corral, then joins


class InstallWheel(Message, frozen=True):
    name: str  # of the file
    sha256: str
    size_bytes: int = 0  # 0: unknown


class InstallWheels(Message, frozen=True):
    """The packages that a machine needs to run Corral."""

    wheels: tuple[InstallWheel, ...] = always(tuple)
    ready: bool = always(bool)  # false: the controller is still making the list, ask again


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


class OperationNodeView(Message, frozen=True, gc=False):
    """One node in an operation: the contract's entry of `nodes[]`, then ours. `error` is also why it waits or was
    skipped."""

    node_id: str = always(str)
    node_name: str = always(str)
    status: str = always(str)
    percentage: float = always(float)
    file_name: str = ""
    current: str = ""  # 412.0 MiB
    total: str = ""
    phase: str = ""
    error: str = ""
    current_bytes: int = 0  # ours from here on
    total_bytes: int = 0
    rate: float = 0.0  # bytes per second
    failures: int = 0  # in a row
    next_retry_at: str = ""
    waits: bool = False  # nothing happens before its node returns or another one succeeds
    variant: str = ""
    version: str = ""
    digest: str = ""
    note: str = ""  # what to know of a success, such as that it could not be verified
    eta_s: float = 0.0  # until the transfer is complete at this rate; 0: unknown
    sources: dict[str, int] = msgspec.field(default_factory=dict)  # received bytes by source
    bad_sources: tuple[str, ...] = ()  # sources that sent wrong bytes and are not used any more


class OperationView(
    Message,
    frozen=True,
    rename={
        "full_name": "fullName",
        "job_id": "jobID",
        "task_type": "taskType",
        "is_deletion": "isDeletion",
        "is_backend": "isBackend",
        "is_queued": "isQueued",
        "node_id": "nodeID",
        "node_name": "nodeName",
        "current_bytes": "currentBytes",
        "total_bytes": "totalBytes",
    },
):
    """LocalAI's operation entry, then our fields (docs/reference/wire/operations.md#operation-entry)."""

    id: str = always(str)  # the backend, or the model whose files are fetched
    name: str = always(str)
    full_name: str = always(str)
    job_id: str = always(str)
    progress: int = always(int)
    task_type: str = always(str)  # Installation, Waiting, deletion, staging
    is_deletion: bool = always(bool)
    is_backend: bool = always(bool)
    is_queued: bool = always(bool)
    cancellable: bool = always(bool)
    message: str = always(str)
    node_id: str = ""
    node_name: str = ""  # of an entry `staging:<model>`
    phase: str = ""
    current_bytes: int = 0
    total_bytes: int = 0
    error: str = ""
    nodes: tuple[OperationNodeView, ...] = ()
    # ours from here on: install, upgrade, delete, rollback; of a model's files: fetch, stage, staging (for a load)
    kind: str = ""
    backend: str = ""  # of a model's files: the model
    scope: str = ""  # all, selector, node; controller
    scope_value: str = ""  # the selector, or the node's name
    state: str = ""  # done, failing, waiting, under_way
    settled: bool = False  # no more progress for now: a watcher may end; retries continue
    processed: bool = False  # every node has answered, failed, or is known to take longer
    outcome: str = ""  # completed, failed, cancelled
    created_at: str = ""
    created_by: str = ""
    finished_at: str = ""
    dismissed: bool = False
    counts: dict[str, int] = msgspec.field(default_factory=dict)  # nodes by status, also where `nodes` is left out
    operation_id: str = (
        ""  # what commands and routes take: the same as `jobID`; `id` is the contract's name for the backend
    )


class OperationList(Message, frozen=True):
    operations: tuple[OperationView, ...] = always(tuple)


class OperationRecord(
    Message,
    frozen=True,
    rename={
        "job_id": "jobID",
        "is_backend": "isBackend",
        "node_id": "nodeID",
        "task_type": "taskType",
        "started_at": "startedAt",
        "finished_at": "finishedAt",
    },
):
    """An operation of the past (contract: OpRecord)."""

    id: str = always(str)  # the backend, or the model whose files were fetched
    name: str = always(str)
    job_id: str = always(str)
    is_backend: bool = always(bool)
    task_type: str = always(str)  # installation, deletion
    outcome: str = always(str)  # completed, failed, cancelled
    started_at: str = always(str)
    finished_at: str = always(str)
    node_id: str = ""
    error: str = ""
    kind: str = ""  # ours from here on
    created_by: str = ""
    operation_id: str = ""  # as in `OperationView`


class OperationHistory(Message, frozen=True):
    operations: tuple[OperationRecord, ...] = always(tuple)


class JobAccepted(Message, frozen=True, rename={"job_id": "jobID", "status_url": "statusUrl"}):
    """What an accepted request answers."""

    job_id: str = always(str)
    message: str = always(str)
    status_url: str = ""
    joined: bool = False  # ours: the same was under way already, so this is its id
    nodes: tuple[
        OperationNodeView, ...
    ] = ()  # of a delete that was waited for and is not done yet: how it stands on each
    unchanged: bool = False  # of an upgrade or a rollback: every node has that build already, so nothing is started


class JobsAccepted(Message, frozen=True):
    """Several requests at once: those that were accepted, and why the others were not, by backend."""

    operations: tuple[JobAccepted, ...] = always(tuple)
    refused: dict[str, str] = always(dict)


class BackendJob(Message, frozen=True):
    """What an accepted request under `/backends/` answers."""

    id: str = always(str)
    status_url: str = always(str)


class Steered(Message, frozen=True):
    """What cancelling, pausing, retrying, withdrawing and dismissing answer."""

    success: bool = always(bool)
    message: str = always(str)
    job_id: str = msgspec.field(default="", name="jobID")  # ours: the operation that goes on; a new one after a retry
    notes: tuple[str, ...] = ()  # ours: what was asked earlier and holds again now


class BackendBody(Message, frozen=True):
    """A request about a backend: the contract's fields, then ours."""

    backend: str = ""
    backend_galleries: object = ""  # JSON inside JSON: an array of galleries; what cannot be read as one is ignored
    uri: str = ""
    name: str = ""
    alias: str = ""
    id: str = ""  # the contract's word for `backend` under /backends/apply
    force: bool = False  # an install: fetch again what is there; a delete: though a model uses it
    node: str = ""  # ours from here on: one node, by id or name
    selector: str = ""  # nodes by label; with neither, every node
    max_parallel: str = ""  # of an upgrade's switches: 25%, 3
    soak: str = ""  # of an upgrade: how long its first nodes are watched: 5m; or a number of requests: 200
    max_errors: str = ""  # with a soak: by how much the share of failed requests may rise: 2%
    max_slowdown: float = 0.0  # with a soak: how many times as slow the median may be
    min_requests: int = 0  # with a soak: of each build, before it is judged


class OperationBody(BackendBody, frozen=True):
    """`POST /api/operations`: every kind of operation on backends."""

    kind: str = "install"  # install, upgrade, delete, rollback


class ScopeBody(Message, frozen=True):
    """Which nodes; with neither, every node."""

    node: str = ""
    selector: str = ""
    max_parallel: str = ""


class PlanProcess(Message, frozen=True):
    """A process that runs now, and what becomes of it."""

    process_id: str = always(str)
    model: str = always(str)
    # beside: its successor serves before it goes; in_place: it goes first, there is no room for two; stop: it goes
    how: str = always(str)
    gap_s: float | None = None  # how long no process serves it; None: unknown
    memory_bytes: int = 0  # reserved for it, and needed by its successor; 0: unknown
    # in_place: names of other nodes whose replicas answer meanwhile; none: requests for the model wait at the gateway
    served_by: tuple[str, ...] = ()
    could_serve: tuple[str, ...] = ()  # of the latter: names of nodes whose memory could hold a replica
    moves_to: str = ""  # of these: the node that is likely to start a replica first, so that no request waits


class PlanNode(Message, frozen=True):
    """What a request would do on one node."""

    node_id: str = always(str)
    node_name: str = always(str)
    action: str = always(str)  # install, upgrade, reinstall, delete, nothing, skip
    reason: str = ""  # why it is skipped, waits, or has nothing to do
    waits: bool = False  # it will be done when the node is back
    variant: str = ""
    version: str = ""
    digest: str = ""
    installed_version: str = ""
    installed_digest: str = ""
    fetch_bytes: int | None = None  # None: unknown
    disk_after_bytes: int | None = None  # free then, as far as can be said
    processes: str = ""  # what happens to those that run, in words
    replaces: tuple[PlanProcess, ...] = ()  # and one by one, where the node tells


class PlanClass(Message, frozen=True):
    """One hardware class of an upgrade: its first node switches before the others."""

    name: str = always(str)
    nodes: tuple[str, ...] = always(tuple)  # names; the first one is likely to switch first
    fetch_bytes: int | None = None  # of all of them; None: unknown
    gap_s: float | None = 0.0  # the longest time that a process is away; None: unknown


class PlanView(Message, frozen=True):
    """`?plan=true`: nothing was stored, nothing was sent."""

    kind: str = always(str)
    backend: str = always(str)
    nodes: tuple[PlanNode, ...] = always(tuple)
    max_parallel: str = ""
    notes: tuple[str, ...] = ()
    soak: str = ""  # 5m, or 200 requests
    classes: tuple[PlanClass, ...] = ()  # of an upgrade, in their order


class MatrixNode(Message, frozen=True, gc=False):
    id: str = always(str)
    name: str = always(str)
    status: str = always(str)
    capability: str = ""
    platform: str = ""
    told: bool = True  # False: the node has not reported its backends yet


class MatrixIntent(Message, frozen=True, gc=False):
    """What one node still has to do for one backend."""

    kind: str = always(str)  # install, upgrade, delete, rollback
    stage: str = always(str)  # waiting, sent, parked (failing, and time alone will not cure it)
    operation: str = ""
    failures: int = 0
    reason: str = ""
    next_retry_at: str = ""
    phase: str = ""
    percentage: float = always(float)


class MatrixCell(Message, frozen=True, gc=False):
    """One backend on one node."""

    installed: bool = always(bool)
    version: str = ""
    digest: str = ""
    variant: str = ""  # the concrete build, where the backend is a name for several
    installed_at: str = ""
    is_system: bool = False
    outdated: bool = False  # the gallery has something newer
    drift: bool = False  # most nodes have another build
    can_roll_back: bool = False
    intent: MatrixIntent | None = None
    problem: str = ""  # why nothing of it can run there now, and what to do about it


class MatrixRow(Message, frozen=True):
    backend: str = always(str)
    nodes: dict[str, MatrixCell] = always(dict)  # by node id; a node that neither has nor awaits it is absent
    upgrade_available: bool = False
    available_version: str = ""
    available_digest: str = ""
    drift: bool = False


class BackendMatrix(Message, frozen=True):
    """`GET /api/backends/matrix`: backends × nodes, both in name order."""

    nodes: tuple[MatrixNode, ...] = always(tuple)
    backends: tuple[MatrixRow, ...] = always(tuple)
    checked_at: str = ""  # when the galleries were last asked for something newer; empty = not yet


class BackendVerified(Message, frozen=True):
    """`POST /api/nodes/{node}/backends/verify`: every file was read again."""

    node: str = always(str)  # its name
    backend: str = always(str)
    whole: bool = always(bool)
    version: str = ""
    digest: str = ""
    missing: tuple[str, ...] = ()  # the first 20
    changed: tuple[str, ...] = ()  # the first 20
    damaged: int = 0  # how many files in all


class GalleryView(Message, frozen=True):
    """One entry of `GET /api/galleries`. `error`: why it could not be read; `notice`: the same in one sentence."""

    kind: str = always(str)  # backends or models
    name: str = always(str)
    url: str = always(str)
    mirrors: tuple[str, ...] = ()
    entries: int = 0  # of its index, or of the last good copy where it cannot be read
    error: str = ""
    notice: str = ""


class BackendUpgrades(Message, frozen=True):
    """What was last found that is newer, by name of the build."""

    checked_at: str = ""
    upgrades: dict[str, UpgradeInfo] = always(dict)
