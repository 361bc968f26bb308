"""The scheduler's input: nodes, models and replicas, existing or ordered. Records only; `controller/replicas` fills
them in from the store and from node reports, and acts on the decisions.

Sizes are bytes and 0 means "not reported", as in the rows they come from. Times are the database's. `World.replicas`
includes ordered replicas that no node lists yet, as STARTING, so that their memory is not handed out twice; they leave
the list when their node reports otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cached_property

from corral.contract.budget import Budget, NoBudget, parse_budget
from corral.contract.hardware import Device
from corral.contract.labels import Selector
from corral.contract.messages.replicas import ReplicaDevice

MIB = 1024**2
GIB = 1024**3


class BuildState(StrEnum):
    INSTALLED = "installed"
    INSTALLABLE = "installable"  # there is a build for this machine; a load installs it
    MISSING = "missing"  # there is no build for this machine: `reason`
    FORBIDDEN = "forbidden"  # a user deleted the backend on this node
    UNKNOWN = "unknown"  # the lookup failed
    LOOKING_UP = "looking"  # the first lookup is running and takes seconds


@dataclass(frozen=True)
class Build:
    """The state of one backend on one node."""

    state: BuildState
    reason: str = ""
    devices: str = ""  # the manifest's: none, one, many; empty: as placement picks
    size_bytes: int = 0  # what the node fetches for it
    continues: bool = False  # its manifest declares how it goes on with the beginning of an answer


@dataclass(frozen=True)
class Node:
    id: str
    name: str
    status: str = "healthy"
    labels: Mapping[str, str] = field(default_factory=dict)
    capability: str = ""  # default, nvidia-cuda-12, …
    devices: tuple[Device, ...] = ()
    gpu_vendor: str = ""
    total_vram: int = 0  # a node that lists no devices is taken to have one of this size
    available_vram: int = 0
    total_ram: int = 0
    available_ram: int = 0
    total_disk: int = 0
    available_disk: int = 0
    max_replicas_per_model: int = 1
    budget: Budget = field(default_factory=NoBudget)
    bus_down: bool = False
    vetoes: tuple[str, ...] = ()  # sentences: why the node takes no replicas at all
    builds: Mapping[str, Build] = field(default_factory=dict)  # by backend, as models call it
    files: frozenset[str] = frozenset()  # digests of the model files on the node, as last reported
    hardware: str = ""  # its hardware class (docs/reference/rollouts.md)
    switching: Mapping[str, str] = field(default_factory=dict)  # models to take over, and why no other node does
    is_canary: bool = False  # of a rollout: its requests show what the new build is like


class ReplicaState(StrEnum):
    """What a replica means for memory and for serving requests."""

    STARTING = "starting"  # ordered or starting: its memory is reserved and not measured yet
    READY = "ready"
    STOPPING = "stopping"  # gets no new requests; its memory is free again when its last request has ended


@dataclass(frozen=True)
class Replica:
    node_id: str
    model: str
    index: int = 0
    state: ReplicaState = ReplicaState.READY
    revision: str = ""
    process_id: str = ""  # empty: not ordered yet
    memory_bytes: int = 0  # reserved: over all its devices, or in RAM when it has none
    host_bytes: int = 0  # reserved in RAM besides
    devices: tuple[ReplicaDevice, ...] = ()
    slots: int = 1
    in_flight: int = 0
    activity_known: bool = True  # False: too few reports so far to call it idle or busy
    ready_at: datetime | None = None
    last_used_at: datetime | None = None  # None: not since it is ready

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.node_id, self.model, self.index)

    @property
    def busy(self) -> bool:
        """It cannot take another request now (docs/explanation/design.md#devices-and-slots)."""
        return self.activity_known and self.in_flight >= max(1, self.slots)

    @property
    def idle(self) -> bool:
        return self.activity_known and self.in_flight == 0

    def unused_since(self) -> datetime | None:
        """When its last request ended, or when it became ready; None: it has not been ready yet."""
        moments = [at for at in (self.ready_at, self.last_used_at) if at is not None]
        return max(moments, default=None)


@dataclass(frozen=True)
class ModelFile:
    digest: str
    size_bytes: int


@dataclass(frozen=True)
class Memory:
    """The memory one process needs. With `total_bytes` 0 the need is unknown, and no node is refused for it.

    Spread over n devices, each device takes its part of what can be divided and `each_bytes` of its own (`on_each`).
    """

    total_bytes: int = 0  # on its device, or in RAM
    each_bytes: int = 0  # the part of `total_bytes` that every device needs for itself: buffers, driver context
    host_bytes: int = 0  # in RAM, wherever the weights are
    ram_bytes: int = 0  # in total where no accelerator is used; 0: `total_bytes` and `host_bytes`
    how: str = "not known"  # where the numbers come from, shown to users

    @property
    def known(self) -> bool:
        return self.total_bytes > 0

    @property
    def all_in_ram(self) -> int:
        return self.ram_bytes or self.total_bytes + self.host_bytes

    def on_each(self, devices: int) -> int:
        shared = max(0, self.total_bytes - self.each_bytes)
        return -(-shared // devices) + self.each_bytes if self.known else 0


@dataclass(frozen=True)
class Schedule:
    """The schedule users set for one model (docs/reference/wire/http-nodes.md#schedules), or the default."""

    selector: Selector = field(default_factory=Selector)
    min_replicas: int = 0
    max_replicas: int = 0  # 0: no bound
    spread_all: bool = False
    unsatisfiable_until: datetime | None = None
    unsatisfiable_ticks: int = 0

    @property
    def scales(self) -> bool:
        """Whether the schedule sets a number of replicas; without one only requests for a cold model start one."""
        return self.spread_all or self.min_replicas > 0 or self.max_replicas > 0


@dataclass(frozen=True)
class Model:
    name: str
    backend: str
    revision: str = ""
    memory: Memory = Memory()
    files: tuple[ModelFile, ...] | None = None  # None: not known until they are fetched
    tensor_parallel: int = 0  # equal devices one process is spread over; 0: one, or as many as it needs
    device_share: float = 0.0  # the engine takes this share of each device, whatever it needs (vLLM); 0: it does not
    in_ram: bool = False  # its definition excludes accelerators (gpu_layers: 0)
    concurrency_groups: tuple[str, ...] = ()
    pinned: bool = False
    disabled: bool = False
    schedule: Schedule = Schedule()
    idle_unload_s: float = 0.0  # 0: its last replica is never ended for being unused
    waiting: int = 0  # requests that wait for a slot or for its load; an active load job counts as one
    only_load_waits: bool = False  # only the load job waits: it does not wait for a replica of an earlier revision
    busy_for_s: float = 0.0  # how long all its ready replicas have been busy
    pressure: int = 0  # requests within the window that left the replica with their prefix because it was busy
    failed_on: Mapping[str, str] = field(default_factory=dict)  # by node: why its last start there failed
    trial_revision: str = ""  # replicas of this revision are on trial, and not counted among the model's

    @property
    def files_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files or ())


@dataclass(frozen=True)
class Policy:
    """The numbers of placement, eviction and scaling. Settings of the controller."""

    disk_check: bool = True  # off: too little disk is shown but refuses nothing
    exclusive_groups: bool = True  # off: concurrency groups are a preference among nodes
    shared_models: bool = False  # every node sees the same models folder: nothing is fetched
    disk_share: float = 0.05  # contract: the files' size plus the larger of these two must be free
    disk_spare_bytes: int = GIB
    disk_unknown_bytes: int = 2 * GIB  # contract: for files of unknown size
    ram_share: float = 0.05  # this share of the machine's RAM is not handed out, but at most …
    ram_spare_bytes: int = GIB
    fetch_matters_bytes: int = GIB  # a node that lacks less than this ranks like one that lacks nothing
    evict_after_idle_s: float = 2.0  # a client that sends its next request at once still finds the replica
    evict_after_ready_s: float = 10.0  # requests that waited for the replica are answered first
    up_after_s: float = 5.0  # all replicas busy for so long; at once when requests wait
    down_after_s: float = 300.0  # contract
    pressure_threshold: int = 1
    unsatisfiable_after_ticks: int = 3
    unsatisfiable_tick_s: float = 30.0  # passes may follow each other at once; heartbeats report free memory less often
    unsatisfiable_s: float = 300.0


@dataclass(frozen=True)
class World:
    now: datetime
    nodes: Mapping[str, Node] = field(default_factory=dict)
    models: Mapping[str, Model] = field(default_factory=dict)
    replicas: Sequence[Replica] = ()  # of all models and revisions, on all nodes, including unknown nodes
    policy: Policy = Policy()

    @cached_property
    def switching(self) -> tuple[Node, ...]:
        """The nodes that wait for another one to take a model."""
        return tuple(node for node in self.nodes.values() if node.switching)

    @cached_property
    def on_node(self) -> Mapping[str, tuple[Replica, ...]]:
        return _group_by(self.replicas, lambda replica: replica.node_id)

    @cached_property
    def of_model(self) -> Mapping[str, tuple[Replica, ...]]:
        return _group_by(self.replicas, lambda replica: replica.model)


def _group_by(replicas: Sequence[Replica], key: Callable[[Replica], str]) -> dict[str, tuple[Replica, ...]]:
    groups: dict[str, list[Replica]] = {}
    for replica in replicas:
        groups.setdefault(key(replica), []).append(replica)
    return {name: tuple(group) for name, group in groups.items()}


def budget_of(text: str) -> Budget:
    """Parse a node's budget as stored. An unreadable one counts as none
    (docs/reference/wire/budgets-and-labels.md#vram-budget)."""
    try:
        return parse_budget(text)
    except ValueError:
        return NoBudget()
