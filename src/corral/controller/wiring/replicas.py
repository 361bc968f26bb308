"""Assembles the parts that load models and keep replicas running."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from corral.bus.api import Bus
from corral.controller.backends.catalogue import Catalogue
from corral.controller.inventory.activity import ActivityTracker
from corral.controller.inventory.observed_usage import UsageRecorder
from corral.controller.models.service import Models
from corral.controller.operations.accept import OperationAcceptor
from corral.controller.orders.observations import ReplicaObservation
from corral.controller.orders.replica_calls import KeepList, ReplicaCalls, ReplicaOrders
from corral.controller.registry.changes import NodeChanges
from corral.controller.replicas.builds import Builds
from corral.controller.replicas.lifecycle import LifecycleTimes
from corral.controller.replicas.listing import ReplicaListing
from corral.controller.replicas.load_jobs import Cooldown
from corral.controller.replicas.loads import LoadService
from corral.controller.replicas.plan_execution import OrderSender, ReplicaCounter
from corral.controller.replicas.provisioners import BackendProvisioner, FileProvisioner, FileSource, MemoryEstimator
from corral.controller.replicas.reconcile import LEASE, ReplicaPace, ReplicaReconciler, no_pressure
from corral.controller.replicas.snapshot import SnapshotReader
from corral.controller.replicas.why import PlacementExplainer
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.controller.scheduler.world import Policy
from corral.controller.settings import ControllerSettings
from corral.controller.settings.models import ReplicaSettings
from corral.controller.trials.accept import Trials
from corral.controller.trials.keeper import TrialKeeper
from corral.kit.clock import Clock
from corral.store.engine.transactions import Store


@dataclass(frozen=True)
class ReplicaDependencies:
    """The parts of other packages that replicas need."""

    models: Models
    files: FileSource
    catalogue: Catalogue
    acceptor: OperationAcceptor
    changes: NodeChanges
    orders: ReplicaOrders | None = None  # None: to Corral workers only
    keep_list: KeepList | None = None  # see `ReplicaCalls`
    counter: ReplicaCounter | None = None
    waiting: Callable[[], Mapping[str, int]] = dict  # requests that wait at gateways, by model
    pressure: Callable[[str, float], int] = no_pressure  # see `ReplicaReconciler`


def replica_pace(settings: ControllerSettings) -> ReplicaPace:
    replicas = settings.replicas
    return ReplicaPace(
        times=LifecycleTimes(orphan_after=timedelta(seconds=replicas.stray_after_s)),
        cooldown=Cooldown(
            first=timedelta(seconds=replicas.load_cooldown_s),
            longest=timedelta(seconds=max(300.0, replicas.load_cooldown_s)),
        ),
        policy=Policy(
            disk_check=replicas.disk_check,
            exclusive_groups=replicas.exclusive_groups,
            shared_models=replicas.shared_models,
            up_after_s=replicas.scale_up_after_s,
            down_after_s=replicas.scale_down_after_s,
        ),
        localai=settings.localai.compat_localai,
        accept_s=settings.backends.backend_accept_timeout_s,
    )


class Replicas:
    def __init__(
        self,
        store: Store,
        bus: Bus,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        dependencies: ReplicaDependencies,
        settings: ReplicaSettings,
        pace: ReplicaPace,
    ) -> None:
        memory = MemoryEstimator(dependencies.files)
        self.activity = ActivityTracker(bus, clock, fresh_s=pace.fresh_s)
        snapshots = SnapshotReader(
            store,
            Builds(dependencies.catalogue, clock, on_found=self._wake),
            self.activity,
            memory.estimate,
            idle_unload_s=settings.idle_unload_s,
            localai=pace.localai,
        )
        orders = dependencies.orders or ReplicaCalls(
            bus,
            clock,
            accept_s=pace.accept_s,
            second_try_s=pace.second_try_s,
            keep_list=dependencies.keep_list,
        )
        self.reconciler = ReplicaReconciler(
            store,
            bus,
            leadership,
            feed,
            clock,
            snapshots=snapshots,
            sender=OrderSender(
                orders,
                dependencies.files,
                dependencies.changes,
                on_observation=self._observe,
                on_stopped=self._wake,
                stop_grace_s=pace.stop_grace_s,
                counter=dependencies.counter,
            ),
            backend_provisioner=BackendProvisioner(dependencies.acceptor, clock),
            file_provisioner=FileProvisioner(dependencies.files, memory, clock, on_change=self._wake),
            waiting=dependencies.waiting,
            pressure=dependencies.pressure,
            settings=settings,
            pace=pace,
            advance_trials=TrialKeeper(
                store, dependencies.models, leadership, feed, clock, lease=LEASE, tick_s=pace.trial_interval_s
            ).advance,
        )
        self.loads = LoadService(store, dependencies.models, feed, clock, cooldown=pace.cooldown)
        self.rows = ReplicaListing(store, self.activity)
        self.usage_recorder = UsageRecorder(store, leadership, clock, interval_s=pace.usage_interval_s)
        self.why = PlacementExplainer(snapshots, self.loads, pace.policy, clock)
        self.trials = Trials(store, dependencies.models, snapshots, self.why, feed)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Each has a name and a `run`."""
        return (self.reconciler, self.usage_recorder)

    def _wake(self) -> None:
        self.reconciler.wake()

    def _observe(self, observation: ReplicaObservation) -> None:
        self.reconciler.observe(observation)
