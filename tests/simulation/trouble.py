"""What people ask for and what goes wrong meanwhile: all of it by chance, all chance from the seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from corral.bus.local import Faults, LocalBus
from corral.controller.operations.requests import OperationKind, parse_request
from corral.controller.registry.transitions import NodeEvent
from corral.controller.rollouts.options import parse_rollout
from corral.kit.errors import CorralError
from corral.store.records import BackendRequest, Scope, ScopeKind
from corral.store.tables import node_labels, nodes, operations, revisions
from tests.simulation.census import kind_of
from tests.simulation.controllers import Controller, Died
from tests.simulation.galleries import BACKENDS
from tests.simulation.leftovers import leave_behind
from tests.simulation.model_traffic import Clients, ModelPeople
from tests.simulation.real_orders import WorkerWithRealOrders
from tests.simulation.releases import ReleaseWorld
from tests.simulation.simulation import Simulation
from tests.simulation.workers import CorralWorker, LocalAIWorker, Worker

GIB = 1 << 30
_COUNTED_BY_THE_SIMULATION = ("controller dies", "worker dies", "machine reboots")
_MACHINES: tuple[dict[str, Any], ...] = (
    {},
    {"capability": "nvidia", "labels": {"zone": "a"}},
    {"arch": "arm64", "labels": {"zone": "a"}},
    {"labels": {"zone": "b"}},
)


async def chaos(simulation: Simulation) -> None:
    chance = simulation.chance("chaos")
    simulation.has_trial = True
    if simulation.chance("releases wanted").random() < 0.3:
        simulation.releases = ReleaseWorld(simulation, simulation.chance("releases"))
    Trouble(simulation, chance).set_up()
    async with asyncio.TaskGroup() as tasks:
        people = People(simulation, simulation.chance("people"))
        trouble = Trouble(simulation, simulation.chance("trouble"))
        actors = [tasks.create_task(people.run()), tasks.create_task(trouble.run())]
        if simulation.releases is not None:
            actors.append(tasks.create_task(simulation.releases.run()))
        if chance.random() < 0.5:  # the others are about backends alone
            actors.append(tasks.create_task(ModelPeople(simulation, simulation.chance("people of models")).run()))
            actors.append(tasks.create_task(Clients(simulation, simulation.chance("clients")).run()))
        await asyncio.sleep(simulation.plan.chaos_s)
        for actor in actors:
            actor.cancel()


class Trouble:
    def __init__(self, simulation: Simulation, chance: Random) -> None:
        self.sim = simulation
        self.chance = chance

    def set_up(self) -> None:
        """Every seed is another fleet with other weaknesses."""
        sim, chance = self.sim, self.chance
        for index in range(chance.choice((1, 2, 2, 3))):
            sim.start_controller(f"c{index}")
        for index in range(chance.choice((1, 2, 3, 4, 5))):
            self._add_worker(f"w{index}")
        if chance.random() < 0.8:
            sim.hub.faults = Faults(
                drop=chance.choice((0.0, 0.02, 0.1, 0.3)),
                duplicate=chance.choice((0.0, 0.05, 0.2)),
                delay_s=(0.0, chance.choice((0.0, 0.05, 0.5, 3.0))),
            )
        sim.luck.fails = sim.files.fails = chance.choice((0.0, 0.1, 0.4))
        sim.luck.permanently = chance.choice((0.0, 0.3))
        sim.luck.slow = chance.choice((0.0, 0.1, 0.4))
        sim.luck.dies = chance.choice((0.0, 0.01, 0.05))
        sim.store_luck.waits = chance.choice((0.0, 0.1, 0.5))
        sim.store_luck.fails = chance.choice((0.0, 0.002, 0.02))
        sim.store_luck.dies = chance.choice((0.0, 0.0005, 0.003))

    async def run(self) -> None:
        sim, chance = self.sim, self.chance
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
        sim.while_failing(0.0, self._controllers_return)
        while True:
            await asyncio.sleep(chance.expovariate(1 / every_s))
            happening = chance.choice(happenings)
            kind = kind_of(happening)
            if kind not in _COUNTED_BY_THE_SIMULATION:
                sim.census.faults[kind] += 1
            happening()

    def _add_worker(self, name: str) -> None:
        ram = self.chance.choice((12, 16, 48)) << 30
        known = {"total_ram": ram, "available_ram": ram, **self.chance.choice(_MACHINES)}
        kinds: tuple[type[Worker], ...] = (WorkerWithRealOrders, CorralWorker, LocalAIWorker)
        kind = self.chance.choices(kinds, (10, 5, 3))[0]
        worker = kind(self.sim, name, self.sim.chance(f"worker {name}"), **known)
        if isinstance(worker, LocalAIWorker):
            worker.digests = self.chance.random() < 0.5
        if self.sim.releases is not None and not isinstance(worker, LocalAIWorker):
            self.sim.releases.equip(worker)
        for backend in BACKENDS:  # somebody's own doing, before we came
            if self.chance.random() < 0.1:
                worker.change("install", backend, f"sha256:{backend}-old", "0.9")
        self.sim.add_worker(worker)

    def _controllers_return(self) -> None:
        """Somebody looks after the controllers: those that died are started again."""
        for name in self.sim.controllers:
            self.sim.start_controller(name)
        self.sim.while_failing(self.chance.uniform(1, 40), self._controllers_return)

    def _controller_dies(self) -> None:
        self.sim.kill_controller(self.chance.choice(sorted(self.sim.controllers)))

    def _worker_dies(self) -> None:
        hours = self.chance.random() < 0.05
        away_s = self.chance.uniform(600, 7200) if hours else self.chance.choice((1.0, 10.0, 90.0, 200.0))
        self.sim.kill_worker(self.chance.choice(sorted(self.sim.workers)), away_s)

    def _bus_breaks(self) -> None:
        bus = self._some_bus()
        if bus is None:
            return
        self.sim.note(bus.name, "is cut off")
        self.sim.bus_trouble_at = self.sim.loop.time()
        bus.lose_connection("cut off")
        self.sim.while_failing(self.chance.uniform(0.1, 90), lambda: self._reconnected(bus))

    def _bus_falls_silent(self) -> None:
        """Nobody knows of it until the connection is given up."""
        bus = self._some_bus()
        if bus is None:
            return
        self.sim.note(bus.name, "falls silent")
        self.sim.bus_trouble_at = self.sim.loop.time()
        bus.frozen = True
        self.sim.while_failing(self.chance.uniform(1, 60), lambda: self._found_silent(bus))

    def _some_bus(self) -> LocalBus | None:
        buses = self.sim.buses()
        return self.chance.choice(buses) if buses else None

    def _found_silent(self, bus: LocalBus) -> None:
        bus.lose_connection("found silent")
        self._reconnected(bus)

    def _reconnected(self, bus: LocalBus) -> None:
        self.sim.bus_trouble_at = self.sim.loop.time()
        if bus in self.sim.buses():  # else its process has died meanwhile
            bus.restore_connection()

    def _database_away(self) -> None:
        self.sim.note("the database goes away")
        self.sim.store_luck.away = True
        self.sim.while_failing(self.chance.uniform(1, 60), self._database_back)

    def _database_back(self) -> None:
        self.sim.store_luck.away = False

    def _database_away_for_one(self) -> None:
        controller = self.sim.some_controller()
        if controller is not None:
            self.sim.note(controller.name, "loses the database")
            controller.store_away = True
            self.sim.while_failing(self.chance.uniform(1, 60), lambda: setattr(controller, "store_away", False))

    def _gallery_away(self) -> None:
        self.sim.note("the gallery goes away")
        self.sim.catalogue.away = True
        self.sim.while_failing(self.chance.uniform(5, 120), lambda: setattr(self.sim.catalogue, "away", False))

    def _files_away(self) -> None:
        self.sim.note("the files of models go away")
        self.sim.files.away = True
        self.sim.while_failing(self.chance.uniform(5, 90), lambda: setattr(self.sim.files, "away", False))

    def _machine_reboots(self) -> None:
        self.sim.reboot(self.chance.choice(sorted(self.sim.workers)), self.chance.choice((5.0, 30.0, 150.0)))

    def _process_crashes(self) -> None:
        worker = self.sim.workers[self.chance.choice(sorted(self.sim.workers))]
        if worker.process_host is not None and worker.bus is not None and worker.disk.processes:
            process_id = self.chance.choice(sorted(worker.disk.processes))
            self.sim.note(worker.name, "has a process crash", process_id)
            worker.process_host.crash(process_id)

    def _memory_taken(self) -> None:
        """Other programs leave about as much as one or two models need."""
        worker = self.sim.workers[self.chance.choice(sorted(self.sim.workers))]
        left = int((self.chance.choice((4, 4, 8, 10)) + self.chance.uniform(-1.0, 1.5)) * GIB)
        used = worker.process_host.used_bytes if worker.process_host is not None else 0
        worker.others_bytes = max(0, int(worker.known["total_ram"]) - used - left)
        self.sim.note(worker.name, "has other programs that take", worker.others_bytes)
        self.sim.while_failing(self.chance.uniform(20, 120), lambda: setattr(worker, "others_bytes", 0))

    def _leftover(self) -> None:
        leave_behind(self.sim, self.chance)

    def _newer_build(self) -> None:
        name = self.chance.choice(BACKENDS)
        self.sim.note("a newer build of", name)
        self.sim.catalogue.publish(name)

    def _machine_joins(self) -> None:
        if len(self.sim.workers) < 8:
            self._add_worker(f"w{len(self.sim.workers)}")


class People:
    """Each talks to whichever controller answers, and may never hear what became of it."""

    def __init__(self, simulation: Simulation, chance: Random) -> None:
        self.sim = simulation
        self.chance = chance
        self.chance_of_soaks = simulation.chance("soaks")

    async def run(self) -> None:
        every_s = self.chance.choice((5.0, 15.0, 40.0))
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self.chance.expovariate(1 / every_s))
                tasks.create_task(self._somebody())

    async def _somebody(self) -> None:
        controller = self.sim.some_controller()
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
            self.sim.census.requests[kind_of(what)] += 1
            await controller.asked(lambda: what(controller))
        except Died:
            self.sim.note("person", "never hears from", controller.name)
        except CorralError as error:
            self.sim.note("person", "is told", error.code, error.message)

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
        soak = self.chance_of_soaks.choice(("", "20s", "60s", "5m")) if kind == "upgrade" else ""
        request = parse_request(
            OperationKind(kind),
            BackendRequest(backend),
            scope=scope,
            force=force,
            max_parallel=most,
            rollout=parse_rollout(soak=soak),
        )
        self.sim.note("person", "asks", controller.name, kind, backend, scope.kind, scope.value, force)
        accepted = await controller.backends.operations.accept(request)
        self.sim.note("person", "is told", accepted.operation_id)
        self.sim.accepted[accepted.operation_id] = kind
        if soak:
            self.sim.spawn(self._steers(accepted.operation_id))

    async def _steers(self, id: str) -> None:
        """Some rollouts are promoted or aborted in the middle of it."""
        what = self.chance_of_soaks.choice(("promote", "abort", "", ""))
        await asyncio.sleep(self.chance_of_soaks.uniform(1, 120))
        controller = self.sim.some_controller()
        if not what or controller is None:
            return
        self.sim.note("person", what, id)
        act = getattr(controller.backends.rollouts, what)
        try:
            await controller.asked(lambda: act(id, by="somebody"))
        except Died:
            self.sim.note("person", "never hears from", controller.name)
        except CorralError as error:
            self.sim.note("person", "is told", error.code, error.message)

    async def _cancels(self, controller: Controller) -> None:
        id = await self._some_operation()
        self.sim.note("person", "cancels", id)
        await controller.backends.operations.cancel(id)

    async def _cancels_one(self, controller: Controller) -> None:
        id, node = await self._some_operation(), self._node()
        self.sim.note("person", "cancels", id, "on", node)
        await controller.backends.operations.cancel(id, node=node)

    async def _withdraws(self, controller: Controller) -> None:
        id = await self._some_operation()
        self.sim.note("person", "withdraws", id)
        await controller.backends.operations.withdraw(id)

    async def _retries(self, controller: Controller) -> None:
        id = await self._some_operation()
        self.sim.note("person", "retries", id)
        accepted = await controller.backends.operations.retry(id)
        self.sim.accepted[accepted.operation_id] = "retry"

    async def _dismisses(self, controller: Controller) -> None:
        await controller.backends.operations.dismiss(await self._some_operation())

    async def _drains(self, controller: Controller) -> None:
        node = self._node()
        self.sim.note("person", "drains", node)
        self.sim.spawn(self._resumes(node, self.chance.uniform(5, 60)))
        await controller.changes.apply(node, NodeEvent.DRAIN_REQUESTED)

    async def _resumes(self, node: str, after_s: float) -> None:
        """Until somebody has heard it."""
        await asyncio.sleep(after_s)
        resumed = False
        while not resumed and not self.sim.is_leaving:
            controller = self.sim.some_controller()
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
        self.sim.note("person", "deletes node", node)
        async with controller.store.write() as tx:
            if await nodes.delete(tx, node):
                await revisions.bump(tx, "nodes")
        controller.changes.notify(node)

    async def _labels(self, controller: Controller) -> None:
        node, zone = self._node(), self.chance.choice("ab")
        self.sim.note("person", "labels", node, zone)
        async with controller.store.write() as tx:
            found = await nodes.get(tx, node)
            await node_labels.merge(tx, node, {"zone": zone}, origin="admin")
            await controller.changes.write(tx, found, {})
            await revisions.bump(tx, "nodes")
        controller.changes.notify(node)

    def _node(self) -> str:
        return self.sim.workers[self.chance.choice(sorted(self.sim.workers))].node_id

    async def _some_operation(self) -> str:
        async with self.sim.store.read() as tx:
            found = await operations.list_(tx, limit=6)
        return self.chance.choice(sorted(row.id for row in found)) if found else "none"
