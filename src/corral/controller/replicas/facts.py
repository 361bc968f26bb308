"""What deciding about replicas takes, and what comes of it. Records only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from corral.contract.messages.replicas import ReplicaFile
from corral.controller.orders.observations import ReplicaObservation
from corral.controller.replicas.lifecycle import Place, Ready, Start, Times
from corral.controller.replicas.load_jobs import Cooldown, Moved
from corral.controller.scheduler.world import World
from corral.store.records import DesiredReplica, LoadJob

Key = tuple[str, str, int]  # node, model, replica


@dataclass(frozen=True)
class Files:
    """How far the files of one revision of a model are on the controller."""

    files: tuple[ReplicaFile, ...] | None = None  # None: they are being fetched, or nobody has begun
    trouble: str = ""
    moved: Moved = field(default_factory=Moved)


@dataclass(frozen=True)
class Facts:
    now: datetime
    epoch: int
    world: World  # nodes and models; its replicas are made from the rows
    places: Mapping[str, Place]
    rows: Sequence[DesiredReplica] = ()
    jobs: Mapping[str, LoadJob] = field(default_factory=dict)
    heard: Sequence[ReplicaObservation] = ()
    backends: Mapping[tuple[str, str], Ready] = field(default_factory=dict)  # by node and backend
    files: Mapping[tuple[str, str], Files] = field(default_factory=dict)  # by model and revision
    moved: Mapping[Key, Moved] = field(default_factory=dict)  # what nodes tell about an order under way
    previous_revisions: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # by model: may answer until the present can
    strays: Mapping[str, datetime] = field(default_factory=dict)  # by process nobody wants: since when it is seen
    cleared: frozenset[str] = frozenset()  # processes that were told to end: whatever they say, they take no requests
    looking: frozenset[str] = frozenset()  # backends for which builds are being looked up
    times: Times = field(default_factory=Times)
    cooldown: Cooldown = field(default_factory=Cooldown)


class Rows(dict[Key, DesiredReplica]):
    """Rows that know when they changed, so that what follows from all of them is found out once."""

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
class Decided:
    rows: Rows = field(default_factory=Rows)  # as they are now, all of them
    jobs: dict[str, LoadJob] = field(default_factory=dict)  # the same
    starts: list[Start] = field(default_factory=list)
    stops: list[tuple[DesiredReplica, str]] = field(default_factory=list)  # with the process
    clear: list[tuple[str, str]] = field(default_factory=list)  # node and process: nobody wants it
    strays: dict[str, datetime] = field(default_factory=dict)
    ready: dict[str, str] = field(default_factory=dict)  # by model: its present revision, of which one can answer
    unsatisfied: dict[str, tuple[int, datetime | None]] = field(default_factory=dict)  # by model: looks, and until when
    events: list[tuple[str, DesiredReplica]] = field(default_factory=list)  # for the log
    seen: tuple[int, World] | None = None  # as the scheduler sees the rows, after so many changes
