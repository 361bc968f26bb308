"""Plans the replicas of one model: records failures, places the first replica, scales, updates the load job. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import datetime

from msgspec.structs import replace as changed

from corral.contract.messages.replicas import ReplicaState
from corral.controller.replicas import load_jobs as jobs
from corral.controller.replicas.lifecycle import DRAINING, HEALTHY, NODE_OFFLINE, OFFLINE, Prerequisites, ReplicaFailed
from corral.controller.replicas.load_jobs import TransferProgress
from corral.controller.replicas.plan_input import FileStatus, PlanInput, PlanResult
from corral.controller.replicas.scheduler_replicas import scheduler_replicas
from corral.controller.scheduler.eviction import Decision, EvictFirst, Purpose, WaitForCapacity, choose_placement
from corral.controller.scheduler.placement import NoCapacity, Placed, choose_node
from corral.controller.scheduler.scaling import (
    Hold,
    NotTaken,
    ScaleDown,
    ScaleUp,
    Unsatisfied,
    plan_scaling,
    replace_in_place,
)
from corral.controller.scheduler.world import Model, World
from corral.store.records import DesiredReplica, LoadJob, ReplicaStage

MAX_STEPS = 16  # of one model in one pass
MAX_REASONS = 3  # why nodes cannot take a model, shown to requests that wait for it


def reasons_text(found: NoCapacity) -> str:
    """For requests that wait: a reason that several nodes share appears once, and not all of a large fleet's."""
    if len(found.verdicts) < 2:
        return found.text
    reasons = {verdict.why_not: f"{verdict.node}: {verdict.why_not}" for verdict in reversed(found.verdicts)}
    shown = list(reversed(reasons.values()))[:MAX_REASONS]
    return "; ".join((found.text, *shown, *(("…",) if len(reasons) > len(shown) else ())))


def current_world(data: PlanInput, result: PlanResult) -> World:
    """The scheduler's world: the same for all models until one of them changes a row."""
    rows, cached = result.rows, result.cached_world
    if cached is None or cached[0] != rows.changes:
        replicas = scheduler_replicas(rows.values(), data.hosts)
        cached = (rows.changes, replace(data.world, replicas=replicas))
        result.cached_world = cached
    return cached[1]


def placed_row(model: Model, found: Placed, now: datetime) -> DesiredReplica:
    unique = f"{model.name}\0{found.node_id}\0{found.index}\0{now.isoformat()}"
    return DesiredReplica(
        node_id=found.node_id,
        model=model.name,
        replica=found.index,
        revision=model.revision,
        backend=model.backend,
        stage=ReplicaStage.PLACED,
        op_id=hashlib.sha256(unique.encode()).hexdigest()[:20],
        process_id="",
        created_at=now,
        updated_at=now,
        devices=found.fit.devices,
        memory_bytes=found.fit.memory_bytes,
        reason=found.text,
    )


