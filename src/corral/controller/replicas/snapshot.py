"""Reads the input of `plan` from the store: a snapshot of the whole database. Before the plan is written, the rows are
read again and must still be the same; so no transaction stays open while planning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from msgspec.structs import replace as struct_replace

from corral.contract.labels import selector_of_map
from corral.contract.messages.replicas import ReplicaProcess
from corral.contract.models import Definition, read_definition
from corral.controller.backends.catalogue import MachineKind
from corral.controller.backends.rules import Unwanted, Wanted, fold, without_overruled
from corral.controller.backends.world import TargetKey
from corral.controller.files.required_files import current_files, is_archive, is_member, parse_member
from corral.controller.inventory.activity import ActivityTracker, ProcessActivity
from corral.controller.inventory.installed import find_installed, names_in
from corral.controller.models.views import definition_of
from corral.controller.replicas.builds import Builds
from corral.controller.replicas.lifecycle import Prerequisites, ReplicaHost
from corral.controller.replicas.load_jobs import NOT_INSTALLED, TransferProgress
from corral.controller.replicas.plan_input import Trial
from corral.controller.rollouts.hardware_class import hardware_of
from corral.controller.rollouts.trial import share_of
from corral.controller.scheduler import world as scheduler
from corral.controller.scheduler.memory import MeasuredUsage, device_share, is_ram_only
from corral.controller.scheduler.world import Build, BuildState, Memory, Model, ModelFile, Schedule, budget_of
from corral.kit.humanize import first_and_last_line
from corral.store.engine.transactions import Store, Transaction
from corral.store.engine.types import storable
from corral.store.records import (
    BackendIntent,
    BackendRule,
    DesiredReplica,
    DueSwitch,
    LoadJob,
    ReplicaStage,
    Rollout,
    ScopeKind,
)
from corral.store.tables import (
    backend_intents,
    backend_rules,
    backend_targets,
    due_switches,
    load_jobs,
    model_files,
    model_schedules,
    models,
    node_backends,
    node_files,
    node_labels,
    nodes,
    operation_nodes,
    process_peaks,
    replicas,
    rollouts,
)
from corral.store.tables.model_files import StoredFile
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import Node

_NOT_SERVED = "it runs a LocalAI worker, which this controller does not serve (--compat-localai enables it)"
_NO_SUCH_TOKEN = "it runs a LocalAI worker that did not join with the registration token"

FindBuild = Callable[[str, MachineKind], Build]


def _assume_installed(_backend: str, _machine: MachineKind) -> Build:
    """For an installed backend that no gallery knows."""
    return Build(BuildState.INSTALLED)


FindActivity = Callable[[str, str], ProcessActivity]
FindMemory = Callable[[Definition, Sequence[StoredFile], Sequence[MeasuredUsage]], Memory]


@dataclass
class FleetSnapshot:
    """The fleet as stored at one moment."""

    now: datetime
    rows: list[DesiredReplica] = field(default_factory=list)
    jobs: dict[str, LoadJob] = field(default_factory=dict)
    hosts: dict[str, ReplicaHost] = field(default_factory=dict)
    nodes: dict[str, scheduler.Node] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    definitions: dict[str, Definition] = field(default_factory=dict)
    previous_revisions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    backends: dict[tuple[str, str], Prerequisites] = field(default_factory=dict)
    wanted: dict[tuple[str, str], Wanted | Unwanted | None] = field(default_factory=dict)  # by node and backend
    installing: dict[tuple[str, str, int], TransferProgress] = field(default_factory=dict)  # by replica: its backend
    process_ids: set[str] = field(default_factory=set)
    rollouts: list[Rollout] = field(default_factory=list)  # trials of new revisions of models
    trials: dict[str, Trial] = field(default_factory=dict)  # by model: those whose replicas run beside the old ones
    trial_definitions: dict[str, Definition] = field(default_factory=dict)
    due_switches: list[DueSwitch] = field(default_factory=list)  # of backends

    def trial_revision(self, model: str) -> str | None:
        return self.trials[model].model.revision if model in self.trials else None

    def definition_of(self, row: DesiredReplica) -> Definition | None:
        """The definition that the row's process serves, or the present one."""
        if row.revision == self.trial_revision(row.model):
            return self.trial_definitions[row.model]
        return self.definitions.get(row.model)


