"""What the scheduler looks at: nodes, models and the replicas there are or will be. Records only; whoever acts on the
decisions (`controller/loads`, `controller/replicas`) fills them in from the store and from what the nodes told.

Sizes are bytes and 0 means "nobody said", as in the rows they come from. Times are the database's. Nothing in here is a
belief about what should be: a replica that was ordered and does not show yet is in `World.replicas` as STARTING, so
that its memory is not given away twice, and leaves it when its node says otherwise.
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
    INSTALLABLE = "installable"  # there is a build for this machine; loading brings it there
    MISSING = "missing"  # there is none for this machine: `reason`
    FORBIDDEN = "forbidden"  # a person said that it shall not be there
    UNKNOWN = "unknown"  # nobody has been able to say yet
    LOOKING = "looking"  # it is being looked up for the first time: a matter of seconds


@dataclass(frozen=True)
class Build:
    """How one backend stands on one node."""

    state: BuildState
    reason: str = ""
    devices: str = ""  # the manifest's: none, one, many; empty: as placement picks
    size_bytes: int = 0  # what the node fetches for it


@dataclass(frozen=True)
class Node:
    id: str
    name: str
    status: str = "healthy"
    labels: Mapping[str, str] = field(default_factory=dict)
    capability: str = ""  # default, nvidia-cuda-12, …
    devices: tuple[Device, ...] = ()
    gpu_vendor: str = ""
    total_vram: int = 0  # where the node lists no devices: one is made up of these two
    available_vram: int = 0
    total_ram: int = 0
    available_ram: int = 0
    total_disk: int = 0
    available_disk: int = 0
    max_replicas_per_model: int = 1
    budget: Budget = field(default_factory=NoBudget)
    bus_down: bool = False
    vetoes: tuple[str, ...] = ()  # sentences of whoever fills this in: why it takes no replicas at all
    builds: Mapping[str, Build] = field(default_factory=dict)  # by backend, as models call it
    files: frozenset[str] = frozenset()  # digests of model files that are there, as far as anybody knows


class ReplicaState(StrEnum):
    """What a replica means for memory and for answering."""

    STARTING = "starting"  # ordered, or on its way: its memory is spoken for and does not show yet
    READY = "ready"
    STOPPING = "stopping"  # gets no requests any more; its memory comes back when its work has ended


@dataclass(frozen=True)
class Replica:
    node_id: str
    model: str
    index: int = 0
    state: ReplicaState = ReplicaState.READY
    revision: str = ""
    process_id: str = ""  # empty: it was not ordered yet
    memory_bytes: int = 0  # reserved: over all its devices, or in RAM when it has none
    host_bytes: int = 0  # reserved in RAM besides
    devices: tuple[ReplicaDevice, ...] = ()
    slots: int = 1
    in_flight: int = 0
    heard: bool = True  # False: we have not listened for long enough to say that it is idle, nor that it is busy
    ready_at: datetime | None = None
    last_used_at: datetime | None = None  # None: not since it is ready

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.node_id, self.model, self.index)

    @property
    def busy(self) -> bool:
        """It cannot take another request now (docs/explanation/design.md#devices-and-slots)."""
        return self.heard and self.in_flight >= max(1, self.slots)

    @property
    def idle(self) -> bool:
        return self.heard and self.in_flight == 0

    def unused_since(self) -> datetime | None:
        """The last moment anybody had something of it; None: it has not been ready yet."""
        moments = [at for at in (self.ready_at, self.last_used_at) if at is not None]
        return max(moments, default=None)


@dataclass(frozen=True)
class ModelFile:
    digest: str
    size_bytes: int


@dataclass(frozen=True)
class Memory:
    """What one process needs. With `total_bytes` 0 nobody knows, and nothing is refused for it.

    Spread over n devices each takes its part of what can be shared out and `each_bytes` of its own (`on_each`).
    """

    total_bytes: int = 0  # on its device, or in RAM
    each_bytes: int = 0  # of these, what every device needs for itself: buffers, the driver's own
    host_bytes: int = 0  # in RAM, wherever the weights are
    ram_bytes: int = 0  # where no accelerator is used, all in all; 0: as much as on one, and what is in RAM anyway
    how: str = "not known"  # where the numbers come from, for people

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
    """What people said about one model's replicas (docs/reference/wire/http-nodes.md#schedules); the default where they
    said nothing."""

    selector: Selector = field(default_factory=Selector)
    min_replicas: int = 0
    max_replicas: int = 0  # 0: no bound
    spread_all: bool = False
    unsatisfiable_until: datetime | None = None
    unsatisfiable_ticks: int = 0

    @property
    def scales(self) -> bool:
        """Whether the number of its replicas is anybody's business but that of requests for a cold model."""
        return self.spread_all or self.min_replicas > 0 or self.max_replicas > 0


@dataclass(frozen=True)
class Model:
    name: str
    backend: str
    revision: str = ""
    memory: Memory = Memory()
    files: tuple[ModelFile, ...] | None = None  # None: not known before they were fetched
    tensor_parallel: int = 0  # equal devices one process is spread over; 0: one, or as many as it takes
    device_share: float = 0.0  # the engine takes so much of each device, whatever it needs (vLLM); 0: it does not
    in_ram: bool = False  # its definition keeps it off accelerators (gpu_layers: 0)
    concurrency_groups: tuple[str, ...] = ()
    pinned: bool = False
    disabled: bool = False
    schedule: Schedule = Schedule()
    idle_unload_s: float = 0.0  # 0: never to zero by itself
    waiting: int = 0  # requests that wait for a slot or for its load; the load under way counts as one
    only_load_waits: bool = False  # that one is all: a replica of an earlier revision is not what is waited for
    busy_for_s: float = 0.0  # how long all its ready replicas have been busy
    pressure: int = 0  # times within the window that a request left the replica with its prefix because that was busy
    failed_on: Mapping[str, str] = field(default_factory=dict)  # by node: why its last start there failed

    @property
    def files_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files or ())