class ModelPlan:
    """`failures`: replicas of the model that failed in this pass."""

    def __init__(self, data: PlanInput, result: PlanResult, model: Model, failures: list[ReplicaFailed]) -> None:
        self._input = data
        self._result = result
        self._job = result.jobs.get(model.name)
        self._model = model
        self._failures = failures

    def apply(self) -> None:
        self._record_failures()
        serving = self._serving()
        if serving:
            self._result.ready[self._model.name] = self._model.revision
            if self._job is not None and self._job.active:
                self._job = None
        self._reconcile_returned(serving)
        if self._job is not None and self._job.active and not self._current_rows():
            self._place_first()
        else:
            self._scale()
        self._store_job()

    def _place_first(self) -> None:
        """Place the first replica of the present revision. One of an earlier revision ends first where memory cannot
        hold both: users have replaced what it runs."""
        model = self._model_with_failures()
        decision = choose_placement(self._world(), model, Purpose.COLD)
        instead = replace_in_place(self._world(), model) if isinstance(decision, NoCapacity) else None
        row = self._result.rows.get(instead.replica.key) if instead is not None else None
        if instead is not None and row is not None:
            self._result.retire(row, instead.text, self._input.now)
            self._wait(f"waits for the replica of the earlier definition to stop: it {instead.text}")
        else:
            self._place(decision, Purpose.COLD)

    def _rows(self, *stages: ReplicaStage) -> list[DesiredReplica]:
        rows = self._result.rows.of_model(self._model.name)
        return [row for row in rows if row.stage in stages] if stages else rows

    def _current_rows(self) -> list[DesiredReplica]:
        """Running or starting, of the present revision, on nodes that are neither draining nor offline."""
        rows = self._rows(ReplicaStage.PLACED, ReplicaStage.ORDERED, ReplicaStage.RUNNING)
        own = [row for row in rows if row.revision == self._model.revision]
        return [row for row in own if self._status(row) not in (DRAINING, OFFLINE)]

    def _serving(self) -> list[DesiredReplica]:
        """Ready replicas of the present revision."""
        rows = self._rows(ReplicaStage.RUNNING)
        return [row for row in rows if row.revision == self._model.revision and self._is_serving(row)]

    def _status(self, row: DesiredReplica) -> str:
        host = self._input.hosts.get(row.node_id)
        return host.status if host is not None else OFFLINE

    def _is_serving(self, row: DesiredReplica) -> bool:
        host = self._input.hosts.get(row.node_id)
        process = host.process_of(row) if host is not None else None
        ready = process is not None and process.state == ReplicaState.READY
        return ready and self._status(row) not in (OFFLINE, DRAINING)

    def _model_with_failures(self) -> Model:
        """The model with the nodes on which its load failed."""
        return replace(self._model, failed_on=self._job.failed_on) if self._job is not None else self._model

    def _world(self) -> World:
        return current_world(self._input, self._result)

    def retire_stale(self) -> None:
        """End replicas of revisions that must not serve any more, and begin the load again if the model changed."""
        previous_revisions = self._input.previous_revisions.get(self._model.name, ())
        for row in self._rows():
            if row.revision == self._model.revision or self._input.is_on_trial(row):
                continue
            if row.stage in (ReplicaStage.PLACED, ReplicaStage.ORDERED):
                self._result.retire(row, "the model was changed", self._input.now)
            elif row.revision not in previous_revisions:
                self._result.retire(row, "it is of an earlier revision", self._input.now)
        job = self._job
        if job is not None and job.revision != self._model.revision:
            # Requests wait for the model, not for a revision; a load that failed before may work now.
            before = changed(job, failures=0)
            again = jobs.begin(self._model.name, self._model.revision, self._input.now, before)
            self._job = again if job.active else None

    def _record_failures(self) -> None:
        for failure in self._failures:
            if self._takes_over(failure.row):
                # The model is served: its node goes on with the switch, and the load is not to blame. A node that is
                # away says nothing about the others.
                if self._status(failure.row) == HEALTHY:
                    self._result.not_taken[self._model.name] = f"{self._node_name(failure.row)}: {failure.error}"
                self._result.events.append((f"replica failed: {failure.error}", failure.row))
                continue
            job = self._job or jobs.begin(self._model.name, self._model.revision, self._input.now)
            failed_on = {**job.failed_on, failure.row.node_id: failure.error}
            others = [node_id for node_id in self._input.world.nodes if node_id not in failed_on]
            # While other replicas serve there is no hurry, and a failed start is not repeated at once. Neither is a
            # load that has failed already and left this replica behind.
            elsewhere = (
                not failure.on_every_node
                and not self._is_cooling()
                and not self._serving()
                and isinstance(choose_node(self._world(), self._model_with_failures(), only=others), Placed)
            )
            blamed = "" if failure.on_every_node else failure.row.node_id
            self._job = jobs.fail(
                job, blamed, failure.error, self._input.now, self._input.cooldown, elsewhere=elsewhere
            )
            self._result.events.append((f"replica failed: {failure.error}", failure.row))

    def _takes_over(self, row: DesiredReplica) -> bool:
        """Whether a node that waits to switch still serves the model, and the replica is on another one."""
        due = {node.id for node in self._input.world.switching if node.switching.get(self._model.name) == ""}
        return row.node_id not in due and any(other.node_id in due for other in self._serving())

    def _node_name(self, row: DesiredReplica) -> str:
        node = self._input.world.nodes.get(row.node_id)
        return node.name if node is not None else row.node_id

    def _reconcile_returned(self, serving: list[DesiredReplica]) -> None:
        """Keep or retire replicas whose node was offline and is back: one that was replaced meanwhile leaves, once the
        others serve and no request waits."""
        schedule = self._model.schedule
        wanted = max(1, schedule.min_replicas)
        counted = sum(row.error != NODE_OFFLINE for row in self._current_rows())
        kept = sum(row.error != NODE_OFFLINE for row in serving)
        for row in [each for each in serving if each.error == NODE_OFFLINE]:
            if schedule.spread_all or counted < wanted:
                self._result.rows[row.key] = changed(row, error="", updated_at=self._input.now)
                counted += 1
                kept += 1
            elif kept >= wanted and not self._model.waiting:
                why = "its node was offline, and another replica has replaced it"
                self._result.retire(row, why, self._input.now)

    def _scale(self) -> None:
        """Apply the scheduler's steps as long as one leads to the next."""
        for _ in range(MAX_STEPS):
            step = plan_scaling(self._world(), self._model_with_failures())
            match step:
                case NotTaken(text=text):
                    self._result.not_taken[self._model.name] = text
                    return
                case ScaleUp(purpose=Purpose.SWITCH) if self._model.name in self._result.not_taken:
                    return
                case ScaleUp(purpose=Purpose.SWITCH) if self._job is not None and self._is_cooling():
                    self._result.not_taken[self._model.name] = self._job.error
                    return
                case ScaleUp(decision=decision, purpose=purpose):
                    if self._is_cooling() or not self._place(decision, purpose):
                        return
                case ScaleDown(replica=replica, text=text):
                    row = self._result.rows.get(replica.key)
                    if row is not None:
                        self._result.retire(row, text, self._input.now)
                    return
                case Unsatisfied(ticks=ticks, until=until, why=why):
                    self._result.unsatisfied[self._model.name] = (ticks, until)
                    self._no_capacity(why)
                    return
                case Hold(satisfied=satisfied):
                    schedule = self._model.schedule
                    if satisfied and (schedule.unsatisfiable_ticks or schedule.unsatisfiable_until is not None):
                        self._result.unsatisfied[self._model.name] = (0, None)
                    return

    def _is_cooling(self) -> bool:
        return self._job is not None and not self._job.active and not self._job.may_try(self._input.now)

    def _place(self, decision: Decision, purpose: Purpose) -> bool:
        """True: a replica was placed."""
        if (
            purpose in (Purpose.COLD, Purpose.MINIMUM)
            and not self._serving()
            and (self._job is None or not self._job.active)
        ):
            self._job = jobs.begin(self._model.name, self._model.revision, self._input.now, self._job)
        match decision:
            case Placed():
                self._add_row(decision)
                return True
            case EvictFirst(victims=victims, text=text):
                for victim in victims:
                    row = self._result.rows.get(victim.key)
                    if row is not None:
                        if row.stage is not ReplicaStage.LEAVING:
                            self._result.evicted.append(row)
                        self._result.retire(row, f"it was evicted for {self._model.name}", self._input.now)
                self._wait(text)
            case WaitForCapacity(text=text):
                self._wait(text)
            case NoCapacity():
                self._no_capacity(decision)
        return False

    def _add_row(self, found: Placed) -> None:
        row = placed_row(self._model, found, self._input.now)
        self._result.rows[row.key] = row
        self._result.events.append(("replica placed", row))

    def _no_capacity(self, found: NoCapacity) -> None:
        """Fail the load where only a change by users helps; otherwise wait."""
        if found.fits_later or not found.verdicts or self._model.backend in self._input.pending_lookups:
            self._wait(reasons_text(found))
        elif self._job is not None and self._job.active:
            why = "\n".join((found.text, *(found.why if len(found.verdicts) > 1 else ())))
            self._job = jobs.fail(self._job, "", why, self._input.now, self._input.cooldown, elsewhere=False)

    def _wait(self, text: str) -> None:
        if self._job is not None and self._job.active:
            self._job = jobs.set_waiting(self._job, text, self._input.now)

    def _store_job(self) -> None:
        job = self._job
        if job is not None and job.active:
            job = self._with_progress(job)
        if job is None or jobs.is_expired(job, self._input.now, self._input.cooldown):
            self._result.jobs.pop(self._model.name, None)
        else:
            self._result.jobs[self._model.name] = job

    def _with_progress(self, job: LoadJob) -> LoadJob:
        """The load follows the replica that is furthest."""
        starting = [row for row in self._current_rows() if row.stage is ReplicaStage.ORDERED]
        starting = starting or [row for row in self._current_rows() if row.stage is ReplicaStage.PLACED]
        if not starting:
            return jobs.follow(job, None, "", installed=False, progress=TransferProgress(), now=self._input.now)
        row = min(starting, key=lambda row: row.created_at)
        host = self._input.hosts[row.node_id]
        installed = self._input.backends.get((row.node_id, row.backend), Prerequisites()).backend
        progress = self._input.transfers.get(row.key)
        if progress is None and row.stage is ReplicaStage.PLACED and installed:
            progress = self._input.files.get((row.model, row.revision), FileStatus()).progress
        return jobs.follow(
            job,
            row,
            host.name,
            installed=installed,
            progress=progress or TransferProgress(),
            now=self._input.now,
            unreachable=host.why_unreachable,
        )
