"""The parts that load models and keep replicas, put together: what `main.py` starts and the API's doors use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.bus.api import Bus
from corral.controller.backends.catalogue import Catalogue
from corral.controller.inventory.activity import FRESH_S, ActivityTracker
from corral.controller.inventory.observed_usage import UsageRecorder
from corral.controller.operations.accept import OperationAcceptor
from corral.controller.orders.replica_calls import KeepList, ReplicaCalls, ReplicaOrders
from corral.controller.registry.changes import NodeChanges
from corral.controller.replicas.backend_provisioner import Bringing
from corral.controller.replicas.builds import Builds
from corral.controller.replicas.file_provisioner import Fetching, FilesOfModels
from corral.controller.replicas.listing import ReplicaRows
from corral.controller.replicas.loads import KnownModels, Loads
from corral.controller.replicas.memory_needs import MemoryNeeds
from corral.controller.replicas.reconcile import ReplicaLoop, ReplicaOptions, no_pressure
from corral.controller.replicas.why import Sight, Why
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.store.engine.transactions import Store


@dataclass(frozen=True)
class ReplicaTimes:
    accept_s: float = 10.0
    second_try_s: float = 0.25
    fresh_s: float = FRESH_S
    learn_every_s: float = 30.0  # a look at what processes have come to hold, and where files are


@dataclass(frozen=True)
class Needs:
    """What of other rooms it works with."""

    models: KnownModels
    files: FilesOfModels
    catalogue: Catalogue
    acceptor: OperationAcceptor
    changes: NodeChanges
    orders: ReplicaOrders | None = None  # None: to Corral workers only
    keep_list: KeepList | None = None  # see `ReplicaCalls`
    waiting: Callable[[], Mapping[str, int]] = dict  # requests that wait at gateways, by model
    pressure: Callable[[str, float], int] = no_pressure  # see `ReplicaLoop`


@dataclass(frozen=True)
class ReplicaSettings:
    loop: ReplicaOptions = field(default_factory=ReplicaOptions)
    times: ReplicaTimes = field(default_factory=ReplicaTimes)


class Replicas:
    def __init__(
        self,
        store: Store,
        bus: Bus,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        needs: Needs,
        settings: ReplicaSettings | None = None,
    ) -> None:
        settings = settings or ReplicaSettings()
        times = settings.times
        memory = MemoryNeeds(needs.files)
        self.quiet = ActivityTracker(bus, clock, fresh_s=times.fresh_s)
        builds = Builds(needs.catalogue, clock, found=self._wake)
        self.loop = ReplicaLoop(
            store,
            bus,
            needs.orders
            or ReplicaCalls(
                bus,
                clock,
                accept_s=times.accept_s,
                second_try_s=times.second_try_s,
                keep_list=needs.keep_list,
            ),
            leadership,
            needs.changes,
            feed,
            clock,
            builds=builds,
            bringing=Bringing(needs.acceptor, clock),
            fetching=Fetching(needs.files, memory, clock, moved=self._wake),
            files=needs.files,
            quiet=self.quiet,
            memory=memory.of,
            waiting=needs.waiting,
            pressure=needs.pressure,
            options=settings.loop,
        )
        self.loads = Loads(store, needs.models, feed, clock, cooldown=settings.loop.cooldown)
        self.rows = ReplicaRows(store, self.quiet)
        self.learning = UsageRecorder(store, leadership, clock, interval_s=times.learn_every_s)
        self.why = Why(store, clock, Sight(builds, self.quiet, memory.of, settings.loop), self.loads)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Each has a name and a `run`."""
        return (self.loop, self.learning)

    def _wake(self) -> None:
        self.loop.wake()
