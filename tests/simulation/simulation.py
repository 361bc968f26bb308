"""Several controllers and many workers in one process, on a bus that loses things and a database that goes away.

    run = simulate(seed)       # raises Broken, with the seed and what went before

For some minutes people install, upgrade, roll back, delete, cancel and withdraw while everything that can fail does.
The invariants are checked after every commit. Then all faults end, and everything that was accepted must come to its
end, and the machines must be as the rules say. No thread, no wall clock, no chance but the seed's: the same seed is the
same run, event by event.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import random
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock
from zlib import crc32

import structlog

from corral.bus.local import Faults, LocalBus, LocalHub
from corral.contract.messages.nodes import HttpHeartbeat, NodeStatus
from corral.controller.registry.transitions import NodeEvent
from corral.kit.errors import Unavailable
from corral.store.engine.inline_sqlite import InlineFile, StepHook
from corral.store.engine.transactions import Store
from corral.store.tables import node_labels, node_tombstones, nodes, revisions
from corral.store.tables.nodes import Node
from tests.simulation import at_rest
from tests.simulation.catalogue import SimulatedFiles, SimulatedPackages
from tests.simulation.census import Census
from tests.simulation.controllers import GUARD, STALE_AFTER_S, Controller, Died, StoreLuck
from tests.simulation.facts import FactsReader, Lately, at_once
from tests.simulation.galleries import Galleries
from tests.simulation.processes import BUSY_IS_KNOWN_S
from tests.simulation.real_orders import disks_without_threads
from tests.simulation.releases import ReleaseWorld
from tests.simulation.replica_truth import ReplicaTruth
from tests.simulation.upgrades import versions_without_files
from tests.simulation.virtual_time import VirtualClock, VirtualLoop
from tests.simulation.workers import CorralWorker, LocalAIWorker, Luck, Worker
from tests.support import invariants
from tests.support.invariants import Facts, TakenOut
from tests.support.replica_invariants import Key

_SHOWN = 60  # lines of the trace in a failure
_WINDOW = timedelta(seconds=STALE_AFTER_S)


@dataclass(frozen=True)
class Plan:
    """How one run goes."""

    chaos_s: float = 480.0
    rest_s: float = 2400.0  # within so long all must have come to rest, once nothing fails any more


class Broken(AssertionError):
    """Something that must always hold does not."""


class Simulation:
    def __init__(self, seed: int, loop: VirtualLoop, database: Path, plan: Plan) -> None:
        self.seed = seed
        self.plan = plan
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.trace: list[tuple[Any, ...]] = []
        self.faults: list[str] = []  # what was found wrong
        self.census = Census()
        self.luck = Luck()
        self.store_luck = StoreLuck(self.chance("store"))
        self.catalogue = Galleries(self.chance("shelf"))
        self.files = SimulatedFiles(self.chance("files"))
        self.packages = SimulatedPackages(self.chance("packages"))
        self.hub = _Hub(self, seed)
        self.controllers: dict[str, Controller | None] = {}
        self.workers: dict[str, Worker] = {}
        self.accepted: dict[str, str] = {}  # operations that somebody was told are accepted
        self.asked: set[str] = set()  # models somebody asked for, and was told that they will be loaded
        self.truth = at_rest.Truth(self.clock)
        self._database = InlineFile(database, now_us=self.clock.now_us, on_commit=self._committed)
        self._facts = FactsReader(self._database)
        self._replicas = ReplicaTruth(self._database, loop.time, self._is_surely_busy)
        self.bus_trouble_at = float("-inf")  # when a connection to the bus was last lost, silent or found again
        self.has_trial = False  # see trials.py
        self.releases: ReleaseWorld | None = None  # see releases.py
        self._seen = Facts()
        self._lately = Lately(loop.time, self._seen)
        self._taken_out: list[TakenOut] = []
        self._running: dict[str, asyncio.Task[None]] = {}
        self._healed = False
        self.is_leaving = False  # the run ends: nobody comes back, and nobody waits for anybody
        self._lives = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._http = self.chance("http")
        self.store = self._database.store()  # the simulation's own look, nothing comes between

    # What the parts may ask of us.

    def chance(self, what: str) -> Random:
        return Random(f"{self.seed} {what}")

    def note(self, *what: object) -> None:
        self.trace.append((round(self.loop.time(), 6), *what))

    def failed(self, why: str) -> None:
        self.note("BROKEN", why)
        self.faults.append(why)

    def clock_of(self, name: str) -> VirtualClock:
        return VirtualClock(self.loop, wrong_by_s=self.chance(f"clock of {name}").uniform(-20, 20))

    def join_bus(self, name: str) -> LocalBus:
        return self.hub.join(name)

    def open_store(self, between: StepHook) -> Store:
        return self._database.store(between)

    def controller_dies(self, controller: Controller) -> None:
        self.kill_controller(controller.name)

    def dies(self, worker: Worker) -> None:
        self.note(worker.name, "dies at work")
        self.kill_worker(worker.name, self.chance(f"{worker.name} {worker.starts}").uniform(1, 30))

    def replaces(self, worker: Worker, after_s: float) -> None:
        self.kill_worker(worker.name, after_s, fault="")

    def is_release(self, wheel: str) -> bool:
        return self.releases is not None and self.releases.is_release(wheel)

    def quality_of(self, wheel: str, worker: Worker) -> str:
        return self.releases.quality_of(wheel, worker) if self.releases is not None else ""

    def changed(self, worker: Worker, name: str) -> None:
        self.truth.changed(worker, name)

    async def register(self, worker: Worker) -> bool:
        controller = self.some_controller()
        if controller is None:
            raise Unavailable("no controller answers")
        try:
            return bool(await controller.asked(lambda: self._register(controller, worker)))
        except Died as error:
            raise Unavailable("the controller is gone") from error

    def http_beat(self, worker: Worker, beat: HttpHeartbeat) -> None:
        controller = self.some_controller()
        if controller is not None and not worker.silent:
            controller.heartbeats.receive_http(worker.node_id, beat)

    def is_load_known(self) -> bool:
        """Whether what ingresses have told for a minute has arrived wherever somebody listened."""
        return self.hub.faults.drop == 0 and self.loop.time() - self.bus_trouble_at > BUSY_IS_KNOWN_S

    def _is_surely_busy(self, node_id: str, process_id: str) -> bool:
        worker = next((one for one in self.workers.values() if one.node_id == node_id), None)
        process_host = worker.process_host if worker is not None and worker.bus is not None else None
        return (
            process_host is not None and self.is_load_known() and process_host.busy_for_s(process_id) > BUSY_IS_KNOWN_S
        )

    def evicted_for(self, wanted: Collection[str], since: float) -> set[Key]:
        """Replicas that had to make room, from then on, for one of these models."""
        return self._replicas.evicted_for(wanted, since)

    def node_row(self, node_id: str) -> Node | None:
        return at_once(self._node_row(node_id))

    def last_heartbeats(self) -> dict[str, datetime | None]:
        return at_once(self._last_heartbeats())

    async def _last_heartbeats(self) -> dict[str, datetime | None]:
        async with self.store.read() as tx:
            return {row.id: row.last_heartbeat for row in await nodes.list_pulses(tx)}

    async def _node_row(self, node_id: str) -> Node | None:
        async with self.store.read() as tx:
            return await nodes.find(tx, node_id)

    # What happens to them.

    def some_controller(self) -> Controller | None:
        alive = [one for one in self.controllers.values() if one is not None and one.alive]
        return self._http.choice(alive) if alive else None

    def start_controller(self, name: str) -> None:
        if self.controllers.get(name) is None:
            self.note(name, "starts")
            self.controllers[name] = Controller(self, name, next(self._lives))

    def kill_controller(self, name: str) -> None:
        controller = self.controllers.get(name)
        if controller is not None:
            self.note(name, "is killed")
            self._count_fault("controller killed")
            self.controllers[name] = None
            controller.end()
            self.spawn(controller.bury())

    def add_worker(self, worker: Worker) -> None:
        self.workers[worker.name] = worker
        self.start_worker(worker.name)

    def start_worker(self, name: str) -> None:
        if name not in self._running and not self.workers[name].deleted:
            self.note(name, "starts")
            self.census.node_started(name, self.loop.time())
            self._running[name] = self.spawn(self.workers[name].run())

    def reboot(self, name: str, again_after_s: float) -> None:
        """The machine, with all that runs on it."""
        self.note(name, "loses power")
        self._count_fault("machine lost power")
        self.kill_worker(name, again_after_s)
        self.workers[name].disk.processes.clear()
        versions = self.workers[name].disk.versions
        if versions is not None and versions.loses_power():
            self._count_fault("machine lost power while a release was built or tried")

    def kill_worker(self, name: str, again_after_s: float | None = None, *, fault: str = "worker killed") -> None:
        task = self._running.pop(name, None)
        if task is not None:
            self.note(name, "is killed")
            if fault:
                self._count_fault(fault)
            self.census.node_stopped(name, self.loop.time())
            worker = self.workers[name]
            if worker.bus is not None:
                worker.bus.frozen = True
            if worker.process_host is not None:
                worker.process_host.die()
            task.cancel()
        if again_after_s is not None:
            self.later(again_after_s, lambda: self.start_worker(name))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _count_fault(self, kind: str) -> None:
        if not self.is_leaving:
            self.census.faults[kind] += 1

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failed(f"unexpected: {task.exception()!r}")

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self.loop.call_later(seconds, lambda: None if self.is_leaving else what())

    def while_failing(self, seconds: float, what: Callable[[], None]) -> None:
        """The next step or the end of one fault. `heal` ends every fault at once: a timer of the time of trouble that
        fired after it would break a connection at rest, or undo the outage of a trial."""
        self.later(seconds, lambda: None if self._healed else what())

    def buses(self) -> list[LocalBus]:
        found = [one.bus for one in self.controllers.values() if one is not None]
        return found + [worker.bus for worker in self.workers.values() if worker.bus is not None]

    # Registration, as the controller's node API leaves it.

    async def _register(self, controller: Controller, worker: Worker) -> bool:
        async with controller.store.write() as tx:
            now = await tx.now()
            told = {"boot_id": worker.boot_id if worker.protocol else "", "last_heartbeat": now, "bus_down": False}
            known = await nodes.find(tx, worker.node_id)
            if known is not None:
                await controller.changes.apply_in(tx, known, NodeEvent.REGISTERED, told)
            elif await node_tombstones.find(tx, worker.node_id) is not None:
                return False
            else:
                columns: dict[str, Any] = {
                    "created_at": now,
                    "updated_at": now,
                    "status_changed_at": now,
                    "status": "healthy",
                    "approved": True,
                    "protocol": worker.protocol,
                    "os": "linux",
                    "arch": "amd64",
                    "capability": "default",
                    "total_disk": 1 << 40,
                    "available_disk": 1 << 40,
                    "ingress_url": f"http://{worker.name}.test:50050",
                }
                labels = worker.known.get("labels", {})
                known_columns = {name: value for name, value in worker.known.items() if name != "labels"}
                await nodes.insert(tx, Node(worker.node_id, worker.name, **(columns | told | known_columns)))
                await node_labels.merge(tx, worker.node_id, labels, origin="worker")
            await revisions.bump(tx, "nodes")
        controller.changes.notify(worker.node_id)
        return True

    # Watching.

    def _committed(self, tables: frozenset[str]) -> None:
        self.note("commit", *sorted(tables))
        self.census.commits += 1
        if self.store_luck.doubt in tables:
            self.store_luck.doubt, self.store_luck.in_doubt = "", True
        for why in self._replicas.breaches(tables):
            self.failed(why)
        if tables.isdisjoint(FactsReader.TABLES):
            return
        self.census.checked_states += 1
        before, after = self._seen, self._facts.read(self._seen, tables)
        self._seen = after
        for why in (*invariants.broken(before, after), *invariants.ordered_in_vain(self._lately.until_now(), after)):
            self.failed(why)
        self._lately.add(after)
        for why in self.truth.unproven(before, after):
            self.failed(why)
        if self.releases is not None:
            for why in self.releases.breaches(before, after):
                self.failed(why)
        fallen = invariants.taken_out(before, after, self.clock.now(), _WINDOW)
        if fallen:
            self._taken_out = [*invariants.still_out(self._taken_out, after), *fallen]
            for why in invariants.too_many_taken_out(self._taken_out, GUARD, _WINDOW):
                self.failed(why)
        for id in self.accepted:
            if id not in after.operations:
                self.failed(f"the operation {id} was accepted and is not on file")

    @property
    def facts(self) -> Facts:
        return self._seen

    async def run(self, chaos: Callable[[Simulation], Coroutine[Any, Any, None]]) -> None:
        """The whole story: a time of trouble, then all must come to rest."""
        try:
            await self._until_broken(chaos(self))
            self.heal()
            await self._until_broken(at_rest.comes_to_rest(self))
        finally:
            await self._leave()
        if self.faults:
            raise Broken(self.faults[0])

    async def _until_broken(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=5.0)
                if self.faults:
                    raise Broken(self.faults[0])
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self.faults:
            raise Broken(self.faults[0])

    def heal(self) -> None:
        """From here on nothing fails any more."""
        self.note("all faults end")
        self._healed = True
        self.bus_trouble_at = self.loop.time()
        self.hub.faults = Faults()
        self.luck.fails = self.luck.dies = self.luck.slow = 0.0
        self.store_luck.away = False
        self.store_luck.fails = self.store_luck.dies = 0.0
        self.catalogue.away = self.files.away = False
        self.files.fails = self.packages.fails = 0.0
        for bus in self.buses():
            if bus.frozen:  # what was sent meanwhile is lost, so it never just goes on: it is found silent and replaced
                bus.lose_connection("found silent")
            bus.restore_connection()
        for name, controller in list(self.controllers.items()):
            if controller is None:
                self.start_controller(name)
            else:
                controller.store_away = False
        for name, worker in self.workers.items():
            worker.others_bytes = 0
            if name not in self._running:
                self.start_worker(name)

    async def _leave(self) -> None:
        self.is_leaving = True  # nobody who is dead by now comes back
        self.census.simulated_s = self.loop.time()
        self.census.faults["message lost"] = self.hub.dropped
        self.census.faults["message doubled"] = self.hub.duplicated
        for name in list(self.controllers):
            self.kill_controller(name)
        for name in list(self._running):
            self.kill_worker(name)
        for worker in self.workers.values():
            if worker.disk.versions is not None:
                worker.disk.versions.loses_power()
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            await asyncio.wait(left, timeout=0)
        for task in sorted((task for task in left if not task.done()), key=lambda task: task.get_name()):
            self.faults.append(f"left behind: {task!r}")
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._database.close()

    def digest(self) -> str:
        """Of everything that happened."""
        return hashlib.blake2b(repr(self.trace).encode(), digest_size=16).hexdigest()

    def story(self, lines: int = _SHOWN) -> str:
        told = [one for one in self.trace if one[1] != "commit"]
        return "\n".join(" ".join(str(word) for word in one) for one in told[-lines:])

    async def statuses(self) -> dict[str, str]:
        async with self.store.read() as tx:
            return {row.id: NodeStatus(row.status) for row in await nodes.list_outlines(tx)}


class _Hub(LocalHub):
    """Writes down what goes over the bus."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        super().__init__(simulation.clock, seed=seed)
        self._simulation = simulation

    def route(self, sender: LocalBus, subject: str, payload: bytes, reply: str) -> None:
        if not subject.endswith(".heartbeat"):
            self._simulation.note(sender.name, "says", subject, crc32(payload), "unheard" if sender.frozen else "")
        super().route(sender, subject, payload, reply)


