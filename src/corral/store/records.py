"""Types of stored rows that deciding modules use: no SQL here, so that they may be imported anywhere.

The table modules of `store/tables` read and write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec

from corral.contract.labels import Selector, parse_selector
from corral.contract.loads import LoadState
from corral.contract.manifest import Manifest
from corral.contract.messages.replicas import ReplicaDevice, ReplicaFile
from corral.contract.sources import Source

CONTROLLER = "controller"  # the node id of work that the controllers do themselves


class ReplicaStage(StrEnum):
    PLACED = "placed"  # its node is chosen; backend and files are brought there
    ORDERED = "ordered"  # its node was told to start it
    RUNNING = "running"  # its node has listed it as ready
    LEAVING = "leaving"  # it gets no requests any more, and goes when its work has ended


class DesiredReplica(msgspec.Struct, frozen=True):
    """A replica that the controller wants or has ordered: a row of `replicas`."""

    node_id: str
    model: str
    replica: int  # lowest free one on its node
    revision: str  # of the definition it was placed for: it never becomes another
    backend: str
    stage: ReplicaStage
    op_id: str  # its orders go under this name
    process_id: str  # of the last order; a process its worker started again has a name of its own
    created_at: datetime
    updated_at: datetime
    attempt: int = 0  # of the last order to start
    devices: tuple[ReplicaDevice, ...] = ()
    memory_bytes: int = 0  # what was reserved for it
    files: tuple[ReplicaFile, ...] | None = None  # None: not determined yet
    reason: str = ""  # why it is here; of one that leaves, why it goes
    error: str = ""  # why the last try did not work
    next_try_at: datetime | None = None
    epoch: int = 0  # of the lease under which the order was sent
    sent_at: datetime | None = None
    accepted_at: datetime | None = None
    boot_id: str = ""  # of the worker that was sent it
    ready_at: datetime | None = None
    last_used_at: datetime | None = None
    leaving_at: datetime | None = None  # since when requests go elsewhere
    stop_attempt: int = 0  # of the last order to stop
    force: bool = False  # requested with force: stop it although it serves requests

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.node_id, self.model, self.replica)


class LoadJob(msgspec.Struct, frozen=True):
    """A model that is being loaded, or failed to: a row of `load_jobs`."""

    model: str
    state: LoadState
    created_at: datetime  # of this try
    updated_at: datetime
    version: int = 1  # rises with each change
    revision: str = ""  # of the definition it is about
    node_id: str = ""
    node_name: str = ""
    message: str = ""
    bytes_sent: int = 0
    total_bytes: int = 0
    file_index: int = 0
    total_files: int = 0
    moving_since: datetime | None = None  # when the first bytes came
    error: str = ""
    failures: int = 0  # in a row
    failed_on: dict[str, str] = msgspec.field(default_factory=lambda: dict[str, str]())  # by node of this try: why
    failed_at: datetime | None = None
    retry_at: datetime | None = None  # not before then
    operation_id: str = ""  # that installs its backend

    @property
    def active(self) -> bool:
        return self.state is not LoadState.FAILED

    def may_try(self, now: datetime) -> bool:
        """Whether a request that arrives now starts the next attempt."""
        return not self.active and (self.retry_at is None or self.retry_at <= now)


class Want(StrEnum):
    PRESENT = "present"
    ABSENT = "absent"
    UPGRADED = "upgraded"


class RuleOrigin(StrEnum):
    PERSON = "person"
    LOAD = "load"  # a model was to be loaded there and needed the backend


class ScopeKind(StrEnum):
    ALL = "all"
    SELECTOR = "selector"
    NODE = "node"


@dataclass(frozen=True)
class Scope:
    """The nodes that a rule or an operation is about."""

    kind: ScopeKind
    value: str = ""  # the selector's text, or the node's id

    def matches(self, node_id: str, labels: Mapping[str, str]) -> bool:
        match self.kind:
            case ScopeKind.ALL:
                return True
            case ScopeKind.NODE:
                return self.value == node_id
            case ScopeKind.SELECTOR:
                return _selector(self.value).matches(labels)


@lru_cache(maxsize=1024)
def _selector(text: str) -> Selector:
    return parse_selector(text)


class BackendRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was asked for, whole: enough to look its build up again for a node that comes later."""

    backend: str  # as the gallery knows it, or the name given with a uri
    uri: str = ""
    alias: str = ""
    galleries: str = ""  # JSON, when the request brought its own
    gallery: str = ""  # when it named one: gallery@backend
    pinned: bool = False  # the builds that are stored are all there is: nothing newer may be looked up for it


class BackendRule(msgspec.Struct, frozen=True):
    """What users require of one backend on some nodes."""

    generation: int
    operation_id: str
    scope_kind: ScopeKind
    scope_value: str
    backend: str
    want: Want
    target: str  # id in `backend_targets`; empty if the backend is to be absent
    created_at: datetime
    request: BackendRequest
    origin: RuleOrigin = RuleOrigin.PERSON
    force: bool = False  # fetch the build again even where it is installed
    max_parallel: str = ""  # how many nodes switch at once in an upgrade: 25%, 3; empty = all
    excluded: tuple[str, ...] = ()  # ids of nodes that a user took out of the rule
    withdrawn_at: datetime | None = None

    @property
    def scope(self) -> Scope:
        return Scope(self.scope_kind, self.scope_value)

    def covers(self, node_id: str, labels: Mapping[str, str]) -> bool:
        return node_id not in self.excluded and self.scope.matches(node_id, labels)


