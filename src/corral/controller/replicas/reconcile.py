"""Drives replicas towards what should run: reads a snapshot, asks `plan`, writes the result, sends the orders.

One controller does this at a time, under a lease that fences every write. No lock is held while planning: before it
writes, the reconciler reads its own rows again, and if they changed meanwhile it plans again. Orders go out after the
commit; if the controller dies in between, the next leader finds them under an older epoch and sends them again as the
same attempt. Safe to call at any time, any number of times, for any reason.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from msgspec.structs import replace as changed

from corral.bus.api import Bus, Tokens
from corral.contract.messages.backends import Phase
from corral.contract.messages.replicas import (
    START_REPLICA_PROGRESS,
    START_REPLICA_RESULT,
    ReplicaProgress,
    ReplicaResult,
)
from corral.controller.backends.rules import Wanted
from corral.controller.inventory.activity import FRESH_S
from corral.controller.operations.views import sources_text
from corral.controller.orders.observations import OrderEnded, ReplicaObservation
from corral.controller.orders.order import OrderId
from corral.controller.replicas.lifecycle import LifecycleTimes, Prerequisites
from corral.controller.replicas.load_jobs import Cooldown, TransferProgress
from corral.controller.replicas.plan import plan_replicas
from corral.controller.replicas.plan_execution import OrderSender, PlanWriter
from corral.controller.replicas.plan_input import FileStatus, Key, PlanInput, PlanResult
from corral.controller.replicas.provisioners import BackendProvisioner, FileProvisioner
from corral.controller.replicas.snapshot import (
    FleetSnapshot,
    SnapshotReader,
    has_work,
)
from corral.controller.runtime.change_feed import LOADS, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.controller.scheduler.world import Policy, World
from corral.controller.settings.models import ReplicaSettings
from corral.kit.clock import Clock
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store
from corral.store.records import DesiredReplica, ReplicaStage

LEASE = "replicas"
WAKES = ("inventory", "nodes", "models", "schedules", LOADS)


@dataclass(frozen=True)
class ReplicaPace:
    """Intervals, limits and rules that depend on other settings, or that are none."""

    busy_interval_s: float = 0.5  # between two passes while a load or a stop is in progress
    rest_s: float = 0.1  # at least, between two passes: events that arrive together are handled together
    orphan_interval_s: float = 30.0  # between two passes when no replica is wanted, to find leftover processes
    times: LifecycleTimes = field(default_factory=LifecycleTimes)
    cooldown: Cooldown = field(default_factory=Cooldown)
    policy: Policy = field(default_factory=Policy)
    localai: bool = False  # this controller serves LocalAI workers
    stop_grace_s: float = 0.0  # 0: the worker's own
    accept_s: float = 10.0  # how long a worker may take to accept an order
    second_try_s: float = 0.25
    fresh_s: float = FRESH_S  # reports of active requests count for so long
    trial_interval_s: float = 2.0  # between two passes while a new revision is on trial
    usage_interval_s: float = 30.0  # how often memory use and file locations are recorded


def no_pressure(_model: str, _within_s: float) -> int:
    return 0


AdvanceTrials = Callable[[FleetSnapshot, PlanResult], Awaitable[None]]


async def no_trials(_snapshot: FleetSnapshot, _result: PlanResult) -> None:
    pass


class ReplicaReconciler:
    name = "replicas"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        *,
        snapshots: SnapshotReader,
        sender: OrderSender,
        backend_provisioner: BackendProvisioner,
        file_provisioner: FileProvisioner,
        waiting: Callable[[], Mapping[str, int]] = dict,
        pressure: Callable[[str, float], int] = no_pressure,
        settings: ReplicaSettings,
        pace: ReplicaPace,
        advance_trials: AdvanceTrials = no_trials,
    ) -> None:
        """`waiting`: requests that wait at gateways, by model, as reported to this controller. `pressure`: how often
        within so many seconds a request of a model had to leave the replica that caches its prefix. `advance_trials`:
        takes the trials of new revisions one step further; `controller/trials` imports this package."""
        self._store = store
        self._bus = bus
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._snapshots = snapshots
        self._builds = snapshots.builds
        self._activity = snapshots.activity
        self._sender = sender
        self._backend_provisioner = backend_provisioner
        self._file_provisioner = file_provisioner
        self._waiting = waiting
        self._pressure = pressure
        self._advance_trials = advance_trials
        self._interval_s = settings.replica_interval_s
        self._pace = pace
        self._writer = PlanWriter(store, leadership, feed, lease=LEASE)
        self._wake = Wake()
        self._observations: list[ReplicaObservation] = []
        self._progress: dict[OrderId, ReplicaProgress] = {}
        self._orphans: dict[str, datetime] = {}
        self._stopped_unwanted: frozenset[str] = frozenset()  # processes without a row that were told to stop
        self._busy_since: dict[str, float] = {}  # by model: since when all its ready replicas are busy
        self._last_pass_at = float("-inf")
        self._capacity_may_have_changed = False
        self._is_busy = False
        self._has_trials = False

    def wake(self) -> None:
        self._wake.set()

    def observe(self, observation: ReplicaObservation) -> None:
        """Take the outcome of an order into the next pass."""
        self._observations.append(observation)
        self.wake()

    async def run(self) -> None:
        for counter in WAKES:
            self._feed.on(counter, self.wake)
        for counter in ("nodes", "schedules"):
            self._feed.on(counter, self._on_capacity_change)
        forget = self._bus.on_change(lambda _: self.wake())
        try:
            async with AsyncExitStack() as stack:
                for part in (self._builds, self._backend_provisioner, self._file_provisioner):
                    await stack.enter_async_context(part)
                await self._activity.listen()
                await self._bus.subscribe(START_REPLICA_RESULT, self._on_result)
                await self._bus.subscribe(START_REPLICA_PROGRESS, self._on_progress)
                async with asyncio.TaskGroup() as tasks, self._sender:
                    tasks.create_task(self._tick())
                    await run_every(self.name, self._interval_s, self._paced, clock=self._clock, wake=self._wake)
        finally:
            forget()

    def _on_capacity_change(self) -> None:
        """A node joined, or its labels or budget changed: a model that did not fit before may fit now."""
        self._capacity_may_have_changed = True

    async def _tick(self) -> None:
        """Wake the reconciler often while something waits for a moment in time, not for an event."""
        while True:
            await self._clock.sleep(self._pace.busy_interval_s)
            since_s = self._clock.monotonic() - self._last_pass_at
            if self._is_busy or (self._has_trials and since_s >= self._pace.trial_interval_s):
                self.wake()

    async def _paced(self) -> None:
        began = self._clock.monotonic()
        await self.run_once()
        took_s = self._clock.monotonic() - began
        # In a large fleet a pass takes a while and events never stop: leave time for the rest of the controller.
        await self._clock.sleep(max(self._pace.rest_s, min(2 * took_s, self._interval_s)))

    async def _on_result(self, result: ReplicaResult, tokens: Tokens) -> None:
        # The subject proves the sender; the message's own claims do not.
        order = OrderId(tokens["node"], result.op_id, result.attempt)
        self.observe(OrderEnded(order, result.success, result.error))

    async def _on_progress(self, report: ReplicaProgress, tokens: Tokens) -> None:
        order = OrderId(tokens["node"], report.op_id, report.attempt)
        before = self._progress.get(order)
        if before is None or before.seq < report.seq:
            self._progress[order] = report

    def _transfers(self, snapshot: FleetSnapshot) -> dict[Key, TransferProgress]:
        """How far nodes are with the backends and files they fetch."""
        found = dict(snapshot.installing)
        orders = {OrderId(row.node_id, row.op_id, row.attempt): row for row in snapshot.rows}
        self._progress = {order: report for order, report in self._progress.items() if order in orders}
        for order, report in self._progress.items():
            staging = report.phase != Phase.STARTING
            moves = (f"{report.phase} {report.file}".strip(), sources_text(report.sources, report.bad_sources))
            found[orders[order].key] = TransferProgress(
                bytes_sent=report.current_bytes,
                total_bytes=report.total_bytes,
                file_index=report.file_index,
                total_files=report.total_files,
                text=", ".join(part for part in moves if part) if staging else "",
                staging=staging,
            )
        return found

    async def run_once(self) -> None:
        if not await self._leadership.lead(LEASE, every_s=self._interval_s):
            self._observations.clear()  # the leader learns it from heartbeats, or asks again
            self._progress.clear()
            self._is_busy = self._has_trials = False
            self._file_provisioner.ensure({})
            return
        if self._bus.connected and await self._is_due():
            await self._reconcile()

    async def _is_due(self) -> bool:
        async with self._store.read() as tx:
            if await has_work(tx):
                return True
        self._is_busy = self._has_trials = False
        return self._clock.monotonic() - self._last_pass_at >= self._pace.orphan_interval_s

    async def _reconcile(self) -> None:
        self._last_pass_at = self._clock.monotonic()
        observations, self._observations = self._observations, []
        capacity_may_have_changed, self._capacity_may_have_changed = self._capacity_may_have_changed, False
        fetched = self._file_provisioner.statuses()  # before the store is read: a file reported here is stored there
        try:
            snapshot = await self._snapshots.read()
            result = plan_replicas(self._plan_input(snapshot, observations, fetched))
            with self._leadership.resign_if_unknown(LEASE):
                written = await self._writer.write(snapshot, result, retry_unsatisfiable=capacity_may_have_changed)
            if not written:
                self._restore(observations, capacity_may_have_changed)
                self.wake()
                return
        except BaseException:
            self._restore(observations, capacity_may_have_changed)
            raise
        if capacity_may_have_changed:
            self.wake()  # the schedules that were paused are planned in the next pass
        self._orphans = result.orphans
        stopped = {process_id for _, process_id in result.unwanted}
        self._stopped_unwanted = (self._stopped_unwanted & snapshot.process_ids) | stopped
        self._sender.send(snapshot, result)
        self._provision(snapshot, result)
        active = any(job.active for job in result.jobs.values())
        self._is_busy = active or any(row.stage is not ReplicaStage.RUNNING for row in result.rows.values())
        self._activity.forget_all_but(snapshot.process_ids)
        self._has_trials = bool(snapshot.rollouts)
        if self._has_trials:
            with self._leadership.resign_if_unknown(LEASE):
                await self._advance_trials(snapshot, result)

    def _restore(self, observations: list[ReplicaObservation], capacity_may_have_changed: bool) -> None:
        """The pass was not written: keep for the next one what is known only in memory."""
        self._observations = observations + self._observations
        self._capacity_may_have_changed = self._capacity_may_have_changed or capacity_may_have_changed

    def _plan_input(
        self,
        snapshot: FleetSnapshot,
        observations: list[ReplicaObservation],
        fetched: dict[tuple[str, str], FileStatus],
    ) -> PlanInput:
        backends = dict(snapshot.backends)
        for key, why in self._backend_provisioner.refused.items():
            backends[key] = Prerequisites(error=f"{key[1]} cannot be installed there: {why}")
        rows = [self._with_last_use(row, snapshot) for row in snapshot.rows]
        waiting = self._waiting()
        own_rows = [row for row in rows if row.revision != snapshot.trial_revision(row.model)]
        models = {
            name: replace(
                model,
                busy_for_s=self._busy_for_s(name, own_rows, snapshot),
                waiting=max(model.waiting, waiting.get(name, 0)),
                only_load_waits=model.only_load_waits and not waiting.get(name, 0),
                pressure=self._pressure(name, _since_newest_s(name, rows, snapshot)),
            )
            for name, model in snapshot.models.items()
        }
        backend_names = {model.backend for model in models.values()}
        return PlanInput(
            now=snapshot.now,
            epoch=self._leadership.epoch(LEASE),
            world=World(snapshot.now, snapshot.nodes, models, policy=self._pace.policy),
            hosts=snapshot.hosts,
            rows=rows,
            jobs=snapshot.jobs,
            observations=observations,
            backends=backends,
            files=fetched,
            transfers=self._transfers(snapshot),
            previous_revisions=snapshot.previous_revisions,
            trials=snapshot.trials,
            orphans=self._orphans,
            stopped_unwanted=self._stopped_unwanted,
            pending_lookups=frozenset(name for name in backend_names if self._builds.is_looking_up(name)),
            times=self._pace.times,
            cooldown=self._pace.cooldown,
        )

    def _with_last_use(self, row: DesiredReplica, snapshot: FleetSnapshot) -> DesiredReplica:
        host = snapshot.hosts.get(row.node_id)
        process = host.process_of(row) if host is not None else None
        ago_s = self._activity.used_s_ago(process.process_id) if process is not None else None
        if ago_s is None:
            return row
        at = snapshot.now - timedelta(seconds=ago_s)
        return changed(row, last_used_at=at) if row.last_used_at is None or row.last_used_at < at else row

    def _busy_for_s(self, model: str, rows: list[DesiredReplica], snapshot: FleetSnapshot) -> float:
        ready = [row for row in rows if row.model == model and row.stage is ReplicaStage.RUNNING]
        busy = False
        for row in ready:
            host = snapshot.hosts.get(row.node_id)
            process = host.process_of(row) if host is not None else None
            if host is None or process is None:
                continue
            busy = host.activity[process.process_id].in_flight >= max(1, process.slots)
            if not busy:
                break
        if not busy:
            self._busy_since.pop(model, None)
            return 0.0
        now = self._clock.monotonic()
        return now - self._busy_since.setdefault(model, now)

    def _provision(self, snapshot: FleetSnapshot, result: PlanResult) -> None:
        """Have backends installed and files fetched for the replicas that were placed."""
        placed = [row for row in result.rows.values() if row.stage is ReplicaStage.PLACED]
        lacking = {
            (row.node_id, row.backend)
            for row in placed
            if not snapshot.backends.get((row.node_id, row.backend), Prerequisites()).backend
            and not isinstance(snapshot.wanted.get((row.node_id, row.backend)), Wanted)
        }
        self._backend_provisioner.ensure(lacking)
        self._file_provisioner.ensure(
            {
                (row.model, row.revision): definition
                for row in placed
                if row.files is None and (definition := snapshot.definition_of(row)) is not None
            }
        )


def _since_newest_s(model: str, rows: list[DesiredReplica], snapshot: FleetSnapshot) -> float:
    """The newest replica answers the pressure that led to it: that must not lead to another one
    (docs/reference/wire/routing.md#scaling)."""
    newest = max((row.created_at for row in rows if row.model == model), default=None)
    return math.inf if newest is None else max(0.0, (snapshot.now - newest).total_seconds())
