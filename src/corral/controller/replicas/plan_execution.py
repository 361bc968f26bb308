"""Carries out what `plan` decided: writes it in one transaction, fenced by the lease, and only if nothing was written
meanwhile; then sends the orders, in the background, and logs what was decided."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from msgspec.structs import replace

from corral.contract.messages.replicas import StartReplica, StopReplica
from corral.controller.orders.observations import ReplicaObservation, WorkerUnreachable
from corral.controller.orders.replica_calls import ReplicaOrders
from corral.controller.registry.changes import NodeChanges
from corral.controller.replicas.plan_input import PlanResult
from corral.controller.replicas.provisioners import FileSource
from corral.controller.replicas.snapshot import FleetSnapshot, read_desired, storable_job, storable_replica
from corral.controller.runtime.change_feed import LOADS, REPLICAS, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.log import get_log
from corral.kit.tasks import BackgroundTasks
from corral.store.engine.transactions import Store
from corral.store.records import DesiredReplica, ReplicaStage
from corral.store.tables import due_switches, load_jobs, model_schedules, models, replicas, revisions

LAST_USE_RESOLUTION = timedelta(seconds=5)  # a later last use is written only when it differs by at least this


class PlanWriter:
    def __init__(self, store: Store, leadership: Leadership, feed: ChangeFeed, *, lease: str) -> None:
        self._store = store
        self._leadership = leadership
        self._feed = feed
        self._lease = lease

    async def write(self, snapshot: FleetSnapshot, result: PlanResult, *, retry_unsatisfiable: bool) -> bool:
        """False: rows or jobs changed since the snapshot, and nothing was written. `retry_unsatisfiable`: end the pause
        of schedules that no node could satisfy."""
        before = {row.key: row for row in snapshot.rows}
        changed = [row for key, row in result.rows.items() if not _is_same(before.get(key), row)]
        removed = [row for key, row in before.items() if key not in result.rows]
        jobs = [job for name, job in result.jobs.items() if snapshot.jobs.get(name) != job]
        done = sorted(snapshot.jobs.keys() - result.jobs.keys())
        settled = {name: revision for name, revision in result.ready.items() if snapshot.previous_revisions.get(name)}
        schedules = {
            name: (ticks, until)
            for name, (ticks, until) in result.unsatisfied.items()
            if (schedule := snapshot.models[name].schedule).scales
            and (ticks, until) != (schedule.unsatisfiable_ticks, schedule.unsatisfiable_until)
        }
        refused = [
            replace(row, refusals=result.not_taken | row.refusals)
            for row in snapshot.due_switches
            if any(model in result.not_taken and model not in row.refusals for model in row.models)
        ]
        if not (changed or removed or jobs or done or settled or schedules or refused or retry_unsatisfiable):
            return True
        routing = bool(removed or settled) or any(_changes_routing(before.get(row.key), row) for row in changed)
        async with self._store.write() as tx:
            await self._leadership.require(tx, self._lease)
            rows, known = await read_desired(tx)
            if rows != snapshot.rows or known != snapshot.jobs:
                return False
            await replicas.delete(tx, removed)
            await replicas.put(tx, [storable_replica(row) for row in changed])
            await load_jobs.put(tx, [storable_job(job) for job in jobs])
            await load_jobs.delete(tx, done)
            for name, revision in sorted(settled.items()):
                await models.forget_previous_revisions(tx, name, revision)
            if retry_unsatisfiable:
                await model_schedules.clear_unsatisfiable(tx)
            for name, (ticks, until) in sorted(schedules.items()):
                await model_schedules.mark_unsatisfiable(tx, name, ticks, until)
            for row in refused:
                log.info("no node takes over", node_id=row.node_id, models=row.models, why=row.refusals)
                own = {model: why for model, why in row.refusals.items() if model in row.models}
                await due_switches.refuse(tx, row.node_id, row.backend, row.since, own)
            if jobs or done or refused:
                await revisions.bump(tx, LOADS)
            if routing:
                await revisions.bump(tx, REPLICAS)
        if jobs or done or refused:
            self._feed.notify(LOADS)
        if routing:
            self._feed.notify(REPLICAS)
        return True


def _is_same(before: DesiredReplica | None, after: DesiredReplica) -> bool:
    """Apart from a last use that hardly moved."""
    if before is None or before == after:
        return before is not None
    if replace(before, last_used_at=after.last_used_at) != after or after.last_used_at is None:
        return False
    return before.last_used_at is not None and after.last_used_at - before.last_used_at < LAST_USE_RESOLUTION


def _changes_routing(before: DesiredReplica | None, after: DesiredReplica) -> bool:
    return (before is not None and before.stage is ReplicaStage.LEAVING) != (after.stage is ReplicaStage.LEAVING)


log = get_log(__name__)


class ReplicaCounter(Protocol):
    """Counts for metrics."""

    def on_loaded(self, model: str, node: str, seconds: float) -> None: ...

    def on_evicted(self, model: str, node: str) -> None: ...


class OrderSender(BackgroundTasks):
    """`async with` it. `on_observation` gets what became of a start; `on_stopped` is called after a stop."""

    def __init__(
        self,
        calls: ReplicaOrders,
        files: FileSource,
        changes: NodeChanges,
        *,
        on_observation: Callable[[ReplicaObservation], None],
        on_stopped: Callable[[], None],
        stop_grace_s: float = 0.0,
        counter: ReplicaCounter | None = None,
    ) -> None:
        """`stop_grace_s`: 0 = the worker's own."""
        super().__init__()
        self._calls = calls
        self._files = files
        self._changes = changes
        self._on_observation = on_observation
        self._on_stopped = on_stopped
        self._stop_grace_s = stop_grace_s
        self._counter = counter

    def send(self, snapshot: FleetSnapshot, result: PlanResult) -> None:
        """Returns at once."""
        _log_events(snapshot, result)
        if self._counter is not None:
            _count_events(self._counter, snapshot, result)
        for start in result.starts:
            definition = snapshot.definition_of(start.row)
            if definition is not None:
                self.start(self._start_replica(start.row, definition.whole), name=f"start {start.row.model}")
        for row, process_id in result.stops:
            order = StopReplica(
                process_id=process_id,
                grace_s=self._stop_grace_s,
                op_id=row.op_id,
                attempt=row.stop_attempt,
                accept=row.stop_attempt > 0,
                force=row.force,
            )
            self.start(self._stop_replica(row.node_id, order), name=f"stop {process_id}")
        for node_id, process_id in result.unwanted:
            # Without force: a process that looks idle from here may have received a request a moment ago.
            order = StopReplica(process_id=process_id, grace_s=self._stop_grace_s, op_id=f"clear-{process_id}")
            self.start(self._stop_replica(node_id, order), name=f"stop {process_id}")

    async def _start_replica(self, row: DesiredReplica, definition: dict[str, Any]) -> None:
        urls, token = self._files.sources_for(row.node_id, row.files or ())
        observation = await self._calls.start(
            row.node_id,
            StartReplica(
                op_id=row.op_id,
                attempt=row.attempt,
                process_id=row.process_id,
                model=row.model,
                replica=row.replica,
                backend=row.backend,
                revision=row.revision,
                definition=definition,
                files=row.files or (),
                devices=row.devices,
                memory_bytes=row.memory_bytes,
                sources=urls,
                source_token=token,
                accept=True,
            ),
        )
        log.info("replica ordered", model=row.model, node_id=row.node_id, answer=type(observation).__name__)
        if isinstance(observation, WorkerUnreachable):
            await self._changes.mark_unreachable(row.node_id)
        self._on_observation(observation)

    async def _stop_replica(self, node_id: str, order: StopReplica) -> None:
        await self._calls.stop(node_id, order)
        self._on_stopped()


def _count_events(counter: ReplicaCounter, snapshot: FleetSnapshot, result: PlanResult) -> None:
    for row in result.evicted:
        counter.on_evicted(row.model, _node_name(snapshot, row))
    for row in result.loaded:
        if row.ready_at is not None:
            counter.on_loaded(row.model, _node_name(snapshot, row), (row.ready_at - row.created_at).total_seconds())


def _node_name(snapshot: FleetSnapshot, row: DesiredReplica) -> str:
    host = snapshot.hosts.get(row.node_id)
    return host.name if host is not None else ""


def _log_events(snapshot: FleetSnapshot, result: PlanResult) -> None:
    for words, row in result.events:
        log.info(
            words.splitlines()[0][:200],
            model=row.model,
            node=_node_name(snapshot, row),
            node_id=row.node_id,
            replica=row.replica,
            why=row.reason,
        )
