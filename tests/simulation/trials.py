"""What a fleet at rest must stand: one outage, one silent machine, one leftover or one cancel, with nothing else wrong.

While everything fails at once nobody can say what should have happened; here it can be said exactly. Each seed has one
trial, after its time of trouble: 5 (a busy process is never ended), 6 (one controller's death loses no view and no
work), 7 (an outage of bus or database breaks no warm request), 8 (silence of most is not the death of most).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from corral.contract.view import ViewReplica
from corral.controller.inventory.routing import read_routing
from corral.controller.operations.requests import OperationKind, parse_request
from corral.kit.errors import CorralError
from corral.store.records import BackendRequest, Scope, ScopeKind
from corral.store.tables import model_schedules, models
from corral.store.tables.models import StoredModel
from tests.simulation import replica_truth
from tests.simulation.controllers import GUARD, STALE_AFTER_S, Died
from tests.simulation.galleries import BACKENDS
from tests.simulation.leftovers import FOREIGN, add_leftover, has_backend
from tests.simulation.model_traffic import ModelPeople
from tests.simulation.workers import Worker
from tests.support.replica_invariants import Key

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_OUTAGE_S = 60.0
_ASK_EVERY_S = 5.0
_SILENT_S = STALE_AFTER_S + 50.0  # the limit, the monitor's round, the last flush


class Trials:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._chance = simulation.chance("trial")
        self._began = 0.0
        self._wanted_room: frozenset[str] = frozenset()

    async def run(self, name: str = "") -> float:
        """One by its name, or by chance. How long it took: some two minutes. The caller sees to it that all comes to
        rest again."""
        began, is_any = self._simulation.loop.time(), not name
        self._began = began
        wanting = await replica_truth.wanting_more(self._simulation)
        self._wanted_room = frozenset(wanting) | await replica_truth.spread_thin(self._simulation)
        trials: dict[str, Callable[[], Awaitable[None]]] = {
            "bus away": self._bus_away,
            "database away": self._database_away,
            "controller dies": self._controller_dies,
            "machines silent": self._machines_silent,
            "install cancelled": self._install_cancelled,
            "leftovers": self._leftovers,
            "nothing": self._nothing,
        }
        name = name or self._chance.choice([*trials, "machines silent"])
        trials["group added"] = self._group_added
        if is_any and self._simulation.chance("trial of groups").random() < 0.25:
            name = "group added"
        self._simulation.note("trial", name)
        await trials[name]()
        return self._simulation.loop.time() - began

    async def _nothing(self) -> None:
        """What is wanted stays; what nobody uses may go. A model that had too few replicas before, because nobody had
        room, may find room now and wait for its next try (five minutes): it only must not have fewer."""
        before = Counter(one.model for one in await self._view())
        for _ in range(6):
            await asyncio.sleep(15)
            now = Counter(one.model for one in await self._view())
            gave_way = Counter(model for _, model, _ in self._made_room())
            for model, why in (await replica_truth.lacking(self._simulation)).items():
                may_lack = model in self._wanted_room or gave_way[model]
                if not may_lack or now[model] < before[model] - gave_way[model]:
                    self._simulation.failed(f"does not stay at rest: {why}")

    def _made_room(self) -> set[Key]:
        """Replicas that ended for a model that waited for room before the trial began: no outage caused that. One that
        ends for a model which had all it wanted is not excused: then that model lost something in the trial."""
        return self._simulation.evicted_for(self._wanted_room, self._began)

    # Outages that no warm request may notice.

    async def _bus_away(self) -> None:
        for bus in self._simulation.buses():
            bus.lose_connection("a trial")
        self._simulation.bus_trouble_at = self._simulation.loop.time()
        await self._warm_for(_OUTAGE_S)
        for worker in self._workers():
            row = self._simulation.node_row(worker.node_id)
            if worker.protocol and row is not None and not row.bus_down:
                self._simulation.failed(f"{worker.name} said for a minute that its bus is down, and its row does not")
        for bus in self._simulation.buses():
            bus.restore_connection()
        self._simulation.bus_trouble_at = self._simulation.loop.time()
        await self._warm_for(30.0)
        self._all_in_service()

    async def _database_away(self) -> None:
        self._simulation.store_luck.away = True
        await self._warm_for(_OUTAGE_S)
        self._simulation.store_luck.away = False
        await self._warm_for(30.0)
        self._all_in_service()

    async def _controller_dies(self) -> None:
        name = self._chance.choice(sorted(self._simulation.controllers))
        self._simulation.kill_controller(name)
        await self._warm_for(40.0)
        self._simulation.start_controller(name)
        await self._warm_for(50.0)
        self._all_in_service()

    async def _warm_for(self, seconds: float) -> None:
        """Gateways have their view from before and whatever they can read since: one of its replicas answers."""
        before = await self._view()
        kept = await self._promised(before)
        promised = [one for one in before if one.model in kept]
        ends = self._simulation.loop.time() + seconds
        while self._simulation.loop.time() < ends:
            await asyncio.sleep(_ASK_EVERY_S)
            shown = await self._view()
            answering = {one.model for one in (*before, *shown) if self._answers(one)}
            made_room = self._made_room()
            warm = {one.model for one in promised if (one.node_id, one.model, one.replica) not in made_room}
            for model in sorted(warm - answering):
                self._simulation.failed(f"{model} was warm, and an outage left it without an answer")
            for model in sorted(warm - {one.model for one in shown}):
                self._simulation.failed(f"{model} was warm, and an outage took it out of the view")

    async def _promised(self, shown: tuple[ViewReplica, ...]) -> set[str]:
        """The models that stay though nobody uses them. Not so those with `idle_unload`; nor those of which only an
        earlier revision answers, because there is no place for their own: unused it leaves, unless a schedule has a
        minimum (`scaling.py`)."""
        known = {row.id: row for row in await self._models()}
        async with self._simulation.store.read() as tx:
            required = {row.model for row in await model_schedules.list_(tx) if row.min_replicas}
        own = {one.model for one in shown if one.revision == known[one.model].revision}
        return {
            one.model
            for one in shown
            if "idle_unload" not in known[one.model].definition and one.model in own | required
        }

    def _answers(self, replica: ViewReplica) -> bool:
        worker = next(one for one in self._simulation.workers.values() if one.node_id == replica.node_id)
        return worker.process_host is not None and worker.process_host.ingress.serving(replica.process_id) is not None

    def _all_in_service(self) -> None:
        for worker in self._workers():
            row = self._simulation.node_row(worker.node_id)
            if row is not None and row.status not in ("healthy", "draining"):
                self._simulation.failed(f"{worker.name} is {row.status} after an outage that was not its own")

    # Machines that fall silent.

    async def _machines_silent(self) -> None:
        """One is gone, and taken out; of most of a fleet the cause is elsewhere, and they stay."""
        every = [worker for worker in self._workers() if self._is_healthy(worker)]
        if not every:
            return
        together = len(every) >= GUARD.floor and self._chance.random() < 0.5
        silent = every if together else [self._chance.choice(every)]
        for worker in silent:
            self._hush(worker, silent=True)
        await asyncio.sleep(_SILENT_S)
        out = [worker.name for worker in silent if self._is_offline(worker)]
        if together and len(out) * 100 > GUARD.share_percent * len(every):
            self._simulation.failed(f"{len(out)} of {len(every)} were taken out together")
        if not together and not out:
            self._simulation.failed(f"{silent[0].name} has been silent for {_SILENT_S:.0f} s and is not offline")
        for worker in silent:
            self._hush(worker, silent=False)
        self._simulation.bus_trouble_at = self._simulation.loop.time()

    def _hush(self, worker: Worker, *, silent: bool) -> None:
        self._simulation.bus_trouble_at = self._simulation.loop.time()
        worker.silent = silent
        if worker.bus is not None:
            worker.bus.frozen = silent

    # Processes nobody wants.

    async def _leftovers(self) -> None:
        """The idle one ends, the busy one when its request has ended; neither ever answers."""
        known = await self._models()
        machines = [worker for worker in self._workers() if worker.process_host is not None and worker.bus is not None]
        pairs = [(model, worker) for model in known for worker in machines if has_backend(worker, model)]
        if not pairs:
            return
        model, worker = self._chance.choice(pairs)
        add_leftover(self._simulation, worker, model, FOREIGN, replica=6, takes_s=0.0)
        busy = add_leftover(self._simulation, worker, model, FOREIGN, replica=7, takes_s=240.0)
        await asyncio.sleep(230)
        if busy.process_id not in worker.disk.processes:
            self._simulation.failed(f"the leftover {busy.process_id} was busy, and is gone")

    # Models that exclude each other.

    async def _group_added(self) -> None:
        """Two that run on one machine are given a common group. One of them leaves: `replica_truth.not_parted` says at
        rest whether it has."""
        people = ModelPeople(self._simulation, self._chance)
        known = {row.id: row for row in await self._models()}
        for worker in self._workers():
            there = sorted({process.order.model for process in worker.disk.processes.values()} & known.keys())
            if len(there) < 2:
                continue
            for name in self._chance.sample(there, 2):
                definition = {**known[name].definition, "concurrency_groups": ["of-the-trial"]}
                await people.says(partial(people.put, known=definition))
            await asyncio.sleep(120)
            return

    # Cancelled work.

    async def _install_cancelled(self) -> None:
        """The machine stops what it is at, though nobody but the person who cancelled says a word."""
        healthy = [worker for worker in self._workers() if worker.protocol and self._is_healthy(worker)]
        free = [(one, name) for one in healthy for name in BACKENDS if name not in one.disk.installed]
        controller = self._simulation.some_controller()
        if not free or controller is None:
            return
        worker, backend = self._chance.choice(free)
        before, self._simulation.luck.takes_s = self._simulation.luck.takes_s, (400.0, 500.0)
        request = parse_request(
            OperationKind.INSTALL, BackendRequest(backend), scope=Scope(ScopeKind.NODE, worker.node_id)
        )
        operations = controller.backends.operations
        try:
            accepted = await controller.asked(lambda: operations.accept(request))
            self._simulation.accepted[accepted.operation_id] = "install"
            await asyncio.sleep(20)
            begun = accepted.operation_id in worker.orders_under_way()
            await controller.asked(lambda: operations.cancel(accepted.operation_id))
        except (Died, CorralError) as error:
            self._simulation.note("trial", "ends early", str(error))
            return
        finally:
            self._simulation.luck.takes_s = before
        await asyncio.sleep(60)
        if begun and accepted.operation_id in worker.orders_under_way():
            self._simulation.failed(f"{worker.name} goes on with {backend}, which was cancelled a minute ago")

    # What there is.

    def _workers(self) -> list[Worker]:
        return [worker for _, worker in sorted(self._simulation.workers.items()) if not worker.deleted]

    def _is_healthy(self, worker: Worker) -> bool:
        row = self._simulation.node_row(worker.node_id)
        return row is not None and row.status == "healthy"

    def _is_offline(self, worker: Worker) -> bool:
        row = self._simulation.node_row(worker.node_id)
        return row is not None and row.status == "offline"

    async def _view(self) -> tuple[ViewReplica, ...]:
        async with self._simulation.store.read() as tx:
            return (await read_routing(tx))[0]

    async def _models(self) -> list[StoredModel]:
        async with self._simulation.store.read() as tx:
            return await models.list_(tx)