@dataclass(frozen=True)
class SnapshotReader:
    """Reads snapshots, with this controller's build lookups, activity reports and memory estimates."""

    store: Store
    builds: Builds
    activity: ActivityTracker
    memory: FindMemory
    idle_unload_s: float = 0.0
    localai: bool = False  # this controller serves LocalAI workers

    async def read(self, *, all_models: bool = False, backends: Collection[str] = ()) -> FleetSnapshot:
        """`backends`: look up their builds, too, though no model uses them."""
        async with self.store.read() as tx:
            return await read_snapshot(
                tx,
                idle_unload_s=self.idle_unload_s,
                build=self.builds.for_corral,
                installed=self.builds.installed,
                activity=self.activity.find,
                memory=self.memory,
                all_models=all_models,
                more_backends=backends,
                localai=self.builds.for_localai if self.localai else None,
            )


async def read_desired(tx: Transaction) -> tuple[list[DesiredReplica], dict[str, LoadJob]]:
    """The rows that only the reconciler and `LoadService` write. A write transaction locks them until its end."""
    return await replicas.list_(tx), {job.model: job for job in await load_jobs.list_(tx)}


async def has_work(tx: Transaction) -> bool:
    """Cheap: without rows, jobs, schedules and trials no replica is wanted."""
    rows, jobs = await read_desired(tx)
    return bool(rows or jobs or await model_schedules.list_(tx) or await rollouts.list_trials(tx))


async def read_snapshot(
    tx: Transaction,
    *,
    idle_unload_s: float,
    build: FindBuild,
    activity: FindActivity,
    memory: FindMemory,
    all_models: bool = False,
    more_backends: Collection[str] = (),
    localai: FindBuild | None = None,
    installed: FindBuild = _assume_installed,
) -> FleetSnapshot:
    """`all_models`: look up builds also for models that no replica is wanted of; `more_backends`: and of these
    backends. `localai`: finds builds for LocalAI workers, if this controller serves them. `installed`: finds the
    devices of an installed backend."""
    snapshot = FleetSnapshot(await tx.now())
    snapshot.rows, snapshot.jobs = await read_desired(tx)
    inventories = {row.node_id: row for row in await node_backends.list_(tx)}
    labels = await node_labels.list_for(tx)
    files = await node_files.by_node(tx)
    found = [node for node in await nodes.list_(tx) if node.approved and node.node_type in ("", "backend")]
    await _read_models(tx, snapshot, idle_unload_s, memory)
    snapshot.due_switches = await due_switches.list_(tx)
    canaries = {
        each.canary for rollout in await rollouts.list_active(tx) for each in rollout.classes if not each.passed
    }
    backends = _needed_backends(snapshot)
    if all_models:
        backends |= {model.backend for model in snapshot.models.values()}
    backends |= set(more_backends)
    rules = await backend_rules.list_live(tx)
    effective = without_overruled(rule for rule in rules if rule.backend in backends)
    missing_builds = await _read_missing_builds(tx, effective)
    for node in found:
        inventory = inventories.get(node.id)
        switching = {
            model: row.refusals.get(model, "")
            for row in snapshot.due_switches
            if row.node_id == node.id
            for model in row.models
        }
        host = _host(node, inventory, activity, accepts=_accepts(node, localai))
        snapshot.hosts[node.id] = replace(host, switching=frozenset(switching))
        snapshot.process_ids.update(process.process_id for process in snapshot.hosts[node.id].processes)
        find = (localai, _assume_installed) if localai is not None and node.protocol == 0 else (build, installed)
        scheduler_node = _node(
            snapshot, node, inventory, labels.get(node.id, {}), effective, backends, find, missing_builds
        )
        vetoes = () if snapshot.hosts[node.id].accepts else (_NOT_SERVED if localai is None else _NO_SUCH_TOKEN,)
        snapshot.nodes[node.id] = replace(
            scheduler_node,
            files=files.get(node.id, frozenset()),
            vetoes=vetoes,
            switching=switching,
            is_canary=node.id in canaries,
        )
    await _read_backends(tx, snapshot)
    return snapshot


def storable_replica(row: DesiredReplica) -> DesiredReplica:
    """With texts of workers cut to what the store takes."""
    return struct_replace(row, reason=storable(row.reason), error=storable(row.error))


def storable_job(job: LoadJob) -> LoadJob:
    # Shortened before it is cut: the last line of a process names the cause more often than its first.
    failed_on = {node_id: storable(first_and_last_line(why), 1000) for node_id, why in job.failed_on.items()}
    return struct_replace(job, message=storable(job.message), error=storable(job.error, 8000), failed_on=failed_on)


