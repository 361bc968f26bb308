"""The input and the result of planning replicas. Records only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from corral.contract.messages.replicas import ReplicaFile
from corral.controller.orders.observations import ReplicaObservation
from corral.controller.replicas.lifecycle import (
    LifecycleTimes,
    Prerequisites,
    ReplicaFailed,
    ReplicaHost,
    Start,
    mark_leaving,
)
from corral.controller.replicas.load_jobs import Cooldown, TransferProgress
from corral.controller.scheduler.world import Model, World
from corral.store.records import DesiredReplica, LoadJob, ReplicaStage

Key = tuple[str, str, int]  # node, model, replica


@dataclass(frozen=True)
class FileStatus:
    """How far the controller is with fetching the files of one revision of a model."""

    files: tuple[ReplicaFile, ...] | None = None  # None: not fetched yet
    error: str = ""
    progress: TransferProgress = field(default_factory=TransferProgress)


@dataclass(frozen=True)
class Trial:
    """A new revision of a model, whose replicas run beside those of the present one."""

    model: Model  # as the new revision has it, with the nodes on which a start failed
    share: int = 0  # percentage of the requests


@dataclass(frozen=True)
class PlanInput:
    now: datetime
    epoch: int
    world: World  # nodes and models; its replicas are derived from the rows
    hosts: Mapping[str, ReplicaHost]  # by node
    rows: Sequence[DesiredReplica] = ()
    jobs: Mapping[str, LoadJob] = field(default_factory=dict)  # by model
    observations: Sequence[ReplicaObservation] = ()
    backends: Mapping[tuple[str, str], Prerequisites] = field(default_factory=dict)  # by node and backend
    files: Mapping[tuple[str, str], FileStatus] = field(default_factory=dict)  # by model and revision
    transfers: Mapping[Key, TransferProgress] = field(default_factory=dict)  # progress that nodes report
    previous_revisions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by model: serve until the new can
    orphans: Mapping[str, datetime] = field(default_factory=dict)  # by process without a row: when it was first seen
    stopped_unwanted: frozenset[str] = frozenset()  # processes that were told to stop: they are never adopted
    pending_lookups: frozenset[str] = frozenset()  # backends whose builds are being looked up
    trials: Mapping[str, Trial] = field(default_factory=dict)  # by model
    times: LifecycleTimes = field(default_factory=LifecycleTimes)
    cooldown: Cooldown = field(default_factory=Cooldown)

    def is_on_trial(self, row: DesiredReplica) -> bool:
        trial = self.trials.get(row.model)
        return trial is not None and trial.model.revision == row.revision

    def model_of(self, row: DesiredReplica) -> Model | None:
        """The model as the row's revision has it, as far as that is known."""
        return self.trials[row.model].model if self.is_on_trial(row) else self.world.models.get(row.model)


class DesiredReplicas(dict[Key, DesiredReplica]):
    """Rows by key. Counts its changes, so that values derived from all rows are computed once per change."""

    def __init__(self, rows: Iterable[DesiredReplica] = ()) -> None:
        super().__init__((row.key, row) for row in rows)
        self.changes = 0
        self._of_model: tuple[int, dict[str, list[DesiredReplica]]] = (-1, {})

    def __setitem__(self, key: Key, row: DesiredReplica) -> None:
        if self.get(key) is not row:
            self.changes += 1
            super().__setitem__(key, row)

    def __delitem__(self, key: Key) -> None:
        self.changes += 1
        super().__delitem__(key)

    def of_model(self, model: str) -> list[DesiredReplica]:
        if self._of_model[0] != self.changes:
            found: dict[str, list[DesiredReplica]] = {}
            for row in self.values():
                found.setdefault(row.model, []).append(row)
            self._of_model = (self.changes, found)
        return list(self._of_model[1].get(model, ()))


@dataclass
class PlanResult:
    rows: DesiredReplicas = field(default_factory=DesiredReplicas)  # all rows, as they should be stored
    jobs: dict[str, LoadJob] = field(default_factory=dict)  # the same
    starts: list[Start] = field(default_factory=list)
    stops: list[tuple[DesiredReplica, str]] = field(default_factory=list)  # with the process
    unwanted: list[tuple[str, str]] = field(default_factory=list)  # node and process: to stop, it has no row
    orphans: dict[str, datetime] = field(default_factory=dict)
    ready: dict[str, str] = field(default_factory=dict)  # by model: its present revision, which has a ready replica
    unsatisfied: dict[str, tuple[int, datetime | None]] = field(default_factory=dict)  # by model: tries, next one
    events: list[tuple[str, DesiredReplica]] = field(default_factory=list)  # for the log
    loaded: list[DesiredReplica] = field(default_factory=list)  # replicas that became ready, for metrics
    evicted: list[DesiredReplica] = field(default_factory=list)
    trial_failures: dict[str, list[ReplicaFailed]] = field(default_factory=dict)  # by model
    not_taken: dict[str, str] = field(default_factory=dict)  # by model: why no node takes it from one that switches
    trial_waits: dict[str, str] = field(default_factory=dict)  # by model: why no node takes a replica
    cached_world: tuple[int, World] | None = None  # the scheduler's world after so many changes of the rows

    def retire(self, row: DesiredReplica, why: str, now: datetime) -> None:
        """Let the replica finish its requests and stop; without an order there is nothing to stop."""
        if row.stage is ReplicaStage.PLACED:
            del self.rows[row.key]
        elif row.stage is not ReplicaStage.LEAVING:
            self.rows[row.key] = mark_leaving(row, why, now)
            self.events.append((f"replica leaves: {why}", row))
