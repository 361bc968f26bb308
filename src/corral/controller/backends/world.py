"""Reads the world that `decide` works on: nodes with their inventories and intents, and the desired backends of each.

The reconciler reads it in the transaction that also writes the decision: no other writer changes the intents between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from corral.contract.messages.backends import BackendResult
from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.backends.catalogue import MachineKind
from corral.controller.backends.moves import models_of
from corral.controller.backends.plan import BuildOrNot, NoBuild, NodeWorld, NotLookedUp
from corral.controller.backends.replacement import memory_beside, processes_of
from corral.controller.backends.rollout import Peer
from corral.controller.backends.rules import Unwanted, Wanted, fold, without_overruled
from corral.controller.inventory.installed import concrete_name, names_in
from corral.controller.inventory.nodes import is_current, takes_backends
from corral.controller.inventory.routing import read_routing
from corral.controller.orders.order import Build
from corral.controller.rollouts.hardware_class import hardware_of
from corral.store.engine.transactions import Transaction
from corral.store.records import (
    BackendIntent,
    BackendRequest,
    BackendTarget,
    DueSwitch,
    IntentStage,
    OperationNodeStatus,
    OrderKind,
    Rollout,
    RolloutNodeBefore,
    RolloutPhase,
    ScopeKind,
)
from corral.store.tables import (
    backend_intents,
    backend_rules,
    backend_targets,
    due_switches,
    models,
    node_backends,
    node_labels,
    nodes,
    operation_nodes,
    operations,
    rollouts,
)
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import NodeOutline

_NOT_CONCERNED = frozenset(
    {
        OperationNodeStatus.SKIPPED,
        OperationNodeStatus.WITHDRAWN,
        OperationNodeStatus.SUPERSEDED,
        OperationNodeStatus.CANCELLED,
    }
)

PAUSED = "paused: what was fetched is kept"  # the reason in a stored row: earlier releases compare it, too


@dataclass(frozen=True)
class TargetKey:
    """One target on one kind of machine."""

    target: str
    kind: MachineKind


@dataclass
class World:
    now: datetime
    nodes: dict[str, NodeWorld] = field(default_factory=dict)
    outlines: dict[str, NodeOutline] = field(default_factory=dict)
    wanted: dict[str, dict[str, Wanted | Unwanted]] = field(default_factory=dict)  # by node, then backend
    builds: dict[str, dict[str, BuildOrNot]] = field(default_factory=dict)
    processes: dict[str, tuple[ReplicaProcess, ...]] = field(default_factory=dict)  # by node
    results: dict[str, dict[tuple[str, int], BackendResult]] = field(default_factory=dict)  # from heartbeats, by node
    targets: dict[TargetKey, BackendTarget] = field(default_factory=dict)
    requests: dict[int, BackendRequest] = field(default_factory=dict)  # by generation
    missing: dict[TargetKey, BackendRequest] = field(default_factory=dict)  # builds that have to be looked up
    peers: dict[int, list[Peer]] = field(default_factory=dict)  # of rules that switch node by node
    rollouts: dict[int, Rollout] = field(default_factory=dict)  # of these rules, where one is stored
    ended: list[Rollout] = field(default_factory=list)  # whose rule decides about no node any more
    incomplete: set[int] = field(default_factory=set)  # rules of which this pass does not see every node
    due: dict[tuple[str, str], DueSwitch] = field(default_factory=dict)  # by node and backend, as stored
    serving: dict[str, frozenset[str]] = field(default_factory=dict)  # by model, nodes; read where memory is short

    def target_of(self, node_id: str, backend: str) -> BackendTarget | None:
        want, outline = self.wanted[node_id].get(backend), self.outlines[node_id]
        if not isinstance(want, Wanted):
            return None
        return self.targets.get(TargetKey(want.target, kind_of(outline)))

    def ends_first(self, node_id: str, backend: str) -> bool:
        """Whether the running processes have to end before their successors can start."""
        outline = self.outlines[node_id]
        running = self.running(node_id, backend)
        return not memory_beside(running, free_vram=outline.available_vram, free_ram=outline.available_ram).fits

    def running(self, node_id: str, backend: str) -> list[ReplicaProcess]:
        return processes_of(self.processes[node_id], self.nodes[node_id].backends, backend)

    def models_to_end(self, node_id: str, backend: str) -> tuple[str, ...]:
        """The models whose processes on the node have to end before their successors can start."""
        if not self.ends_first(node_id, backend):
            return ()
        return tuple(model for model in models_of(self.running(node_id, backend)) if model in self.serving)

    def unserved_without(
        self, node_id: str, models: Iterable[str], switching: Collection[str]
    ) -> tuple[tuple[str, ...], frozenset[str]]:
        """Those of the node's models that no other node serves; and of these the ones that a node in `switching`
        has."""
        serving = {model: self.serving[model] - {node_id} for model in models}
        lacking = tuple(model for model, nodes in serving.items() if not nodes - set(switching))
        return lacking, frozenset(model for model in lacking if serving[model])


LookupState = Callable[[TargetKey], NotLookedUp]


async def read_world(
    tx: Transaction, node_ids: Sequence[str] | None, lookup_state: LookupState, just_read: Collection[str] = ()
) -> World:
    """Of these nodes, or all. `lookup_state` returns the state of a lookup whose build is not stored; `just_read` are
    the nodes whose inventory was read after the observations of this pass."""
    world = World(await tx.now())
    rules = await backend_rules.list_live(tx)
    world.requests = {rule.generation: rule.request for rule in rules}
    pure = without_overruled(rules)
    labelled = any(rule.scope_kind is ScopeKind.SELECTOR for rule in pure)
    for outline in await nodes.list_outlines(tx, node_ids):
        if takes_backends(outline):
            world.outlines[outline.id] = outline
    ids = list(world.outlines)
    labels = await node_labels.list_for(tx, ids) if labelled else {}
    inventories = {row.node_id: row for row in await node_backends.list_(tx, ids)}
    intents: dict[str, dict[str, BackendIntent]] = {}
    for row in await backend_intents.list_(tx, ids):
        intents.setdefault(row.node_id, {})[row.backend] = row
    stopping, keeping = await _stopping(tx, intents)
    for outline in world.outlines.values():
        inventory, own = inventories.get(outline.id), intents.get(outline.id, {})
        stops = stopping.get(outline.id, frozenset()), keeping.get(outline.id, frozenset())
        node = _node_world(outline, inventory, own, stops, just_read=outline.id in just_read)
        world.nodes[outline.id] = node
        world.results[outline.id] = _results(inventory)
        world.processes[outline.id] = inventory.processes if inventory is not None and node.known else ()
        world.wanted[outline.id] = fold(
            pure, node_id=outline.id, labels=labels.get(outline.id, {}), installed=_installed(node)
        )
    await _read_builds(tx, world, lookup_state)
    await _read_rollouts(tx, world, {rule.generation for rule in rules}, whole=node_ids is None)
    await _read_due_switches(tx, world, whole=node_ids is None)
    return world


def _node_world(
    outline: NodeOutline,
    inventory: Inventory | None,
    intents: dict[str, BackendIntent],
    stops: tuple[frozenset[str], frozenset[str]],
    *,
    just_read: bool,
) -> NodeWorld:
    known = is_current(inventory, outline)
    return NodeWorld(
        id=outline.id,
        name=outline.name,
        status=outline.status,
        accepts=outline.protocol >= 1,
        bus_down=outline.bus_down,
        boot_id=outline.boot_id,
        reported_at=_reported_at(outline, inventory) if known else None,
        known=known,
        just_read=just_read,
        backends=inventory.backends if inventory is not None else (),
        orders=frozenset((order.op_id, order.attempt) for order in inventory.orders)
        if inventory is not None and known
        else frozenset(),
        cured=_cured(inventory) if known else frozenset(),
        intents=intents,
        stopping=stops[0],
        keeping=stops[1],
    )


def _reported_at(outline: NodeOutline, inventory: Inventory | None) -> datetime | None:
    """A LocalAI worker does not list its orders; its inventory shows their results."""
    if inventory is None:
        return None
    return inventory.reported_at if outline.protocol >= 1 else inventory.seen_at


def _installed(node: NodeWorld) -> frozenset[str]:
    """Includes backends that are being upgraded: a worker may not list a backend while it replaces it."""
    upgrading = (
        backend
        for backend, intent in node.intents.items()
        if intent.kind in (OrderKind.FETCH, OrderKind.UPGRADE)
        and intent.stage not in (IntentStage.DONE, IntentStage.IDLE)
    )
    return names_in(node.backends) | frozenset(upgrading)


def _cured(inventory: Inventory | None) -> frozenset[tuple[str, int]]:
    orders = inventory.orders if inventory is not None else ()
    return frozenset((order.op_id, order.attempt) for order in orders if order.cured)


def _results(inventory: Inventory | None) -> dict[tuple[str, int], BackendResult]:
    orders = inventory.orders if inventory is not None else ()
    return {(order.op_id, order.attempt): order.result for order in orders if order.result is not None}


async def _stopping(
    tx: Transaction, intents: dict[str, dict[str, BackendIntent]]
) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]]:
    """By node, the operations that were cancelled, entirely or on the node; and which of these were only paused."""
    sent = {
        node_id: {intent.operation_id for intent in own.values() if intent.stage is IntentStage.SENT}
        for node_id, own in intents.items()
    }
    named = sorted(set[str]().union(*sent.values()))
    if not named:
        return {}, {}
    whole = set(await operations.list_cancelled(tx, named))
    there = await operation_nodes.list_cancelled(tx, named)
    return {
        node_id: frozenset(name for name in own if name in whole or (name, node_id) in there)
        for node_id, own in sent.items()
    }, {
        node_id: frozenset(name for name in own if there.get((name, node_id)) == PAUSED)
        for node_id, own in sent.items()
    }


async def _read_builds(tx: Transaction, world: World, lookup_state: LookupState) -> None:
    wanted = {want.target for own in world.wanted.values() for want in own.values() if isinstance(want, Wanted)}
    for row in await backend_targets.list_for(tx, sorted(wanted)):
        world.targets[TargetKey(row.id, MachineKind(row.capability, row.platform, row.python))] = row
    for node_id, own in world.wanted.items():
        world.builds[node_id] = {
            backend: _build(world, node_id, want, lookup_state)
            for backend, want in own.items()
            if isinstance(want, Wanted)
        }


def _build(world: World, node_id: str, want: Wanted, lookup_state: LookupState) -> BuildOrNot:
    key = TargetKey(want.target, kind_of(world.outlines[node_id]))
    found = world.targets.get(key)
    if found is None:
        world.missing[key] = world.requests[want.generation]
        return lookup_state(key)
    if found.build is None:
        return NoBuild(found.reason)
    return Build(found.build.variant, found.build.digest, found.build.version)


async def _read_rollouts(tx: Transaction, world: World, live: Collection[int], *, whole: bool) -> None:
    by_generation = {
        want.generation: (backend, want)
        for own in world.wanted.values()
        for backend, want in own.items()
        if isinstance(want, Wanted) and want.max_parallel
    }
    for generation, (backend, want) in by_generation.items():
        rows = await operation_nodes.list_(tx, want.operation)
        concerned = {row.node_id for row in rows if row.status not in _NOT_CONCERNED}
        covered = {node_id for node_id, own in world.wanted.items() if _generation(own.get(backend)) == generation}
        late = covered - {row.node_id for row in rows}  # nodes that joined later
        world.peers[generation] = [_peer(world, node_id, backend) for node_id in sorted(covered & (concerned | late))]
        elsewhere = await nodes.list_outlines(tx, sorted(concerned - world.nodes.keys()))
        if any(takes_backends(outline) for outline in elsewhere):
            world.incomplete.add(generation)
    for rollout in await rollouts.list_active(tx):
        if rollout.generation in by_generation:
            world.rollouts[rollout.generation] = rollout
        elif whole or rollout.generation not in live:
            world.ended.append(msgspec.structs.replace(rollout, phase=RolloutPhase.ENDED, ended_at=world.now))


async def _read_due_switches(tx: Transaction, world: World, *, whole: bool) -> None:
    for row in await due_switches.list_(tx):
        if whole or row.node_id in world.nodes:
            world.due[row.node_id, row.backend] = row
    if world.due or any(_may_end_first(world, node_id) for node_id in world.nodes):
        found: dict[str, set[str]] = {model: set() for model in await models.list_ids(tx)}
        for replica in (await read_routing(tx))[0]:
            if not replica.last_resort:
                found[replica.model].add(replica.node_id)
        world.serving = {model: frozenset(on) for model, on in found.items()}


def _may_end_first(world: World, node_id: str) -> bool:
    """Whether the node still has to switch a backend, and its memory does not hold both versions."""
    intents = world.nodes[node_id].intents
    for backend, want in world.wanted[node_id].items():
        intent = intents.get(backend)
        settled = intent is not None and intent.generation == want.generation and intent.stage is IntentStage.DONE
        if isinstance(want, Wanted) and not settled and world.ends_first(node_id, backend):
            return True
    return False


def _generation(want: Wanted | Unwanted | None) -> int:
    return want.generation if want is not None else 0


def _peer(world: World, node_id: str, backend: str) -> Peer:
    node, outline = world.nodes[node_id], world.outlines[node_id]
    intent = node.intents.get(backend)
    mine = intent is not None and intent.generation == _generation(world.wanted[node_id].get(backend))
    return Peer(
        node_id,
        node.name,
        hardware_of(outline),
        intent if mine else None,
        outline.status,
        tuple(processes_of(world.processes[node_id], node.backends, backend)),
    )


def before_of(node: NodeWorld, outline: NodeOutline, backend: str) -> RolloutNodeBefore:
    """What the node has of the backend now."""
    there = node.find(backend)
    if there is None:
        return RolloutNodeBefore(hardware_of(outline))
    return RolloutNodeBefore(hardware_of(outline), concrete_name(node.backends, backend), there.digest, there.version)


def kind_of(outline: NodeOutline) -> MachineKind:
    return MachineKind(outline.capability, outline.platform, outline.python)


def kinds_of(outlines: Iterable[NodeOutline]) -> set[MachineKind]:
    """The kinds of machine among the nodes; builds are chosen by kind."""
    return {kind_of(outline) for outline in outlines}