class TargetBuild(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an order needs, as it travels."""

    variant: str  # the concrete build's own name
    digest: str = ""  # what the inventory must show; empty = not known beforehand
    version: str = ""
    alias: str = ""
    gallery_url: str = ""
    sources: tuple[Source, ...] = ()
    manifest: Manifest | None = None
    size_bytes: int = 0  # to fetch; 0 = unknown
    note: str = ""  # why it is not the machine's own kind of build, for people


class BackendTarget(msgspec.Struct, frozen=True):
    """One target on one kind of node: its build, or why there is none."""

    id: str
    capability: str
    platform: str  # os/arch; empty = the node does not tell
    python: str  # the same; wheels are locked for it
    resolved_at: datetime
    build: TargetBuild | None = None
    reason: str = ""  # why there is none


class OrderKind(StrEnum):
    """What an order makes a worker do with a backend."""

    INSTALL = "install"
    FETCH = "fetch"  # the first half of a node-by-node upgrade: the new build is stored beside the current one
    UPGRADE = "upgrade"
    DELETE = "delete"


class IntentStage(StrEnum):
    WAITING = "waiting"  # not sent yet, or failed and waiting for its next attempt
    SENT = "sent"  # the worker accepted the order, or did not reply and may work on it
    PARKED = "parked"  # a failure that another attempt does not cure
    DONE = "done"  # the inventory showed the result
    IDLE = "idle"  # no rule requires it any more


class BackendIntent(msgspec.Struct, frozen=True):
    """What one node still has to do for one backend, and how far that is."""

    node_id: str
    backend: str
    kind: OrderKind
    stage: IntentStage
    generation: int  # of the rule that requires it
    operation_id: str
    attempt: int  # of the last order; the numbers rise for as long as the node exists
    updated_at: datetime
    variant: str = ""
    digest: str = ""  # of the requested build; once done, of the build that was found
    failures: int = 0  # in a row
    reason: str = ""
    next_try_at: datetime | None = None
    epoch: int = 0  # of the lease under which the order was sent
    sent_at: datetime | None = None
    accepted_at: datetime | None = None
    boot_id: str = ""  # of the worker that the order was sent to
    before: str = ""  # `Installed.mark` when the order was sent, for builds without a digest
    running: bool = False  # a LocalAI worker did not reply in time: it may still work on the order
    answered: bool = False  # the worker reported success, and the inventory has been read since
    switch_failed: bool = False  # an attempt for this rule failed after the download, and none has succeeded since


class DueSwitch(msgspec.Struct, frozen=True):
    """A node switches a backend, or waits to do so, and its processes have to end before their successors start:
    another node takes the models that no other one serves."""

    node_id: str
    backend: str
    operation_id: str
    since: datetime
    models: tuple[str, ...]
    refusals: dict[str, str] = msgspec.field(default_factory=dict[str, str])  # by model: why no other node takes it


class UploadRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an upload was requested with. `key` stands for its content; the others are for users."""

    key: str = ""
    command: str = ""
    host: str = ""  # the machine of the sender


class OperationNodeStatus(StrEnum):
    """The first five are LocalAI's."""

    QUEUED = "queued"  # recorded; the node is not healthy, or it is not its turn yet
    DOWNLOADING = "downloading"  # in progress, in any phase
    RUNNING_ON_WORKER = "running_on_worker"  # the worker did not reply in time; it may still work on the order
    ERROR = "error"  # it failed and will be tried again, so this is not an end
    SUCCESS = "success"
    SKIPPED = "skipped"
    SUPERSEDED = "superseded"
    WITHDRAWN = "withdrawn"
    CANCELLED = "cancelled"


ENDED = frozenset(
    {
        OperationNodeStatus.SUCCESS,
        OperationNodeStatus.SKIPPED,
        OperationNodeStatus.SUPERSEDED,
        OperationNodeStatus.WITHDRAWN,
        OperationNodeStatus.CANCELLED,
    }
)


class OperationNode(msgspec.Struct, frozen=True, gc=False):
    """One node in one operation."""

    operation_id: str
    node_id: str  # of a node that may have been deleted, or CONTROLLER
    node_name: str
    status: OperationNodeStatus
    updated_at: datetime
    reason: str = ""  # why the node waits, was skipped, or fails
    phase: str = ""
    file_name: str = ""
    percentage: float = 0.0
    current_bytes: int = 0
    total_bytes: int = 0
    rate: float = 0.0
    attempt: int = 0
    seq: int = 0
    failures: int = 0
    next_try_at: datetime | None = None
    waits: bool = False  # nothing can happen now: the node is away, or another one has to succeed first
    variant: str = ""
    version: str = ""
    digest: str = ""
    sources: dict[str, int] = msgspec.field(default_factory=dict)  # received bytes by source
    bad_sources: tuple[str, ...] = ()  # that sent wrong data


class RolloutPhase(StrEnum):
    """The first five are in progress, in this order."""

    FETCHING = "fetching"  # nodes store the new build beside the current one
    CANARY = "canary"  # the first node of a hardware class switches
    SOAK = "soak"  # the requests of a canary are compared with those of the old build
    WAVES = "waves"  # every class has passed: the others switch, a few at a time
    DONE = "done"
    REVERTED = "reverted"  # the nodes that had switched return to the version before
    ENDED = "ended"  # cancelled, or a later operation decides


ROLLOUT_OVER = frozenset({RolloutPhase.DONE, RolloutPhase.REVERTED, RolloutPhase.ENDED})


class RolloutSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a rollout judges its canaries. Without a soak a canary passes when its switch has succeeded."""

    soak_s: float = 0.0
    soak_requests: int = 0  # instead of a time: until so many requests were served by the new build
    max_errors: float = 0.02  # by how much the share of failed requests may rise
    max_slowdown: float = 1.5  # how many times as slow the median may be
    min_requests: int = 20  # of each build, before anything is judged

    @property
    def has_soak(self) -> bool:
        return self.soak_s > 0 or self.soak_requests > 0


NO_SOAK = RolloutSettings()


class RolloutFigure(msgspec.Struct, frozen=True):
    """One comparison of the new build with the old one."""

    name: str  # errors, first_token, answer, tokens_per_s
    model: str
    old: float
    new: float
    old_requests: int
    new_requests: int
    limit: float
    certainty: float = 0.0  # of "the new one is worse", in standard deviations of the rank statistic
    worse: bool = False


class RolloutWindow(msgspec.Struct, frozen=True, array_like=True):
    """The requests of one build in one stretch of time."""

    at: float  # seconds since 1970, of its beginning
    requests: int
    errors: int
    first_token_ms: float = 0.0  # medians; 0: unknown
    tokens_per_s: float = 0.0


class RolloutClass(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one hardware class."""

    name: str
    canary: str = ""  # id of the node that switches first
    canary_name: str = ""
    soaking: bool = False
    soaked_s: float = 0.0  # time in which the canary could serve and a controller looked
    passed: str = ""  # why the others may follow
    lost: tuple[str, ...] = ()  # canaries that left during their soak
    processes: tuple[str, ...] = ()  # ids of the canary's processes of the new build
    restarts: int | None = None  # of these, when they were first seen
    deaths: int = 0
    unsteady_s: float = 0.0  # time, without a gap, in which the canary did not answer or was not ready
    since: datetime | None = None  # when the soak began, by the clock of the database
    waiting: str = ""  # why the soak makes no progress
    new_requests: int = 0
    old_requests: int = 0
    figures: tuple[RolloutFigure, ...] = ()
    new_windows: tuple[RolloutWindow, ...] = ()
    old_windows: tuple[RolloutWindow, ...] = ()


class RolloutNodeBefore(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node had before the rollout, to which it returns."""

    hardware: str
    variant: str = ""
    digest: str = ""
    version: str = ""


class ModelTrial(msgspec.Struct, frozen=True, omit_defaults=True):
    """A new revision of a model, and the one that it is compared with."""

    revision: str
    old_revision: str
    definition: dict[str, Any]
    old_definition: dict[str, Any]
    origin: str
    old_origin: str
    source: str = ""
    old_source: str = ""
    in_place: bool = False  # memory cannot hold both: the model has the new definition already
    plan: str = ""  # which of the two, in words
    failures: int = 0  # of starts
    failed_on: dict[str, str] = {}  # by node: why
    failed_node: str = ""  # name of the last one
    waiting: str = ""  # why no node takes a replica


class Rollout(msgspec.Struct, frozen=True):
    """The state of one rollout, beside its operation."""

    operation_id: str
    generation: int  # of the rule that is rolled out; 0: of a model, or of Corral itself
    subject: str  # the backend, the model, or `corral 1.2.0`
    phase: RolloutPhase
    settings: RolloutSettings
    started_at: datetime
    ticked_at: datetime | None = None  # when a controller last advanced it
    ended_at: datetime | None = None
    paused_by: str = ""
    promoted_by: str = ""
    aborted_by: str = ""
    verdict: str = ""  # why it was reverted
    reverted_by: tuple[str, ...] = ()  # operations that return nodes to their previous version
    classes: tuple[RolloutClass, ...] = ()
    nodes: dict[str, RolloutNodeBefore] = {}  # by id
    trial: ModelTrial | None = None  # of a model; None: of a backend, or of Corral

    @property
    def what(self) -> str:
        """What is new, in words."""
        return "version" if self.is_of_corral else "build" if self.trial is None else "revision"

    @property
    def is_of_corral(self) -> bool:
        return self.trial is None and self.generation == 0

    @property
    def is_over(self) -> bool:
        return self.phase in ROLLOUT_OVER