@contextlib.contextmanager
def _only_seeded_chance(seed: int) -> Iterator[None]:
    """Ids and jitter too."""
    source = Random(f"{seed} ids")

    def next_id() -> uuid.UUID:
        return uuid.UUID(int=source.getrandbits(128), version=4)

    before = random.getstate()
    random.seed(seed)
    try:
        with mock.patch.object(uuid, "uuid4", new=next_id):
            yield
    finally:
        random.setstate(before)


@contextlib.contextmanager
def _log_of(simulation: Simulation, *, verbose: bool) -> Iterator[None]:
    """Nothing is printed; what nobody expected breaks the run."""
    before = structlog.get_config()

    def hear(_logger: object, method: str, event: Any) -> str:
        if event.get("exc_info"):
            error = event["exc_info"]
            simulation.failed(f"{event['event']}: {error!r}")
            import traceback

            simulation.note(traceback.format_exc())
        elif verbose:
            simulation.note("log", *(f"{key}={value}" for key, value in event.items()))
        raise structlog.DropEvent

    structlog.configure(
        processors=[hear],
        wrapper_class=structlog.make_filtering_bound_logger(10 if verbose else 40),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def simulate(
    seed: int,
    template: Path,
    *,
    chaos: Callable[[Simulation], Coroutine[Any, Any, None]],
    plan: Plan | None = None,
    verbose: bool = False,
) -> Simulation:
    """`template`: a database with the schema and nothing in it."""
    with tempfile.TemporaryDirectory(prefix="corral-sim-") as folder, _only_seeded_chance(seed):
        database = Path(shutil.copy(template, Path(folder) / "corral.db"))
        loop = VirtualLoop()
        try:
            simulation = Simulation(seed, loop, database, plan or Plan())
            loop.set_exception_handler(lambda _, context: simulation.failed(f"unexpected: {context}"))
            with _log_of(simulation, verbose=verbose), disks_without_threads(), versions_without_files():
                try:
                    loop.run_until_complete(simulation.run(chaos))
                except Broken as error:
                    raise Broken(f"{error}\n\n{simulation.story()}") from error
            return simulation
        finally:
            loop.close()


__all__ = ["Broken", "CorralWorker", "LocalAIWorker", "Plan", "Simulation", "simulate"]
