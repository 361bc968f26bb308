"""What people ask for and what goes wrong meanwhile: all of it by chance, all chance from the seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from corral.bus.local import Faults, LocalBus
from corral.controller.operations.requests import OperationKind, parse_request
from corral.controller.registry.transitions import NodeEvent
from corral.kit.errors import CorralError
from corral.store.records import BackendRequest, Scope, ScopeKind
from corral.store.tables import node_labels, nodes, operations, revisions
from tests.simulation.controllers import Controller, Died
from tests.simulation.house_worker import HouseWorker
from tests.simulation.leftovers import leave_behind
from tests.simulation.model_traffic import Clients, ModelPeople
from tests.simulation.shelf import BACKENDS
from tests.simulation.simulation import Simulation
from tests.simulation.workers import CorralWorker, LocalAIWorker, Worker

GIB = 1 << 30
_MACHINES: tuple[dict[str, Any], ...] = (
    {},
    {"capability": "nvidia", "labels": {"zone": "a"}},
    {"arch": "arm64", "labels": {"zone": "a"}},
    {"labels": {"zone": "b"}},
)


async def chaos(simulation: Simulation) -> None:
    chance = simulation.chance("chaos")
    simulation.has_trial = True
    Trouble(simulation, chance).set_up()
    async with asyncio.TaskGroup() as tasks:
        people = People(simulation, simulation.chance("people"))
        trouble = Trouble(simulation, simulation.chance("trouble"))
        actors = [tasks.create_task(people.run()), tasks.create_task(trouble.run())]
        if chance.random() < 0.5:  # the others are about backends alone
            actors.append(tasks.create_task(ModelPeople(simulation, simulation.chance("people of models")).run()))
            actors.append(tasks.create_task(Clients(simulation, simulation.chance("clients")).run()))
        await asyncio.sleep(simulation.plan.chaos_s)
        for actor in actors:
            actor.cancel()


class Trouble:
    def __init__(self, simulation: Simulation, chance: Random) -> None:
        self.house = simulation
        self.chance = chance

    def set_up(self) -> None:
        """Every seed is another fleet with other weaknesses."""
        house, chance = self.house, self.chance
        for index in range(chance.choice((1, 2, 2, 3))):
            house.start_controller(f"c{index}")
        for index in range(chance.choice((1, 2, 3, 4, 5))):
            self._add_worker(f"w{index}")
        if chance.random() < 0.8:
            house.hub.faults = Faults(
                drop=chance.choice((0.0, 0.02, 0.1, 0.3)),
                duplicate=chance.choice((0.0, 0.05, 0.2)),
                delay_s=(0.0, chance.choice((0.0, 0.05, 0.5, 3.0))),
            )
        house.luck.fails = house.files.fails = chance.choice((0.0, 0.1, 0.4))
        house.luck.permanently = chance.choice((0.0, 0.3))
        house.luck.slow = chance.choice((0.0, 0.1, 0.4))
        house.luck.dies = chance.choice((0.0, 0.01, 0.05))
        house.store_luck.waits = chance.choice((0.0, 0.1, 0.5))
        house.store_luck.fails = chance.choice((0.0, 0.002, 0.02))
        house.store_luck.dies = chance.choice((0.0, 0.0005, 0.003))

    async def run(self) -> None:
        house, chance = self.house, self.chance
        every_s = chance.choice((8.0, 20.0, 60.0))
        happenings: list[Callable[[], None]] = [
            self._controller_dies,
            self._controller_dies,
            self._worker_dies,
            self._worker_dies,
            self._bus_breaks,
            self._bus_breaks,
            self._bus_falls_silent,
            self._database_away,
            self._database_away_for_one,
            self._gallery_away,
            self._newer_build,
            self._newer_build,
            self._machine_joins,
            self._machine_reboots,
            self._process_crashes,
            self._process_crashes,
            self._files_away,
            self._memory_taken,
            self._memory_taken,
            self._leftover,
            self._leftover,
        ]
        house.while_failing(0.0, self._controllers_return)
        while True:
            await asyncio.sleep(chance.expovariate(1 / every_s))
            chance.choice(happenings)()

    def _add_worker(self, name: str) -> None:
        ram = self.chance.choice((12, 16, 48)) << 30
        known = {"total_ram": ram, "available_ram": ram, **self.chance.choice(_MACHINES)}
        kinds: tuple[type[Worker], ...] = (HouseWorker, CorralWorker, LocalAIWorker)
        kind = self.chance.choices(kinds, (10, 5, 3))[0]
        worker = kind(self.house, name, self.house.chance(f"worker {name}"), **known)
        if isinstance(worker, LocalAIWorker):
            worker.digests = self.chance.random() < 0.5
        for backend in BACKENDS:  # somebody's own doing, before we came
            if self.chance.random() < 0.1:
                worker.change("install", backend, f"sha256:{backend}-old", "0.9")
        self.house.add_worker(worker)

    def _controllers_return(self) -> None:
        """Somebody looks after the controllers: those that died are started again."""
        for name in self.house.controllers:
            self.house.start_controller(name)
        self.house.while_failing(self.chance.uniform(1, 40), self._controllers_return)

    def _controller_dies(self) -> None:
        self.house.kill_controller(self.chance.choice(sorted(self.house.controllers)))

    def _worker_dies(self) -> None:
        hours = self.chance.random() < 0.05
        away_s = self.chance.uniform(600, 7200) if hours else self.chance.choice((1.0, 10.0, 90.0, 200.0))
        self.house.kill_worker(self.chance.choice(sorted(self.house.workers)), away_s)

    def _bus_breaks(self) -> None:
        bus = self._some_bus()
        if bus is None:
            return
        self.house.note(bus.name, "is cut off")
        self.house.bus_trouble_at = self.house.loop.time()
        bus.lose_connection("cut off")
        self.house.while_failing(self.chance.uniform(0.1, 90), lambda: self._reconnected(bus))

    def _bus_falls_silent(self) -> None:
        """Nobody knows of it until the connection is given up."""
        bus = self._some_bus()
        if bus is None:
            return
        self.house.note(bus.name, "falls silent")
        self.house.bus_trouble_at = self.house.loop.time()
        bus.frozen = True
        self.house.while_failing(self.chance.uniform(1, 60), lambda: self._found_silent(bus))

    def _some_bus(self) -> LocalBus | None:
        buses = self.house.buses()
        return self.chance.choice(buses) if buses else None

    def _found_silent(self, bus: LocalBus) -> None:
        bus.lose_connection("found silent")
        self._reconnected(bus)

    def _reconnected(self, bus: LocalBus) -> None:
        self.house.bus_trouble_at = self.house.loop.time()
        if bus in self.house.buses():  # else its process has died meanwhile
            bus.restore_connection()

    def _database_away(self) -> None:
        self.house.note("the database goes away")
        self.house.store_luck.away = True
        self.house.while_failing(self.chance.uniform(1, 60), self._database_back)

    def _database_back(self) -> None:
        self.house.store_luck.away = False

    def _database_away_for_one(self) -> None:
        controller = self.house.some_controller()
        if controller is not None:
            self.house.note(controller.name, "loses the database")
            controller.store_away = True
            self.house.while_failing(self.chance.uniform(1, 60), lambda: setattr(controller, "store_away", False))

    def _gallery_away(self) -> None:
        self.house.note("the gallery goes away")
        self.house.catalogue.away = True
        self.house.while_failing(self.chance.uniform(5, 120), lambda: setattr(self.house.catalogue, "away", False))

    def _files_away(self) -> None:
        self.house.note("the files of models go away")
        self.house.files.away = True
        self.house.while_failing(self.chance.uniform(5, 90), lambda: setattr(self.house.files, "away", False))

    def _machine_reboots(self) -> None:
        self.house.reboot(self.chance.choice(sorted(self.house.workers)), self.chance.choice((5.0, 30.0, 150.0)))

    def _process_crashes(self) -> None:
        worker = self.house.workers[self.chance.choice(sorted(self.house.workers))]
        if worker.stall is not None and worker.bus is not None and worker.disk.processes:
            process_id = self.chance.choice(sorted(worker.disk.processes))
            self.house.note(worker.name, "has a process crash", process_id)
            worker.stall.crash(process_id)

    def _memory_taken(self) -> None:
        """Other programs leave about as much as one or two models need."""
        worker = self.house.workers[self.chance.choice(sorted(self.house.workers))]
        left = int((self.chance.choice((4, 4, 8, 10)) + self.chance.uniform(-1.0, 1.5)) * GIB)
        used = worker.stall.used_bytes if worker.stall is not None else 0
        worker.others_bytes = max(0, int(worker.known["total_ram"]) - used - left)
        self.house.note(worker.name, "has other programs that take", worker.others_bytes)
        self.house.while_failing(self.chance.uniform(20, 120), lambda: setattr(worker, "others_bytes", 0))

    def _leftover(self) -> None:
        leave_behind(self.house, self.chance)

    def _newer_build(self) -> None:
        name = self.chance.choice(BACKENDS)
        self.house.note("a newer build of", name)
        self.house.catalogue.publish(name)

    def _machine_joins(self) -> None:
        if len(self.house.workers) < 8:
            self._add_worker(f"w{len(self.house.workers)}")


class People:
    """Each talks to whichever controller answers, and may never hear what became of it."""

    def __init__(self, simulation: Simulation, chance: Random) -> None:
        self.house = simulation
        self.chance = chance

    async def run(self) -> None:
        every_s = self.chance.choice((5.0, 15.0, 40.0))
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self.chance.expovariate(1 / every_s))
                tasks.create_task(self._somebody())

    async def _somebody(self) -> None:
        controller = self.house.some_controller()
        if controller is None:
            return
        what: Callable[[Controller], Awaitable[Any]] = self.chance.choices(
            (
                self._asks,
                self._cancels,
                self._cancels_one,
                self._withdraws,
                self._retries,
                self._dismisses,
                self._drains,
                self._deletes_node,
                self._labels,
            ),
            (60, 8, 6, 5, 6, 2, 4, 2, 3),
        )[0]
        try:
            await controller.asked(lambda: what(controller))
        except Died:
            self.house.note("person", "never hears from", controller.name)
        except CorralError as error:
            self.house.note("person", "is told", error.code, error.message)

    async def _asks(self, controller: Controller) -> None:
        kind = self.chance.choices(("install", "upgrade", "delete", "rollback"), (10, 5, 5, 2))[0]
        backend = self.chance.choice(BACKENDS)
        scope = Scope(ScopeKind.ALL)
        roll = self.chance.random()
        if roll < 0.3:
            scope = Scope(ScopeKind.NODE, self._node())
        elif roll < 0.45:
            scope = Scope(ScopeKind.SELECTOR, "zone=a")
        force = kind in ("install", "delete") and self.chance.random() < 0.15
        most = self.chance.choice(("", "1", "50%")) if kind == "upgrade" else ""
        request = parse_request(
            OperationKind(kind), BackendRequest(backend), scope=scope, force=force, max_parallel=most
        )
        self.house.note("person", "asks", controller.name, kind, backend, scope.kind, scope.value, force)
        accepted = await controller.backends.operations.accept(request)
        self.house.note("person", "is told", accepted.operation_id)
        self.house.accepted[accepted.operation_id] = kind

    async def _cancels(self, controller: Controller) -> None:
        id = await self._some_operation()
        self.house.note("person", "cancels", id)
        await controller.backends.operations.cancel(id)

    async def _cancels_one(self, controller: Controller) -> None:
        id, node = await self._some_operation(), self._node()
        self.house.note("person", "cancels", id, "on", node)
        await controller.backends.operations.cancel(id, node=node)

    async def _withdraws(self, controller: Controller) -> None:
        id = await self._some_operation()
        self.house.note("person", "withdraws", id)
        await controller.backends.operations.withdraw(id)

    async def _retries(self, controller: Controller) -> None:
        id = await self._some_operation()
        self.house.note("person", "retries", id)
        accepted = await controller.backends.operations.retry(id)
        self.house.accepted[accepted.operation_id] = "retry"

    async def _dismisses(self, controller: Controller) -> None:
        await controller.backends.operations.dismiss(await self._some_operation())

    async def _drains(self, controller: Controller) -> None:
        node = self._node()
        self.house.note("person", "drains", node)
        self.house.spawn(self._resumes(node, self.chance.uniform(5, 60)))
        await controller.changes.apply(node, NodeEvent.DRAIN_REQUESTED)

    async def _resumes(self, node: str, after_s: float) -> None:
        """Until somebody has heard it."""
        await asyncio.sleep(after_s)
        resumed = False
        while not resumed:
            controller = self.house.some_controller()
            resumed = controller is not None and await self._resumed(controller, node)
            await asyncio.sleep(1)

    async def _resumed(self, controller: Controller, node: str) -> bool:
        try:
            await controller.asked(lambda: controller.changes.apply(node, NodeEvent.RESUME_REQUESTED))
        except Died:
            return False
        except CorralError as error:
            return error.code in ("not_found", "conflict")
        return True

    async def _deletes_node(self, controller: Controller) -> None:
        node = self._node()
        self.house.note("person", "deletes node", node)
        async with controller.store.write() as tx:
            if await nodes.delete(tx, node):
                await revisions.bump(tx, "nodes")
        controller.changes.notify(node)

    async def _labels(self, controller: Controller) -> None:
        node, zone = self._node(), self.chance.choice("ab")
        self.house.note("person", "labels", node, zone)
        async with controller.store.write() as tx:
            found = await nodes.get(tx, node)
            await node_labels.merge(tx, node, {"zone": zone}, origin="admin")
            await controller.changes.write(tx, found, {})
            await revisions.bump(tx, "nodes")
        controller.changes.notify(node)

    def _node(self) -> str:
        return self.house.workers[self.chance.choice(sorted(self.house.workers))].node_id

    async def _some_operation(self) -> str:
        async with self.house.store.read() as tx:
            found = await operations.list_(tx, limit=6)
        return self.chance.choice(sorted(row.id for row in found)) if found else "none"
