"""Plans replicas: compares what should run with what does, for every model. Pure.

First the next step of each replica (`lifecycle.py`), then processes without a row, then each model (`model_plan.py`).
Where a new replica goes, what is evicted for it and how many there should be are decisions of the scheduler.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as changed

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.controller.inventory.activity import ProcessActivity
from corral.controller.replicas.lifecycle import (
    Keep,
    Prerequisites,
    ReplicaFailed,
    ReplicaGone,
    ReplicaHost,
    Start,
    Stop,
    apply_observation,
    next_step,
)
from corral.controller.replicas.model_plan import ModelPlan
from corral.controller.replicas.plan_input import DesiredReplicas, FileStatus, PlanInput, PlanResult
from corral.controller.replicas.scheduler_replicas import scheduler_replicas
from corral.controller.replicas.trial_plan import plan_trial_replicas
from corral.controller.scheduler.placement import NoCapacity, choose_node
from corral.store.records import DesiredReplica, ReplicaStage


def plan_replicas(data: PlanInput) -> PlanResult:
    result = PlanResult(DesiredReplicas(data.rows), dict(data.jobs))
    failures = _step_replicas(data, result)
    _adopt_orphans(data, result)
    names = {key[1] for key in result.rows} | set(result.jobs) | set(failures)
    names |= {name for name, model in data.world.models.items() if model.schedule.scales}
    names |= {name for node in data.world.switching for name in node.switching}
    plans = []
    for name in sorted(names):
        model = data.world.models.get(name)
        if model is None or model.disabled:
            _retire_all(data, result, name, "the model was deleted" if model is None else "the model was disabled")
        else:
            plans.append(ModelPlan(data, result, model, failures.get(name, [])))
    # For all models first: a replica that must not serve any more does not count when another model needs memory.
    for plan in plans:
        plan.retire_stale()
    for plan in plans:
        plan.apply()
    for name in sorted(data.trials):
        plan_trial_replicas(data, result, data.trials[name])
    return result


def _step_replicas(data: PlanInput, result: PlanResult) -> dict[str, list[ReplicaFailed]]:
    """Take each replica one step further. Returns the failures, by model."""
    failures: dict[str, list[ReplicaFailed]] = {}
    for key, row in list(result.rows.items()):
        after = _apply_observations(data, row)
        host = data.hosts.get(row.node_id)
        if isinstance(after, DesiredReplica) and (fitted := _recheck_fit(data, result, after)) is None:
            del result.rows[key]
            result.events.append(("replica does not fit where it was placed", row))
            continue
        if isinstance(after, DesiredReplica):
            after, ready = _find_prerequisites(data, fitted or after)
            following = next_step(after, host, ready, data.now, data.epoch, data.times)
        else:
            following = after
        match following:
            case Keep(row=kept):
                if kept.stage is ReplicaStage.RUNNING and row.stage is not ReplicaStage.RUNNING:
                    result.events.append(("replica ready", kept))
                    result.loaded.append(kept)
                result.rows[key] = kept
            case Start(row=sent):
                result.rows[key] = sent
                result.starts.append(following)
            case Stop(row=sent, process_id=process_id):
                result.rows[key] = sent
                result.stops.append((sent, process_id))
            case ReplicaGone():
                del result.rows[key]
                result.events.append((following.why or "replica gone", row))
            case ReplicaFailed():
                del result.rows[key]
                kept_for = result.trial_failures if data.is_on_trial(row) else failures
                kept_for.setdefault(row.model, []).append(following)
                left = host.process_of(row) if host is not None and host.known else None
                # A ready process may be busy although its order failed: it is treated like any process without a row.
                if left is not None and left.state != ReplicaState.READY:
                    result.unwanted.append((row.node_id, left.process_id))
    return failures


def _apply_observations(data: PlanInput, row: DesiredReplica) -> DesiredReplica | ReplicaFailed:
    for observation in data.observations:
        if (observation.order.node_id, observation.order.operation) == (row.node_id, row.op_id):
            after = apply_observation(row, observation, data.now, data.times)
            if isinstance(after, ReplicaFailed):
                return after
            row = after
    return row


def _recheck_fit(data: PlanInput, result: PlanResult, row: DesiredReplica) -> DesiredReplica | None:
    """Only after its files were fetched is it certain what a replica needs. None: it does not fit on its node."""
    model = data.model_of(row)
    if row.stage is not ReplicaStage.PLACED or model is None or not model.memory.known:
        return row
    arrived = row.files is None and data.files.get((row.model, row.revision), FileStatus()).files is not None
    if row.memory_bytes and not arrived:
        return row
    others = [each for key, each in result.rows.items() if key != row.key]
    found = choose_node(replace(data.world, replicas=scheduler_replicas(others, data.hosts)), model, only={row.node_id})
    if isinstance(found, NoCapacity):
        return None
    return changed(row, devices=found.fit.devices, memory_bytes=found.fit.memory_bytes, reason=found.text)


def _find_prerequisites(data: PlanInput, row: DesiredReplica) -> tuple[DesiredReplica, Prerequisites]:
    ready = data.backends.get((row.node_id, row.backend), Prerequisites())
    if row.stage is not ReplicaStage.PLACED:
        return row, ready
    files = data.files.get((row.model, row.revision), FileStatus())
    if files.error:
        return row, replace(ready, error=files.error, on_every_node=True)
    if row.files is None and files.files is not None:
        row = changed(row, files=files.files, updated_at=data.now)
    return row, ready


def _adopt_orphans(data: PlanInput, result: PlanResult) -> None:
    """Adopt processes without a row that serve a wanted model; stop the others after a while, once they are idle."""
    unwanted = {process_id for _, process_id in result.unwanted}
    owned = {process.process_id for row in result.rows.values() for process in _processes_of(data, row)}
    for host in data.hosts.values():
        if not (host.accepts and host.known and host.reachable):
            continue
        for process in host.processes:
            if not process.model or process.process_id in unwanted | owned:
                continue
            if _is_wanted(data, result, host, process):
                row = _adopted_row(data, host, process)
                result.rows[row.key] = row
                result.events.append(("replica adopted", row))
                continue
            since = data.orphans.get(process.process_id, data.now)
            result.orphans[process.process_id] = since
            idle = host.activity.get(process.process_id, ProcessActivity())
            if data.now - since >= data.times.orphan_after and idle.known and idle.in_flight == 0:
                result.unwanted.append((host.id, process.process_id))


def _processes_of(data: PlanInput, row: DesiredReplica) -> list[ReplicaProcess]:
    """The replica's process, and one that is starting to replace it because its backend is being upgraded. Of two that
    are ready, one has to stop."""
    host = data.hosts.get(row.node_id)
    if host is None:
        return []
    own, key = host.process_of(row), (row.model, row.replica, row.revision)
    starting = (ReplicaState.STARTING, ReplicaState.RESTARTING)
    return [
        process
        for process in host.processes
        if process is own or ((process.model, process.replica, process.revision) == key and process.state in starting)
    ]


def _is_wanted(data: PlanInput, result: PlanResult, host: ReplicaHost, process: ReplicaProcess) -> bool:
    model = data.world.models.get(process.model)
    if model is None or model.disabled or (host.id, process.model, process.replica) in result.rows:
        return False
    if process.process_id in data.stopped_unwanted:
        return False
    allowed = [model.revision, *data.previous_revisions.get(model.name, ())]
    if (trial := data.trials.get(model.name)) is not None:
        allowed.append(trial.model.revision)
    return process.state == ReplicaState.READY and process.revision in allowed


def _adopted_row(data: PlanInput, host: ReplicaHost, process: ReplicaProcess) -> DesiredReplica:
    return DesiredReplica(
        node_id=host.id,
        model=process.model,
        replica=process.replica,
        revision=process.revision,
        backend=process.backend,
        stage=ReplicaStage.RUNNING,
        op_id=f"adopted-{process.process_id}",
        process_id=process.process_id,
        created_at=data.now,
        updated_at=data.now,
        attempt=1,
        devices=process.devices,
        memory_bytes=process.memory_bytes,
        files=(),
        reason="its process was already running",
        boot_id=host.boot_id,
        ready_at=data.now,
    )


def _retire_all(data: PlanInput, result: PlanResult, name: str, why: str) -> None:
    result.jobs.pop(name, None)
    result.not_taken[name] = why
    for row in result.rows.of_model(name):
        result.retire(row, why, data.now)
