"""Models of a simulated fleet: people who define, edit, schedule and unload them, and clients who ask for answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from corral.contract.models import read_definition
from corral.contract.view import ViewReplica
from corral.controller.inventory.routing import read_routing
from corral.controller.models.edits import ModelOrigin, next_row
from corral.controller.runtime.change_feed import REPLICAS
from corral.kit.errors import CorralError
from corral.store.tables import model_schedules, models, revisions
from corral.store.tables.model_schedules import Schedule
from tests.simulation.census import kind_of
from tests.simulation.controllers import Controller, Died

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

MODELS = ("ant", "bee", "cow", "dog")
_BACKENDS = ("vllm", "vllm", "piper")
_GROUPS = (["big"], ["big"], ["small", "big"], ["small"])
_SEEN_FOR_S = 15.0  # a gateway reads its view again after this


class ModelPeople:
    """Each talks to whichever controller answers, and may never hear what became of it."""

    def __init__(self, simulation: Simulation, chance: Random) -> None:
        self.sim = simulation
        self.chance = chance
        self._edits = 0
        self._groups = simulation.chance("groups")
        self._has_groups = self._groups.random() < 0.6  # of models that exclude each other on one machine

    async def run(self) -> None:
        for name in MODELS[: self.chance.choice((1, 2, 3, 4))]:
            defined = False
            while not defined:
                defined = await self.says(partial(self._defines, name=name))
                await asyncio.sleep(self.chance.uniform(1, 5))
        every_s = self.chance.choice((6.0, 15.0, 40.0))
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / every_s))
            what: Callable[[Controller], Awaitable[Any]] = self.chance.choices(
                (self._edits_one, self._schedules, self._unloads, self._deletes, self._defines), (6, 6, 2, 1, 3)
            )[0]
            await self.says(what)

    async def says(self, what: Callable[[Controller], Awaitable[Any]]) -> bool:
        controller = self.sim.some_controller()
        if controller is None:
            return False
        self.sim.census.requests[kind_of(what)] += 1
        try:
            await controller.asked(lambda: what(controller))
        except Died:
            self.sim.note("person", "never hears from", controller.name)
            return False
        except CorralError as error:
            self.sim.note("person", "is told", error.code, error.message)
            return False
        return True

    async def _defines(self, controller: Controller, name: str = "") -> None:
        name = name or self.chance.choice(MODELS)
        size = self.chance.choice((4, 4, 4, 10))
        more: dict[str, Any] = {"pinned": True} if self.chance.random() < 0.1 else {}
        if self.chance.random() < 0.2:
            more |= {"idle_unload": "60s"}
        if self._has_groups and self._groups.random() < 0.7:
            more |= {"concurrency_groups": self._groups.choice(_GROUPS)}
        backend = self.chance.choice(_BACKENDS)
        await self.put(controller, {"name": name, "backend": backend, "memory": f"{size}GiB", **more})

    async def _edits_one(self, controller: Controller) -> None:
        async with controller.store.read() as tx:
            rows = await models.list_(tx)
        if rows:
            row = self.chance.choice(rows)
            self._edits += 1
            changes: dict[str, Any] = {"context_size": 1000 + self._edits}
            if row.definition.get("disabled") or self.chance.random() < 0.05:
                changes = {"disabled": not row.definition.get("disabled", False)}
            if self._has_groups and self._groups.random() < 0.2:
                changes |= {"concurrency_groups": self._groups.choice((*_GROUPS, []))}
            await self.put(controller, {**row.definition, **changes}, recreate=self.chance.random() < 0.2)

    async def put(self, controller: Controller, known: dict[str, Any], *, recreate: bool = False) -> None:
        definition = read_definition(known)
        self.sim.note("person", "defines", definition.name, definition.revision, "recreate" if recreate else "")
        async with controller.store.write() as tx:
            before = await models.find(tx, definition.name)
            row = next_row(before, definition, origin=ModelOrigin.PERSON, recreate=recreate)
            if row is None:
                return
            await models.put(tx, row)
            await revisions.bump(tx, "models")
        controller.feed.notify("models", definition.name)

    async def _schedules(self, controller: Controller) -> None:
        name = self.chance.choice(MODELS)
        known: dict[str, Any] = self.chance.choice(
            (
                {"min_replicas": 1},
                {"min_replicas": 2},
                {"min_replicas": 1, "max_replicas": 3},
                {"max_replicas": 2},
                {"spread_all": True},
                {"min_replicas": 1, "node_selector": {"zone": "a"}},
                {},
            )
        )
        self.sim.note("person", "schedules", name, known)
        async with controller.store.write() as tx:
            if await models.find(tx, name) is None:
                return
            now = await tx.now()
            if known:
                await model_schedules.put(
                    tx, Schedule(model=name, id=f"schedule-of-{name}", created_at=now, updated_at=now, **known)
                )
            else:
                await model_schedules.delete(tx, name)
            await revisions.bump(tx, "schedules")
        controller.feed.notify("schedules", name)

    async def _unloads(self, controller: Controller) -> None:
        name = self.chance.choice(MODELS)
        self.sim.note("person", "unloads", name)
        await controller.replicas.loads.unload(name, force=self.chance.random() < 0.2)

    async def _deletes(self, controller: Controller) -> None:
        name = self.chance.choice(MODELS)
        self.sim.note("person", "deletes model", name)
        async with controller.store.write() as tx:
            if await models.delete(tx, name):
                await model_schedules.delete(tx, name)
                await revisions.bump(tx, "models")
                await revisions.bump(tx, REPLICAS)
        controller.feed.notify("models", name)


class Clients:
    """Behind one gateway, whose view is some seconds old."""

    def __init__(self, simulation: Simulation, chance: Random) -> None:
        self.sim = simulation
        self.chance = chance
        self._shown: tuple[ViewReplica, ...] = ()
        self._seen_at = float("-inf")

    async def run(self) -> None:
        every_s = self.chance.choice((2.0, 5.0, 20.0))
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self.chance.expovariate(1 / every_s))
                tasks.create_task(self._request(self.chance.choice(MODELS)))

    async def _request(self, model: str) -> None:
        self.sim.census.requests["inference"] += 1
        takes_s = self.chance.choice((0.1, 1.0, 1.0, 5.0, 5.0, 40.0, 40.0, 150.0))
        for _ in range(3):
            replica = await self._pick(model)
            if replica is None:
                await self.ask_for(model)
                return
            worker = next(one for one in self.sim.workers.values() if one.node_id == replica.node_id)
            here = worker.process_host if worker.bus is not None else None
            if here is not None and await here.ask(replica.process_id, model, replica.revision, takes_s):
                return
            self._seen_at = float("-inf")

    async def _pick(self, model: str) -> ViewReplica | None:
        if self.sim.loop.time() - self._seen_at > _SEEN_FOR_S:
            await self._look()
        own = [replica for replica in self._shown if replica.model == model]
        sure = [replica for replica in own if not replica.last_resort]
        return self.chance.choice(sure or own) if own else None

    async def _look(self) -> None:
        controller = self.sim.some_controller()
        if controller is None:
            return
        try:
            self._shown = await controller.asked(lambda: _routing(controller))
            self._seen_at = self.sim.loop.time()
        except (Died, CorralError):
            return  # with no controller the last view serves on

    async def ask_for(self, model: str) -> None:
        controller = self.sim.some_controller()
        if controller is None:
            return
        try:
            status = await controller.asked(lambda: controller.replicas.loads.request(model))
            self.sim.note("client", "asks for", model, status.state)
            self.sim.asked.add(model)
        except Died:
            self.sim.note("client", "never hears of", model)
        except CorralError as error:
            self.sim.note("client", "is told", error.code, error.message)


async def _routing(controller: Controller) -> tuple[ViewReplica, ...]:
    async with controller.store.read() as tx:
        return (await read_routing(tx))[0]
