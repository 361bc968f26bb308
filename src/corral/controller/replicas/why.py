"""Why things are where they are: the world as the scheduler would see it now, explained. Reads, and changes nothing.

Any controller answers, not only the one that acts: what it reads is the same. Only how long replicas have been busy is
known to that one alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from msgspec.structs import replace as changed

from corral.contract.loads import LoadStatus
from corral.contract.why import WhyModel, WhyNode
from corral.controller.inventory.activity import ActivityTracker
from corral.controller.replicas.builds import Builds
from corral.controller.replicas.reconcile import ReplicaOptions
from corral.controller.replicas.scheduler_replicas import mirror
from corral.controller.replicas.world import FindMemory, Read, read_all
from corral.controller.scheduler.explain import explain_model, explain_node
from corral.controller.scheduler.world import World
from corral.kit.clock import Clock
from corral.kit.errors import NotFound
from corral.store.engine.transactions import Store
from corral.store.records import DesiredReplica

_LOOK_AGAIN_S = 0.1


class KnownLoads(Protocol):
    async def find(self, model: str) -> LoadStatus | None:
        """How far a model's load is; None: it is not being loaded."""


@dataclass(frozen=True)
class Sight:
    """What the world is read with, beside the store."""

    builds: Builds
    quiet: ActivityTracker
    memory: FindMemory
    options: ReplicaOptions


class Why:
    def __init__(self, store: Store, clock: Clock, sight: Sight, loads: KnownLoads, *, wait_s: float = 3.0) -> None:
        """`wait_s`: how long to wait for what the galleries say of a backend nobody has asked for yet."""
        self._store = store
        self._clock = clock
        self._sight = sight
        self._loads = loads
        self._wait_s = wait_s

    async def model(self, name: str) -> WhyModel:
        """Of the model itself: whoever asks has looked up what an alias stands for."""
        read, world = await self._look()
        model = world.models.get(name)
        if model is None:
            raise NotFound(f"there is no model {name}")
        told = explain_model(world, model)
        reasons = {(read.nodes[row.node_id].name, row.replica): row for row in read.rows if _is_of(row, name, read)}
        replicas = tuple(
            changed(replica, reason=row.reason) if (row := reasons.get((replica.node, replica.replica))) else replica
            for replica in told.replicas
        )
        return changed(told, replicas=replicas, load=await self._loads.find(name))

    async def node(self, node_id: str) -> WhyNode:
        read, world = await self._look()
        node = world.nodes.get(node_id)
        if node is None:
            raise NotFound("that node serves no models: it is not approved, or an agent")
        told = explain_node(world, node)
        reasons = {(row.model, row.replica): row.reason for row in read.rows if row.node_id == node_id}
        replicas = (
            changed(replica, reason=reasons.get((replica.model, replica.replica), "")) for replica in told.replicas
        )
        return changed(told, replicas=tuple(replicas))

    async def _look(self) -> tuple[Read, World]:
        deadline = self._clock.monotonic() + self._wait_s
        while True:
            read = await self._read()
            backends = {model.backend for model in read.models.values()}
            looking = any(self._sight.builds.is_looking(backend) for backend in backends)
            if not looking or self._clock.monotonic() >= deadline:
                return read, self._world(read)
            await self._clock.sleep(_LOOK_AGAIN_S)

    async def _read(self) -> Read:
        async with self._store.read() as tx:
            return await read_all(
                tx,
                idle_unload_s=self._sight.options.idle_unload_s,
                build=self._sight.builds.of,
                installed=self._sight.builds.installed,
                quiet=self._sight.quiet.find,
                memory=self._sight.memory,
                curious=True,
                localai=self._sight.builds.for_localai if self._sight.options.localai else None,
            )

    def _world(self, read: Read) -> World:
        models = {
            name: replace(model, failed_on=job.failed_on) if (job := read.jobs.get(name)) is not None else model
            for name, model in read.models.items()
        }
        return World(read.now, read.nodes, models, mirror(read.rows, read.places), self._sight.options.policy)


def _is_of(row: DesiredReplica, model: str, read: Read) -> bool:
    return row.model == model and row.node_id in read.nodes