@dataclass(frozen=True)
class Policy:
    """The numbers of placing, evicting and scaling. Settings of the controller."""

    disk_check: bool = True  # off: too little disk is told and does not count
    exclusive_groups: bool = True  # off: concurrency groups are a preference among nodes
    shared_models: bool = False  # every node sees the same models folder: nothing is fetched
    disk_share: float = 0.05  # contract: the size, and the larger of these two
    disk_spare_bytes: int = GIB
    disk_unknown_bytes: int = 2 * GIB  # contract: for files of unknown size
    ram_share: float = 0.05  # of the machine's RAM that is not handed out, but no more than …
    ram_spare_bytes: int = GIB
    fetch_matters_bytes: int = GIB  # having less than this to fetch is as good as having it all
    evict_after_idle_s: float = 2.0  # a client that asks again at once shall not find it gone
    evict_after_ready_s: float = 10.0  # those who waited for it shall get their answers first
    up_after_s: float = 5.0  # all busy for so long; at once when requests wait
    down_after_s: float = 300.0  # contract
    pressure_threshold: int = 1
    unsatisfiable_after_ticks: int = 3
    unsatisfiable_s: float = 300.0


@dataclass(frozen=True)
class World:
    now: datetime
    nodes: Mapping[str, Node] = field(default_factory=dict)
    models: Mapping[str, Model] = field(default_factory=dict)
    replicas: Sequence[Replica] = ()  # of all models and revisions, on all nodes, known nodes or not
    policy: Policy = Policy()

    @cached_property
    def on_node(self) -> Mapping[str, tuple[Replica, ...]]:
        return _grouped(self.replicas, lambda replica: replica.node_id)

    @cached_property
    def of_model(self) -> Mapping[str, tuple[Replica, ...]]:
        return _grouped(self.replicas, lambda replica: replica.model)


def _grouped(replicas: Sequence[Replica], key: Callable[[Replica], str]) -> dict[str, tuple[Replica, ...]]:
    groups: dict[str, list[Replica]] = {}
    for replica in replicas:
        groups.setdefault(key(replica), []).append(replica)
    return {name: tuple(group) for name, group in groups.items()}


def budget_of(text: str) -> Budget:
    """A node's budget as its row has it. One that cannot be read is none
    (docs/reference/wire/budgets-and-labels.md#vram-budget)."""
    try:
        return parse_budget(text)
    except ValueError:
        return NoBudget()