async def _read_models(tx: Transaction, snapshot: FleetSnapshot, idle_unload_s: float, memory: FindMemory) -> None:
    schedules = {row.model: row for row in await model_schedules.list_(tx)}
    files: dict[str, list[StoredFile]] = {}
    for file in await model_files.list_(tx):
        files.setdefault(file.model, []).append(file)
    seen: dict[tuple[str, str], list[MeasuredUsage]] = {}
    for peak in await process_peaks.list_(tx):
        one = MeasuredUsage(peak.ram_bytes, peak.device_bytes, peak.devices)
        seen.setdefault((peak.model, peak.revision), []).append(one)
    snapshot.rollouts = await rollouts.list_trials(tx)
    trials = {rollout.subject: rollout for rollout in snapshot.rollouts}
    for row in await models.list_(tx):
        definition = definition_of(row)
        if definition is None or definition.alias:
            continue
        stored = current_files(definition, files.get(row.id, []))
        schedule = schedules.get(row.id)
        job = snapshot.jobs.get(row.id)
        snapshot.definitions[row.id] = definition
        snapshot.previous_revisions[row.id] = row.previous_revisions
        known = memory(definition, stored, seen.get((row.id, row.revision), ()))
        snapshot.models[row.id] = replace(
            model_of(definition, row.revision, known, stored),
            schedule=_schedule(schedule) if schedule is not None else Schedule(),
            idle_unload_s=definition.idle_unload_s or idle_unload_s,
            waiting=1 if job is not None and job.active else 0,
            only_load_waits=job is not None and job.active,
        )
        if row.id in trials and (trial := trials[row.id].trial) is not None:
            if trial.in_place or row.revision != trial.old_revision:
                continue
            new = read_definition(trial.definition)
            stored = current_files(new, files.get(row.id, []))
            known = memory(new, stored, seen.get((row.id, trial.revision), ()))
            on_trial = replace(
                model_of(new, trial.revision, known, stored),
                schedule=snapshot.models[row.id].schedule,
                failed_on=trial.failed_on,
            )
            snapshot.models[row.id] = replace(snapshot.models[row.id], trial_revision=trial.revision)
            snapshot.trials[row.id] = Trial(on_trial, share_of(trials[row.id]))
            snapshot.trial_definitions[row.id] = new


def model_of(definition: Definition, revision: str, memory: Memory, stored: Sequence[StoredFile]) -> Model:
    """The model as the definition alone describes it."""
    return Model(
        definition.name,
        definition.backend,
        revision,
        memory,
        files=files_known(definition, stored),
        tensor_parallel=definition.tensor_parallel,
        device_share=device_share(definition),
        in_ram=is_ram_only(definition),
        concurrency_groups=definition.concurrency_groups,
        pinned=definition.pinned,
        disabled=definition.disabled,
    )


def files_known(definition: Definition, stored: Sequence[StoredFile]) -> tuple[ModelFile, ...] | None:
    """Digests and sizes of the model's files; None until they are fetched."""
    archives = {file.path for file in definition.files if is_archive(definition, file)}
    unpacked = {parse_member(file.uri).path for file in stored if is_member(file.uri)}
    named = len(definition.files) - len(archives)
    own = sum(not is_member(file.uri) and file.path not in archives for file in stored)
    # For a repository or a file in the models folder, the definition does not say how many files there are.
    unnamed = bool(definition.snapshots or (own and not named))
    known = archives <= unpacked and (own > named if unnamed else own == named)
    return tuple(ModelFile(file.digest, file.size_bytes) for file in stored) if known else None


def _schedule(row: model_schedules.Schedule) -> Schedule:
    return Schedule(
        selector_of_map(row.node_selector),
        row.min_replicas,
        row.max_replicas,
        row.spread_all,
        row.unsatisfiable_until,
        row.unsatisfiable_ticks,
    )


def _needed_backends(snapshot: FleetSnapshot) -> set[str]:
    """Of models that may need a node."""
    names = {row.model for row in snapshot.rows} | set(snapshot.jobs)
    names |= {name for name, model in snapshot.models.items() if model.schedule.scales}
    on_trial = {trial.model.backend for trial in snapshot.trials.values()}
    return ({snapshot.models[name].backend for name in names if name in snapshot.models} | on_trial) - {""}


async def _read_missing_builds(tx: Transaction, rules: Sequence[BackendRule]) -> dict[TargetKey, str]:
    """The targets of these rules without a build for some kind of machine, and why."""
    targets = sorted({rule.target for rule in rules if rule.target})
    if not targets:
        return {}
    return {
        TargetKey(row.id, MachineKind(row.capability, row.platform, row.python)): row.reason
        for row in await backend_targets.list_for(tx, targets)
        if row.build is None
    }


def _accepts(node: Node, localai: FindBuild | None) -> bool:
    return node.protocol >= 1 or (localai is not None and node.shares_token)


