"""Files on their way to workers, in one process: real downloads, stores, trackers and announcements, without sockets.

    simulate_transfers(seed, folder)       # raises Broken, with the seed and what went before

People stage models, processes read them, people delete them and clean up. Meanwhile workers send wrong data, stall and
disconnect, workers and controllers are killed between any two steps, machines lose power, disks are full. Then all
faults end, and every file that somebody staged must arrive. At all times a file counts only when its hash is right, a
file that a process reads stays, and nobody honest is banned. Chunks have some bytes here, and time jumps.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast
from unittest import mock

from corral.blobs.swarm.chunk_file import ChunkFile
from corral.blobs.swarm.planner import PlanLimits
from corral.kit.errors import CorralError
from corral.worker.files import blob_exchange as exchange_module
from corral.worker.files import fleet_blobs as fleet_module
from corral.worker.files import served_blobs as served_module
from tests.simulation.census import Census
from tests.simulation.simulation import Broken
from tests.simulation.transfer_machines import (
    CHUNK,
    Conduct,
    Server,
    SimulatedController,
    SimulatedSource,
    SimulatedWorker,
    Weights,
)
from tests.simulation.virtual_time import VirtualClock, VirtualLoop

TROUBLE_S = 40.0
REST_S = 240.0
LOOK_S = 0.5
SHOWN = 60
LIMITS = PlanLimits(fallback_s=2.0)
_CLEAN_UP, _ORDER = "clean up", "stage"


class InlineLoop(VirtualLoop):
    """Work of threads is done at once; its caller learns it a moment later, so that a kill can come in between."""

    chance: Random

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = self.create_future()
        try:
            result, error = func(*args), None
        except Exception as failure:
            result, error = None, failure

        def settle() -> None:
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(result)

        self.call_later(self.chance.choice((0.0, 0.001, 0.05)), settle)
        return done


class Transfers:
    """The world: controllers, workers, files, and what people asked for. `run` is a story of trouble."""

    slots = 3  # uploads at a time of a worker
    limits = LIMITS

    def __init__(self, seed: int, loop: InlineLoop, folder: Path) -> None:
        self.chance = Random(f"transfers {seed}")
        loop.chance = Random(f"threads {seed}")
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.folder = folder
        self.boot_id = folder / "boot_id"
        self.boot_id.write_text("boot")
        self.trace: deque[str] = deque(maxlen=SHOWN)
        self.faults: list[str] = []
        self.census = Census()
        self.liars: set[str] = set()
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in order, so that a seed replays
        self.weights = {each.model: each for each in self.choose_weights()}
        self.by_digest = {each.digest: each for each in self.weights.values()}
        self.controllers = {f"controller-{n}": SimulatedController(self, f"controller-{n}") for n in (1, 2)}
        for controller in self.controllers.values():
            controller.blobs = {digest for digest in self.by_digest if self.chance.random() < 0.8}
        next(iter(self.controllers.values())).blobs = set(self.by_digest)
        self.workers: dict[str, SimulatedWorker] = {}
        for number in range(self.count_workers()):
            self.workers[f"w{number}"] = SimulatedWorker(self, f"w{number}")
        self.servers: dict[str, Server] = {**self.controllers, **self.workers}
        self.open_orders: set[tuple[str, str]] = set()  # worker and model

    def choose_weights(self) -> list[Weights]:
        sizes = (0, 1, CHUNK, 12 * CHUNK + 7, 30 * CHUNK, 60 * CHUNK)
        found = [
            Weights(f"m{number}", self.chance.randbytes(self.chance.choice(sizes)))
            for number in range(self.chance.randint(1, 3))
        ]
        if self.chance.random() < 0.5:  # two models that share a file
            found.append(Weights("twin", found[0].content))
        return found

    def count_workers(self) -> int:
        return self.chance.randint(2, 5)

    # As ActiveNodes

    def credential(self, _node_id: str) -> str:
        return "credential"

    def is_current(self, _node_id: str, _credential: str) -> bool:
        return True

    # What the parts need

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self.failed(f"unexpected: {task.exception()!r}")

    async def send(
        self, server: Server, _receiver: SimulatedWorker, count: int, on_bytes: Callable[[int], None]
    ) -> None:
        """As long as this takes."""
        for part in (count // 2, count - count // 2):
            await asyncio.sleep(server.conduct.slow_s / 2 * self.chance.uniform(0.5, 1.5))
            on_bytes(part)

    def note(self, *what: object) -> None:
        self.trace.append(f"{self.loop.time():8.3f}  {' '.join(map(str, what))}")

    def failed(self, why: str) -> None:
        self.note("BROKEN", why)
        self.faults.append(why)

    # The story

    async def run(self) -> None:
        for name in self.workers:
            for model in self.weights:
                if self.chance.random() < 0.8:
                    self.order(name, model)
        ends_s = self.loop.time() + TROUBLE_S
        while self.loop.time() < ends_s:
            await asyncio.sleep(self.chance.expovariate(1.0))
            self.trouble()
            self.check()
        self.heal()
        ends_s = self.loop.time() + REST_S
        while self.open_orders and self.loop.time() < ends_s:
            await asyncio.sleep(LOOK_S)
            self.check()
        for name, model in sorted(self.open_orders):
            self.failed(f"{model} was staged to {name} and never arrived")
        self.check()

    def order(self, name: str, model: str) -> None:
        """Until it is done: a controller sends an order again as long as its outcome is not known."""
        key = name, model
        if key in self.open_orders:
            return
        self.open_orders.add(key)
        self.spawn(self._order(self.workers[name], self.weights[model]))

    async def _order(self, worker: SimulatedWorker, weights: Weights) -> None:
        while True:
            running = worker.spawn(self._stage_once(worker, weights))
            await asyncio.wait([running])
            if not running.cancelled() and running.exception() is None and running.result():
                self.open_orders.discard((worker.name, weights.model))
                return
            await asyncio.sleep(self.chance.uniform(0.5, 2.0))

    async def _stage_once(self, worker: SimulatedWorker, weights: Weights) -> bool:
        try:
            await worker.stage(weights)
        except CorralError as error:
            self.note(worker.name, "fails", weights.model, error.message)
            return False
        self.note(worker.name, "has", weights.model)
        return True

    def trouble(self) -> None:
        worker = self.chance.choice(list(self.workers.values()))
        controller = self.chance.choice(list(self.controllers.values()))
        happens: dict[str, tuple[int, Callable[[], None]]] = {
            "worker killed": (4, lambda: worker.kill(loses_power=False)),
            "machine lost power": (2, lambda: worker.kill(loses_power=True)),
            "controller killed": (2, lambda: self.die(controller)),
            "peer misbehaves": (6, lambda: self.misbehave(worker)),
            _CLEAN_UP: (3, lambda: self.clean_up(worker)),
            "disk full": (1, lambda: self.fill_disk(worker)),
            _ORDER: (4, lambda: self.order(worker.name, self.chance.choice(list(self.weights)))),
        }
        kind = self.chance.choices(list(happens), [weight for weight, _ in happens.values()])[0]
        counted = self.census.requests if kind in (_CLEAN_UP, _ORDER) else self.census.faults
        counted[kind] += 1
        happens[kind][1]()

    def die(self, controller: SimulatedController) -> None:
        self.note(controller.name, "dies")
        controller.conduct = Conduct(is_away=True)

        def back() -> None:
            controller.conduct = Conduct()
            controller.restart()

        self.loop.call_later(self.chance.uniform(0.5, 15.0), back)

    def misbehave(self, worker: SimulatedWorker) -> None:
        kinds = (
            Conduct(lies=True),
            Conduct(stalls=True),
            Conduct(breaks=0.7),
            Conduct(slow_s=3.0),
            Conduct(is_away=True),
            Conduct(),
        )
        worker.conduct = self.chance.choice(kinds)
        self.note(worker.name, worker.conduct)

    def fill_disk(self, worker: SimulatedWorker) -> None:
        self.note(worker.name, "disk is full")
        worker.disk_is_full = True

        def free() -> None:
            worker.disk_is_full = False

        self.loop.call_later(self.chance.uniform(1.0, 10.0), free)

    def clean_up(self, worker: SimulatedWorker) -> None:
        """Processes end, and everything that nothing needs any more is removed, while transfers run."""
        for model in list(worker.reading):
            if self.chance.random() < 0.5:
                del worker.reading[model]
        self.note(worker.name, "cleans up; in use:", *worker.reading)
        files = worker.files
        keep = list(worker.reading)
        work = self.chance.choice((files.sweep, files.tidy, lambda: files.collect(keep), lambda: files.keep_only(keep)))
        worker.spawn(cast(Coroutine[Any, Any, Any], work()))

    def heal(self) -> None:
        self.note("all faults end")
        for server in self.servers.values():
            server.conduct = Conduct()
        for worker in self.workers.values():
            worker.disk_is_full = False

    def check(self) -> None:
        self.census.checked_states += 1
        self.census.simulated_s = self.loop.time()
        self.census.node_s = self.loop.time() * len(self.workers)
        for worker in self.workers.values():
            worker.check()
        if self.faults:
            raise Broken(self.faults[0])

    async def leave(self) -> None:
        while self.tasks:
            for task in list(self.tasks):
                task.cancel()
            await asyncio.wait(list(self.tasks))


W = TypeVar("W", bound=Transfers)


def simulate_transfers(seed: int, folder: Path) -> Transfers:
    return simulate_world(lambda loop: Transfers(seed, loop, folder), folder)


def simulate_world(build: Callable[[InlineLoop], W], folder: Path) -> W:
    loop = InlineLoop()
    try:
        with _small_chunks(folder / "boot_id"):
            world: W | None = None

            async def story() -> None:
                nonlocal world
                world = build(loop)
                try:
                    await world.run()
                finally:
                    await world.leave()

            try:
                loop.run_until_complete(story())
            except Broken as error:
                assert world is not None
                raise Broken(f"{error}\n\n" + "\n".join(world.trace)) from error
            assert world is not None
            return world
    finally:
        loop.close()


@contextlib.contextmanager
def _small_chunks(boot_id: Path) -> Iterator[None]:
    defaults = ChunkFile.__init__.__kwdefaults__ or {}
    with (
        mock.patch.object(fleet_module, "HttpSource", new=SimulatedSource),
        mock.patch.object(exchange_module, "HttpSource", new=SimulatedSource),
        mock.patch.object(served_module, "CHUNK_BYTES", new=CHUNK),
        mock.patch.object(random, "randrange", new=Random("downloads").randrange),
        mock.patch.dict(defaults, {"boot_id": boot_id}),
    ):
        yield
