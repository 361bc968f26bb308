"""Types of stored rows that deciding modules use: no SQL here, so that they may be imported anywhere."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

from corral.contract.loads import LoadState
from corral.contract.messages.replicas import ReplicaDevice, ReplicaFile


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
    files: tuple[ReplicaFile, ...] | None = None  # None: nobody has looked yet
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
    force: bool = False  # somebody said: whatever it is doing

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