def _host(node: Node, inventory: Inventory | None, activity: FindActivity, *, accepts: bool) -> ReplicaHost:
    processes: tuple[ReplicaProcess, ...] = inventory.processes if inventory is not None else ()
    return ReplicaHost(
        node.id,
        node.name,
        node.status,
        node.bus_down,
        accepts=accepts,
        boot_id=node.boot_id,
        # A reply that lists backends says nothing about processes: only a heartbeat does, and sets `reported_at`.
        known=inventory is not None and inventory.reported_at is not None and inventory.boot_id in ("", node.boot_id),
        processes=processes,
        activity={process.process_id: activity(node.id, process.process_id) for process in processes},
    )


def _node(
    snapshot: FleetSnapshot,
    node: Node,
    inventory: Inventory | None,
    labels: Mapping[str, str],
    rules: Sequence[BackendRule],
    backends: set[str],
    find: tuple[FindBuild, FindBuild],
    missing_builds: Mapping[TargetKey, str],
) -> scheduler.Node:
    """`find`: finds a build to install, and the devices of an installed one."""
    build, installed_build = find
    installed = inventory.backends if inventory is not None else ()
    needs_labels = any(rule.scope.kind is ScopeKind.SELECTOR for rule in rules)
    folded = fold(rules, node_id=node.id, labels=labels if needs_labels else {}, installed=names_in(installed))
    machine = MachineKind(node.capability, f"{node.os}/{node.arch}" if node.os else "", node.python)
    builds: dict[str, Build] = {}
    for backend in sorted(backends):  # lookups start in this order, not in that of a set
        want = folded.get(backend)
        snapshot.wanted[(node.id, backend)] = want
        there = find_installed(installed, backend) is not None
        # A LocalAI worker installs and starts with one order: nothing has to be installed before.
        brings_itself = node.protocol == 0 and not isinstance(want, Unwanted)
        snapshot.backends[(node.id, backend)] = Prerequisites(backend=there or brings_itself)
        if isinstance(want, Unwanted):
            # Also while the node still lists it: no replica is started from files that are about to be deleted.
            snapshot.backends[(node.id, backend)] = Prerequisites(backend=there, error=f"{backend} was deleted there")
            builds[backend] = Build(BuildState.FORBIDDEN, "a user deleted it there")
            continue
        builds[backend] = installed_build(backend, machine) if there else build(backend, machine)
        if isinstance(want, Wanted) and not (there or brings_itself):
            # The galleries may have a build for the machine, but not of the version that the rule requires.
            reason = missing_builds.get(TargetKey(want.target, machine))
            if reason is not None:
                builds[backend] = Build(BuildState.MISSING, reason)
                snapshot.backends[(node.id, backend)] = Prerequisites(
                    error=f"{backend} cannot be installed there: {reason}"
                )
    return scheduler.Node(
        id=node.id,
        name=node.name,
        status=node.status,
        labels=labels,
        capability=node.capability,
        devices=node.devices,
        gpu_vendor=node.gpu_vendor,
        total_vram=node.total_vram,
        available_vram=node.available_vram,
        total_ram=node.total_ram,
        available_ram=node.available_ram,
        total_disk=node.total_disk,
        available_disk=node.available_disk,
        max_replicas_per_model=node.max_replicas_per_model,
        budget=budget_of(node.vram_budget),
        bus_down=node.bus_down,
        builds=builds,
        hardware=hardware_of(node),
    )


async def _read_backends(tx: Transaction, snapshot: FleetSnapshot) -> None:
    """Read the state of the installs that placed replicas wait for."""
    waiting = [row for row in snapshot.rows if row.stage is ReplicaStage.PLACED]
    lacking = [row for row in waiting if not snapshot.backends.get((row.node_id, row.backend), Prerequisites()).backend]
    if not lacking:
        return
    intents: dict[tuple[str, str], BackendIntent] = {
        (intent.node_id, intent.backend): intent
        for intent in await backend_intents.list_(tx, sorted({row.node_id for row in lacking}))
    }
    operations = sorted({intent.operation_id for intent in intents.values()})
    progress = await operation_nodes.list_for(tx, operations)
    for row in lacking:
        intent = intents.get((row.node_id, row.backend))
        is_unwanted = isinstance(snapshot.wanted.get((row.node_id, row.backend)), Unwanted)
        if intent is not None and not is_unwanted and intent.failures and intent.stage in ("waiting", "parked"):
            error = f"{row.backend}{NOT_INSTALLED}{intent.reason}"
            snapshot.backends[(row.node_id, row.backend)] = Prerequisites(error=error)
        if intent is not None:
            shown = [each for each in progress.get(intent.operation_id, ()) if each.node_id == row.node_id]
            for each in shown:
                text = f"{each.phase or each.status} {each.file_name}".strip()
                snapshot.installing[row.key] = TransferProgress(each.current_bytes, each.total_bytes, text=text)
