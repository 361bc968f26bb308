"""Replicas on a node: start, stop, how it went, what runs (docs/reference/wire/replicas.md). All since protocol 1,
between Corral peers only.

Controllers order with `accept`: fetching files and loading weights takes longer than any call may. `process_id` is the
controller's name for the process it orders; a process the worker starts again by itself after a crash gets a fresh one,
told in the heartbeat.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from corral.contract.codec import Message, always
from corral.contract.manifest import Continues
from corral.contract.subjects import call, event


class ReplicaState(StrEnum):
    """What the worker says about one of its processes. Only a `ready` one is routed to."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    RESTARTING = "restarting"  # it ended by itself and will be started again
    FAILED = "failed"  # it ended by itself and will not


class ReplicaDevice(Message, frozen=True):
    """An accelerator the process may see. `uuid` wins over `index` where the driver has one."""

    vendor: str = always(str)
    index: int = always(int)
    uuid: str = ""


class ReplicaFile(Message, frozen=True):
    """A file that must be on the node before the process starts, under the models folder."""

    path: str = always(str)
    digest: str = ""  # sha256:…
    size_bytes: int = 0


class StartReplica(Message, frozen=True):
    op_id: str = always(str)
    attempt: int = always(int)
    process_id: str = always(str)
    model: str = always(str)
    replica: int = always(int)
    backend: str = always(str)
    revision: str = ""  # of the model's definition: a process of another revision is another process
    digest: str = ""  # which installed version of the backend; empty = the current one
    protocol: str = ""  # openai | grpc; empty = as the backend's manifest says
    definition: dict[str, Any] = msgspec.field(default_factory=dict)  # the model's, as stored
    files: tuple[ReplicaFile, ...] = ()
    devices: tuple[ReplicaDevice, ...] = ()
    memory_bytes: int = 0  # what placement reserved for it
    sources: tuple[str, ...] = ()  # where files may be fetched by digest: URLs of blob listeners, best first
    source_token: str = ""  # what opens them
    # Instead of `files`, when there are more than a message holds: the digest of a blob at these sources, which is the
    # list of them as JSON.
    file_list: str = ""
    accept: bool = False


class StopReplica(Message, frozen=True):
    process_id: str = always(str)
    grace_s: float = 0.0  # from SIGTERM to SIGKILL; 0 = the worker's own setting
    op_id: str = ""
    attempt: int = 0
    accept: bool = False
    force: bool = False  # also with requests under way


class ReplicaReply(Message, frozen=True):
    """Answer to both orders. Not accepted and successful: it was so already."""

    success: bool = always(bool)
    accepted: bool = False
    error: str = ""
    process_id: str = ""


class ReplicaResult(Message, frozen=True):
    """How an accepted order ended, under its own `op_id` and `attempt`."""

    op_id: str = always(str)
    attempt: int = always(int)
    success: bool = always(bool)
    process_id: str = always(str)
    error: str = ""
    # Time alone will not cure it (unknown backend, a definition the engine refuses): the controller does not repeat it.
    final: bool = False


class ReplicaProgress(Message, frozen=True):
    """How far an accepted start is with its files: bytes of all of them together. Merged by (attempt, seq)."""

    op_id: str = always(str)
    attempt: int = always(int)
    seq: int = always(int)
    process_id: str = always(str)
    phase: str = ""  # downloading, verifying, starting
    file: str = ""
    file_index: int = 0  # from 1
    total_files: int = 0
    current_bytes: int = 0
    total_bytes: int = 0
    rate: float = 0.0  # bytes per second
    sources: dict[str, int] = msgspec.field(default_factory=dict)  # received bytes by source
    bad_sources: tuple[str, ...] = ()  # sources that sent wrong bytes and are not used any more


class ReplicaProcess(Message, frozen=True):
    """One process as the heartbeat lists it."""

    process_id: str = always(str)
    model: str = always(str)  # empty: a backend without a model (an admin install of a LocalAI controller)
    replica: int = always(int)
    backend: str = always(str)
    state: str = always(str)  # a ReplicaState
    protocol: str = always(str)
    revision: str = ""
    digest: str = ""
    slots: int = 1
    devices: tuple[ReplicaDevice, ...] = ()
    memory_bytes: int = 0  # reserved for it, on its devices or else in RAM; 0 = unknown
    peak_bytes: int = 0  # the most it was seen to hold, rounded up, if it is in RAM; 0 = not measured
    device_peak_bytes: tuple[int, ...] = ()  # the same on each of `devices`, in their order; 0, or none = not measured
    started_at: str = ""  # RFC 3339
    ready_at: str = ""
    restarts: int = 0  # since it was ordered
    error: str = ""  # why the last one ended
    continues: Continues | None = None  # as its backend's manifest declares it


class NodeLoad(Message, frozen=True):
    """Requests under way per process, as the node's ingress sees them; a process not named has none. A later one is
    worth more than an earlier one, and one of another boot more than any: they may overtake each other."""

    boot_id: str = always(str)
    seq: int = always(int)
    in_flight: dict[str, int] = msgspec.field(default_factory=lambda: dict[str, int]())


START_REPLICA = call("nodes.{node}.replica.start", StartReplica, ReplicaReply)
STOP_REPLICA = call("nodes.{node}.replica.stop", StopReplica, ReplicaReply)
START_REPLICA_PROGRESS = event("nodes.{node}.replica.start.{op}.progress", ReplicaProgress)
START_REPLICA_RESULT = event("nodes.{node}.replica.start.{op}.result", ReplicaResult)
STOP_REPLICA_RESULT = event("nodes.{node}.replica.stop.{op}.result", ReplicaResult)
NODE_LOAD = event("nodes.{node}.load", NodeLoad)  # at most four a second, and only while it changes
