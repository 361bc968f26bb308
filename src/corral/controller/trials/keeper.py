"""Carries out trials of new revisions, one step in each pass of the replica reconciler, under its lease.

`rollouts/trial.py` decides each step from the stored row, the replicas and what receipts say. The model changes in the
transaction in which its trial ends, so another controller always finds one or the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from msgspec.structs import replace

from corral.contract.loads import LoadState
from corral.contract.messages.replicas import ReplicaState
from corral.contract.models import read_definition
from corral.controller.models.edits import ModelOrigin
from corral.controller.models.service import COUNTER as MODELS
from corral.controller.models.service import Models
from corral.controller.operations.progress import finish_or_reopen
from corral.controller.operations.revert import REVERTED
from corral.controller.operations.state import SOAKING, settle
from corral.controller.replicas.load_jobs import begin
from corral.controller.replicas.plan_input import PlanResult
from corral.controller.replicas.snapshot import FleetSnapshot, storable_job
from corral.controller.rollouts.comparison import Judgement
from corral.controller.rollouts.evidence import read_judgements
from corral.controller.rollouts.plan import MAX_SWITCH_FAILURES, NodeState
from corral.controller.rollouts.trial import (
    TrialReplica,
    is_worth_storing,
    plan_trial,
    share_of,
    state_of_trial,
    trial_words,
)
from corral.controller.runtime.change_feed import LOADS, REPLICAS, RULES, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.store.engine.transactions import Store, Transaction
from corral.store.engine.types import storable
from corral.store.records import (
    DesiredReplica,
    ModelTrial,
    OperationNode,
    OperationNodeStatus,
    ReplicaStage,
    Rollout,
    RolloutNodeBefore,
    RolloutPhase,
)
from corral.store.tables import load_jobs, models, operation_nodes, operations, replicas, revisions, rollouts
from corral.store.tables.models import StoredModel
from corral.store.tables.operations import Operation

log = get_log(__name__)
STARTING = "starting"  # the phase shown until a replica of the new revision serves
_STATES = {
    ReplicaStage.PLACED: NodeState.FETCHING,
    ReplicaStage.ORDERED: NodeState.SWITCHING,
    ReplicaStage.RUNNING: NodeState.SWITCHED,
}


@dataclass(frozen=True)
class _Seen:
    """What one pass saw of a trial."""

    replicas: tuple[TrialReplica, ...]
    trial: ModelTrial  # with the failures of the pass
    judgement: Judgement
    hardware: Mapping[str, str]  # of the nodes that serve one of the revisions


class TrialKeeper:
    def __init__(
        self,
        store: Store,
        models: Models,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        *,
        lease: str,
        tick_s: float,
    ) -> None:
        """`tick_s`: between two looks at what replicas served."""
        self._store = store
        self._models = models
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._lease = lease
        self._tick = timedelta(seconds=tick_s)
        self._judgements: Mapping[tuple[str, str], Judgement] = {}
        self._compared_at = float("-inf")

    async def advance(self, snapshot: FleetSnapshot, result: PlanResult) -> None:
        """One step of each trial in the snapshot. Only what changes is written."""
        async with self._store.read() as tx:
            await self._compare(tx, snapshot.rollouts)
            now = await tx.now()
            ids = [rollout.operation_id for rollout in snapshot.rollouts]
            known = {operation.id: operation for operation in await operations.list_for(tx, ids)}
            stored = {model.id: model for model in await models.list_(tx, [each.subject for each in snapshot.rollouts])}
        for rollout in snapshot.rollouts:
            seen = self._see(snapshot, result, rollout)
            after = _step(rollout, seen, known.get(rollout.operation_id), stored.get(rollout.subject), now)
            if is_worth_storing(rollout, after, self._tick):
                await self._write(rollout.operation_id, seen)

    async def _compare(self, tx: Transaction, active: Sequence[Rollout]) -> None:
        """Not with every pass: reading what replicas served takes a while."""
        soaking = {(each.operation_id, state.canary) for each in active for state in each.classes if state.soaking}
        age_s = self._clock.monotonic() - self._compared_at
        if self._judgements.keys() != soaking or not 0 <= age_s < self._tick.total_seconds() / 2:
            self._judgements = await read_judgements(tx, active)
            self._compared_at = self._clock.monotonic()

    def _see(self, snapshot: FleetSnapshot, result: PlanResult, rollout: Rollout) -> _Seen:
        trial = rollout.trial
        assert trial is not None
        rows = [
            row
            for row in result.rows.of_model(rollout.subject)
            if row.revision == trial.revision and row.stage is not ReplicaStage.LEAVING
        ]
        judgement = self._judgements.get((rollout.operation_id, state_of_trial(rollout).canary), Judgement())
        living = {row.node_id for row in result.rows.of_model(rollout.subject)} & snapshot.nodes.keys()
        return _Seen(
            tuple(_replica(snapshot, row) for row in rows),
            _with_failures(trial, snapshot, result, rollout),
            judgement,
            {node_id: snapshot.nodes[node_id].hardware for node_id in sorted(living)},
        )

    async def _write(self, operation_id: str, seen: _Seen) -> None:
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            await revisions.hold(tx, MODELS)
            await self._leadership.require(tx, self._lease)
            before = await rollouts.find(tx, operation_id)
            if before is None or before.is_over:
                return
            operation = await operations.get(tx, operation_id)
            model = await models.find(tx, before.subject)
            now = await tx.now()
            after = _step(before, seen, operation, model, now)
            if after == before:
                return
            await rollouts.put(tx, after)
            await self._write_operation(tx, operation, before, after, now)
            if model is not None:
                await self._write_model(tx, after, model, now)
            routes = after.is_over or share_of(before) != share_of(after)
            await revisions.bump(tx, "operations")
            if routes:
                await revisions.bump(tx, REPLICAS)
        _log(before, after)
        self._feed.notify("operations", operation_id)
        if after.is_over:
            self._feed.notify(MODELS, after.subject)
        if routes:
            self._feed.notify(REPLICAS)

    async def _write_model(self, tx: Transaction, after: Rollout, model: StoredModel, now: datetime) -> None:
        """The definition of the revision that won, where that is not the model's yet. A replica of it starts at once
        where one of the other runs: the two cannot run at the same time."""
        trial = after.trial
        if trial is None or after.phase not in (RolloutPhase.DONE, RolloutPhase.REVERTED):
            return
        done = after.phase is RolloutPhase.DONE
        if done is trial.in_place:  # the model has that definition
            return
        whole, origin, source = (
            (trial.definition, trial.origin, trial.source)
            if done
            else (trial.old_definition, trial.old_origin, trial.old_source)
        )
        await self._models.write(tx, model, read_definition(whole), origin=ModelOrigin(origin), source=source)
        await revisions.bump(tx, MODELS)
        if trial.in_place and await replicas.list_(tx, model=model.id):
            job = await load_jobs.find(tx, model.id)
            await load_jobs.put(tx, [storable_job(begin(model.id, trial.old_revision, now, job))])
            await revisions.bump(tx, LOADS)

    async def _write_operation(
        self, tx: Transaction, operation: Operation, before: Rollout, after: Rollout, now: datetime
    ) -> None:
        rows = await operation_nodes.list_(tx, operation.id)
        changed = [replace(_row(row, after), updated_at=now) for row in rows]
        await operation_nodes.put(tx, [row for row, old in zip(changed, rows, strict=True) if row != old])
        if operation.finished_at is not None:
            return  # a user cancelled it
        match after.phase:
            case RolloutPhase.REVERTED:
                outcome, error = REVERTED, after.verdict
            case RolloutPhase.ENDED:
                outcome, error = "cancelled", after.verdict
            case _:
                await finish_or_reopen(tx, [operation], now)
                return
        await operations.replace(
            tx, replace(operation, cancelled_at=now, finished_at=now, outcome=outcome, error=storable(error))
        )


def _step(
    before: Rollout, seen: _Seen, operation: Operation | None, model: StoredModel | None, now: datetime
) -> Rollout:
    if why := _why_ended(before, operation, model):
        return replace(before, phase=RolloutPhase.ENDED, verdict=why, ended_at=now)
    nodes = before.nodes | {node_id: RolloutNodeBefore(hardware) for node_id, hardware in seen.hardware.items()}
    return plan_trial(replace(before, trial=seen.trial, nodes=nodes), seen.replicas, seen.judgement, now)


def _why_ended(rollout: Rollout, operation: Operation | None, model: StoredModel | None) -> str:
    trial = rollout.trial
    if trial is None or operation is None or operation.finished_at is not None:
        return "it was cancelled"
    if model is None:
        return "the model was deleted"
    expected = trial.revision if trial.in_place else trial.old_revision
    return "" if model.revision == expected else "a later edit of the model decides"


def _replica(snapshot: FleetSnapshot, row: DesiredReplica) -> TrialReplica:
    host = snapshot.hosts.get(row.node_id)
    process = host.process_of(row) if host is not None else None
    return TrialReplica(
        node_id=row.node_id,
        node_name=host.name if host is not None else row.node_id,
        status=host.status if host is not None else "gone",
        state=_STATES[row.stage],
        ready=process is not None and process.state == ReplicaState.READY,
        process_id=process.process_id if process is not None else "",
        restarts=process.restarts if process is not None else 0,
    )


def _with_failures(trial: ModelTrial, snapshot: FleetSnapshot, result: PlanResult, rollout: Rollout) -> ModelTrial:
    """With the starts that failed in this pass, and why no node takes a replica."""
    trial = replace(trial, waiting=storable(result.trial_waits.get(rollout.subject, "")))
    for failure in result.trial_failures.get(rollout.subject, ()):
        host = snapshot.hosts.get(failure.row.node_id)
        name = host.name if host is not None else failure.row.node_id
        count = MAX_SWITCH_FAILURES if failure.on_every_node else trial.failures + 1
        trial = _failed(trial, failure.row.node_id, name, failure.error, count)
    job = result.jobs.get(rollout.subject)
    if trial.in_place and job is not None and job.state is LoadState.FAILED and job.revision == trial.revision:
        # The load has tried other nodes by itself.
        trial = _failed(trial, job.node_id, job.node_name, job.error, MAX_SWITCH_FAILURES)
    return trial


def _failed(trial: ModelTrial, node_id: str, name: str, error: str, failures: int) -> ModelTrial:
    known = {key: why for key, why in trial.failed_on.items() if key != node_id}
    return replace(trial, failures=failures, failed_node=name, failed_on={**known, node_id: storable(error, 1000)})


def _row(row: OperationNode, after: Rollout) -> OperationNode:
    match after.phase:
        case RolloutPhase.DONE:
            return replace(settle(row, OperationNodeStatus.SUCCESS, state_of_trial(after).passed), phase="")
        case RolloutPhase.REVERTED:
            return settle(row, OperationNodeStatus.WITHDRAWN, f"the rollout was reverted: {after.verdict}")
        case RolloutPhase.ENDED:
            return settle(row, OperationNodeStatus.SUPERSEDED, after.verdict)
        case _:
            state = state_of_trial(after)
            return replace(
                row,
                status=OperationNodeStatus.DOWNLOADING,
                phase=SOAKING if state.soaking else STARTING,
                reason=storable(trial_words(after)),
                percentage=max(row.percentage, _percentage(after)),
            )


def _percentage(rollout: Rollout) -> float:
    state, settings = state_of_trial(rollout), rollout.settings
    done = state.soaked_s / settings.soak_s if settings.soak_s else state.new_requests / settings.soak_requests
    return min(99.0, 100 * done)


def _log(before: Rollout, after: Rollout) -> None:
    facts = {"model": after.subject, "operation": after.operation_id}
    if after.phase is RolloutPhase.REVERTED:
        log.warning("revision is reverted", verdict=after.verdict, **facts)
    elif after.is_over:
        log.info("trial ended", phase=after.phase.value, why=after.verdict or state_of_trial(after).passed, **facts)
    elif share_of(before) != share_of(after):
        log.info("revision on trial gets another share", percent=share_of(after), **facts)
