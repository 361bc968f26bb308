"""Reads from the store what `plan` looks at: one moment of the whole database. Before anything is written the rows are
read again and must still be the same; so nobody waits for us while we think."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

from msgspec.structs import replace as struct_replace

from corral.contract.labels import selector_of_map
from corral.contract.messages.replicas import ReplicaProcess
from corral.contract.models import Definition
from corral.controller.backends.catalogue import MachineKind
from corral.controller.backends.rules import Unwanted, Wanted, fold, without_overruled
from corral.controller.backends.world import TargetKey
from corral.controller.files.member_uris import is_member, parse_member
from corral.controller.files.wanted import is_archive, still_meant
from corral.controller.inventory.installed import find_installed, names_in
from corral.controller.inventory.records import ProcessActivity
from corral.controller.models.views import definition_of
from corral.controller.replicas.lifecycle import Place, Ready
from corral.controller.replicas.load_jobs import Moved
from corral.controller.scheduler import world as seen
from corral.controller.scheduler.memory import MeasuredUsage, device_share, is_ram_only
from corral.controller.scheduler.world import Build, BuildState, Memory, Model, ModelFile, Schedule, budget_of
from corral.kit.humanize import first_and_last_line
from corral.store.engine.transactions import Transaction
from corral.store.engine.types import storable
from corral.store.records import BackendIntent, BackendRule, DesiredReplica, LoadJob, ReplicaStage, ScopeKind
from corral.store.tables import (
    backend_intents,
    backend_rules,
    backend_targets,
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
)
from corral.store.tables.model_files import StoredFile
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import Node

T = TypeVar("T")

_NOT_SERVED = "its worker is LocalAI's, and this controller does not serve those (--compat-localai)"
_NO_SUCH_TOKEN = "its worker is LocalAI's, and did not join with the registration token those have to show"

FindBuild = Callable[[str, MachineKind], Build]


def _as_it_runs(_backend: str, _machine: MachineKind) -> Build:
    """Of an installed backend of which nobody knows more."""
    return Build(BuildState.INSTALLED)


FindQuiet = Callable[[str, str], ProcessActivity]
FindMemory = Callable[[Definition, Sequence[StoredFile], Sequence[MeasuredUsage]], Memory]


@dataclass
class Read:
    """What the store said."""

    now: datetime
    rows: list[DesiredReplica] = field(default_factory=list)
    jobs: dict[str, LoadJob] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    nodes: dict[str, seen.Node] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    definitions: dict[str, Definition] = field(default_factory=dict)
    previous_revisions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    backends: dict[tuple[str, str], Ready] = field(default_factory=dict)
    wanted: dict[tuple[str, str], Wanted | Unwanted | None] = field(default_factory=dict)  # by node and backend
    installing: dict[tuple[str, str, int], Moved] = field(default_factory=dict)  # by replica: how far its backend is
    process_ids: set[str] = field(default_factory=set)


async def read_own(tx: Transaction) -> tuple[list[DesiredReplica], dict[str, LoadJob]]:
    """What only we write. In a write transaction it is ours until its end."""
    return await replicas.list_(tx), {job.model: job for job in await load_jobs.list_(tx)}


async def anything_to_do(tx: Transaction) -> bool:
    """Cheap: without any of these nothing is wanted."""
    rows, jobs = await read_own(tx)
    return bool(rows or jobs or await model_schedules.list_(tx))


async def read_all(
    tx: Transaction,
    *,
    idle_unload_s: float,
    build: FindBuild,
    quiet: FindQuiet,
    memory: FindMemory,
    curious: bool = False,
    localai: FindBuild | None = None,
    installed: FindBuild = _as_it_runs,
) -> Read:
    """`curious`: also about models for which nothing has to be found at present. `localai`: builds for LocalAI workers,
    where those are served from here (`controller/peers`). `installed`: how a backend runs that a node has."""
    read = Read(await tx.now())
    read.rows, read.jobs = await read_own(tx)
    inventories = {row.node_id: row for row in await node_backends.list_(tx)}
    labels = await node_labels.list_for(tx)
    files = await node_files.by_node(tx)
    found = [node for node in await nodes.list_(tx) if node.approved and node.node_type in ("", "backend")]
    await _read_models(tx, read, idle_unload_s, memory)
    backends = {model.backend for model in read.models.values()} if curious else _backends_at_stake(read)
    rules = await backend_rules.list_live(tx)
    pure = without_overruled(rule for rule in rules if rule.backend in backends)
    nowhere = await _read_missing(tx, pure)
    for node in found:
        inventory = inventories.get(node.id)
        read.places[node.id] = _place(node, inventory, quiet, accepts=_accepts(node, localai))
        read.process_ids.update(process.process_id for process in read.places[node.id].processes)
        find = (localai, _as_it_runs) if localai is not None and node.protocol == 0 else (build, installed)
        seen_there = _node(read, node, inventory, labels.get(node.id, {}), pure, backends, find, nowhere)
        vetoes = () if read.places[node.id].accepts else (_NOT_SERVED if localai is None else _NO_SUCH_TOKEN,)
        read.nodes[node.id] = replace(seen_there, files=files.get(node.id, frozenset()), vetoes=vetoes)
    await _read_backends(tx, read)
    return read


def storable_replica(row: DesiredReplica) -> DesiredReplica:
    """With texts of workers cut to what the store takes."""
    return struct_replace(row, reason=storable(row.reason), error=storable(row.error))


def storable_job(job: LoadJob) -> LoadJob:
    # In short before it is cut: what a process said in the end is the cause more often than what it said first.
    failed_on = {node_id: storable(first_and_last_line(why), 1000) for node_id, why in job.failed_on.items()}
    return struct_replace(job, message=storable(job.message), error=storable(job.error, 8000), failed_on=failed_on)


async def _read_models(tx: Transaction, read: Read, idle_unload_s: float, memory: FindMemory) -> None:
    schedules = {row.model: row for row in await model_schedules.list_(tx)}
    files: dict[str, list[StoredFile]] = {}
    for file in await model_files.list_(tx):
        files.setdefault(file.model, []).append(file)
    seen: dict[tuple[str, str], list[MeasuredUsage]] = {}
    for peak in await process_peaks.list_(tx):
        one = MeasuredUsage(peak.ram_bytes, peak.device_bytes, peak.devices)
        seen.setdefault((peak.model, peak.revision), []).append(one)
    for row in await models.list_(tx):
        definition = definition_of(row)
        if definition is None or definition.alias:
            continue
        stored = still_meant(definition, files.get(row.id, []))
        schedule = schedules.get(row.id)
        job = read.jobs.get(row.id)
        read.definitions[row.id] = definition
        read.previous_revisions[row.id] = row.previous_revisions
        read.models[row.id] = Model(
            row.id,
            definition.backend,
            row.revision,
            memory(definition, stored, seen.get((row.id, row.revision), ())),
            files=files_known(definition, stored),
            tensor_parallel=definition.tensor_parallel,
            device_share=device_share(definition),
            in_ram=is_ram_only(definition),
            concurrency_groups=definition.concurrency_groups,
            pinned=definition.pinned,
            disabled=definition.disabled,
            schedule=_schedule(schedule) if schedule is not None else Schedule(),
            idle_unload_s=definition.idle_unload_s or idle_unload_s,
            waiting=1 if job is not None and job.active else 0,
            only_load_waits=job is not None and job.active,
        )


def files_known(definition: Definition, stored: Sequence[StoredFile]) -> tuple[ModelFile, ...] | None:
    """What they turned out to be; None as long as nobody has fetched them."""
    archives = {file.path for file in definition.files if is_archive(definition, file)}
    unpacked = {parse_member(file.uri).path for file in stored if is_member(file.uri)}
    named = len(definition.files) - len(archives)
    own = sum(not is_member(file.uri) and file.path not in archives for file in stored)
    # Of a repository, or where one lies in the models folder, the definition does not say how many there are.
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


def _backends_at_stake(read: Read) -> set[str]:
    """Of models for which a place may have to be found."""
    names = {row.model for row in read.rows} | set(read.jobs)
    names |= {name for name, model in read.models.items() if model.schedule.scales}
    return {read.models[name].backend for name in names if name in read.models} - {""}


async def _read_missing(tx: Transaction, rules: Sequence[BackendRule]) -> dict[TargetKey, str]:
    """What these rules mean on kinds of machine for which there is no such build, and why."""
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


def _place(node: Node, inventory: Inventory | None, quiet: FindQuiet, *, accepts: bool) -> Place:
    processes: tuple[ReplicaProcess, ...] = inventory.processes if inventory is not None else ()
    return Place(
        node.id,
        node.name,
        node.status,
        node.bus_down,
        accepts=accepts,
        boot_id=node.boot_id,
        # An answer to what is installed says nothing of what runs: only a heartbeat does, and shows by its time.
        known=inventory is not None and inventory.reported_at is not None and inventory.boot_id in ("", node.boot_id),
        processes=processes,
        quiet={process.process_id: quiet(node.id, process.process_id) for process in processes},
    )


def _node(
    read: Read,
    node: Node,
    inventory: Inventory | None,
    labels: Mapping[str, str],
    rules: Sequence[BackendRule],
    backends: set[str],
    find: tuple[FindBuild, FindBuild],
    nowhere: Mapping[TargetKey, str],
) -> seen.Node:
    """`find`: a build that could be installed, and how one runs that is."""
    build, installed_build = find
    installed = inventory.backends if inventory is not None else ()
    needs_labels = any(rule.scope.kind is ScopeKind.SELECTOR for rule in rules)
    folded = fold(rules, node_id=node.id, labels=labels if needs_labels else {}, installed=names_in(installed))
    machine = MachineKind(node.capability, f"{node.os}/{node.arch}" if node.os else "", node.python)
    builds: dict[str, Build] = {}
    for backend in sorted(backends):  # builds are looked up in this order, whatever the order of a set
        want = folded.get(backend)
        read.wanted[(node.id, backend)] = want
        there = find_installed(installed, backend) is not None
        # A LocalAI worker is told to install and to start in one: there is nothing to bring there before.
        brings_itself = node.protocol == 0 and not isinstance(want, Unwanted)
        read.backends[(node.id, backend)] = Ready(backend=there or brings_itself)
        if isinstance(want, Unwanted):
            # Also while the node still lists it: nothing is started from files that are about to go.
            read.backends[(node.id, backend)] = Ready(backend=there, trouble=f"{backend} was deleted there")
            builds[backend] = Build(BuildState.FORBIDDEN, "somebody deleted it there")
            continue
        builds[backend] = installed_build(backend, machine) if there else build(backend, machine)
        if isinstance(want, Wanted) and not (there or brings_itself):
            # The galleries may have a build for it, but not of what people want to have there.
            reason = nowhere.get(TargetKey(want.target, machine))
            if reason is not None:
                builds[backend] = Build(BuildState.MISSING, reason)
                read.backends[(node.id, backend)] = Ready(trouble=f"{backend} cannot be installed there: {reason}")
    return seen.Node(
        node.id,
        node.name,
        node.status,
        labels,
        node.capability,
        node.devices,
        node.gpu_vendor,
        node.total_vram,
        node.available_vram,
        node.total_ram,
        node.available_ram,
        node.total_disk,
        node.available_disk,
        node.max_replicas_per_model,
        budget_of(node.vram_budget),
        node.bus_down,
        builds=builds,
    )


async def _read_backends(tx: Transaction, read: Read) -> None:
    """How the installs stand that placed replicas wait for."""
    waiting = [row for row in read.rows if row.stage is ReplicaStage.PLACED]
    lacking = [row for row in waiting if not read.backends.get((row.node_id, row.backend), Ready()).backend]
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
        is_unwanted = isinstance(read.wanted.get((row.node_id, row.backend)), Unwanted)
        if intent is not None and not is_unwanted and intent.failures and intent.stage in ("waiting", "parked"):
            trouble = f"{row.backend} could not be installed: {intent.reason}"
            read.backends[(row.node_id, row.backend)] = Ready(trouble=trouble)
        if intent is not None:
            shown = [each for each in progress.get(intent.operation_id, ()) if each.node_id == row.node_id]
            for each in shown:
                text = f"{each.phase or each.status} {each.file_name}".strip()
                read.installing[row.key] = Moved(each.current_bytes, each.total_bytes, text=text)
