"""Explains placement for `corral why`: reads the snapshot that the scheduler would see now, and changes nothing.

Any controller can answer, not only the leader: the snapshot is the same. Only the leader knows how long replicas have
been busy.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from msgspec.structs import replace as changed

from corral.contract.models import Definition
from corral.contract.why import WhyModel, WhyNode
from corral.controller.models.views import Resumption, explain_resumption
from corral.controller.replicas.loads import LoadService
from corral.controller.replicas.scheduler_replicas import scheduler_replicas
from corral.controller.replicas.snapshot import FleetSnapshot, SnapshotReader
from corral.controller.scheduler.explain import explain_model, explain_node
from corral.controller.scheduler.world import BuildState, Policy, World
from corral.kit.clock import Clock
from corral.kit.errors import NotFound

_POLL_S = 0.1
_USABLE = (BuildState.INSTALLED, BuildState.INSTALLABLE)


def _can_continue(snapshot: FleetSnapshot, definition: Definition) -> dict[str, bool]:
    """By name of each node that can have the backend. A process that runs knows better than a gallery."""
    found: dict[str, bool] = {}
    for node_id, node in snapshot.nodes.items():
        build = node.builds.get(definition.backend)
        if build is not None and build.state in _USABLE:
            found[node.name] = build.continues
        for process in snapshot.hosts[node_id].processes:
            if process.model == definition.name:
                found[node.name] = process.continues is not None
    return found


class PlacementExplainer:
    def __init__(
        self, snapshots: SnapshotReader, loads: LoadService, policy: Policy, clock: Clock, *, wait_s: float = 3.0
    ) -> None:
        """`wait_s`: how long to wait for build lookups that this call starts."""
        self._snapshots = snapshots
        self._loads = loads
        self._policy = policy
        self._clock = clock
        self._wait_s = wait_s

    async def model(self, name: str) -> WhyModel:
        """`name` is the model's own: the caller has resolved an alias."""
        snapshot, world = await self._read_world()
        model = world.models.get(name)
        if model is None:
            raise NotFound(f"there is no model {name}")
        explained = explain_model(world, model)
        own = [row for row in snapshot.rows if row.model == name and row.node_id in snapshot.nodes]
        reasons = {(snapshot.nodes[row.node_id].name, row.replica): row for row in own}
        replicas = tuple(
            changed(replica, reason=row.reason) if (row := reasons.get((replica.node, replica.replica))) else replica
            for replica in explained.replicas
        )
        definition = snapshot.definitions.get(name)
        resumption = Resumption()
        if definition is not None:
            resumption = explain_resumption(definition, _can_continue(snapshot, definition))
        return changed(
            explained,
            replicas=replicas,
            load=await self._loads.find(name),
            streams=resumption.text,
            streams_limited=resumption.is_limited,
        )

    async def node(self, node_id: str) -> WhyNode:
        snapshot, world = await self._read_world()
        node = world.nodes.get(node_id)
        if node is None:
            raise NotFound("this node serves no models: it is not approved, or it is an agent")
        explained = explain_node(world, node)
        reasons = {(row.model, row.replica): row.reason for row in snapshot.rows if row.node_id == node_id}
        replicas = (
            changed(replica, reason=reasons.get((replica.model, replica.replica), "")) for replica in explained.replicas
        )
        return changed(explained, replicas=tuple(replicas))

    async def world(self, backends: Collection[str], *, wait_s: float | None = None) -> World:
        """The fleet as placement sees it, with the builds of these backends: for models that are not installed yet."""
        return (await self._read_world(backends, wait_s))[1]

    async def _read_world(
        self, backends: Collection[str] = (), wait_s: float | None = None
    ) -> tuple[FleetSnapshot, World]:
        deadline = self._clock.monotonic() + (self._wait_s if wait_s is None else wait_s)
        while True:
            snapshot = await self._snapshots.read(all_models=True, backends=backends)
            names = {model.backend for model in snapshot.models.values()} | set(backends)
            pending = any(self._snapshots.builds.is_looking_up(backend) for backend in names)
            if not pending or self._clock.monotonic() >= deadline:
                return snapshot, self._world(snapshot)
            await self._clock.sleep(_POLL_S)

    def _world(self, snapshot: FleetSnapshot) -> World:
        models = {
            name: replace(model, failed_on=job.failed_on) if (job := snapshot.jobs.get(name)) is not None else model
            for name, model in snapshot.models.items()
        }
        replicas = scheduler_replicas(snapshot.rows, snapshot.hosts)
        return World(snapshot.now, snapshot.nodes, models, replicas, self._policy)
