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
import hashlib
import os
import random
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast
from unittest import mock

import aiohttp

from corral.blobs.chunks import ChunkList
from corral.blobs.digests import digest_of
from corral.blobs.disk import DiskSpace
from corral.blobs.progress import Progress
from corral.blobs.swarm.chunk_file import ChunkFile
from corral.blobs.swarm.planner import PlanLimits, SourceKind
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.swarm.sources import ReceivedChunk, SourceBusy
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import TransferBroken
from corral.bus.api import Bus
from corral.contract.messages.blobs import AnnounceBlobs, BlobHints
from corral.contract.messages.replicas import ReplicaFile
from corral.controller.access.active_nodes import ActiveNodes
from corral.controller.access.signing import IngressTokens
from corral.controller.files.swarm.blob_peers import BlobPeers
from corral.controller.files.swarm.blob_tracker import BlobTracker
from corral.kit.errors import CorralError, Denied, NotFound, Unreachable
from corral.kit.signing import Signer
from corral.worker.files import blob_exchange as exchange_module
from corral.worker.files import fleet_blobs as fleet_module
from corral.worker.files import served_blobs as served_module
from corral.worker.files.blob_exchange import PeerExchange
from corral.worker.files.cleanup import CleanupPolicy
from corral.worker.files.fleet_blobs import FleetBlobs, SourceToken
from corral.worker.files.model_files import WorkerFiles
from corral.worker.files.served_blobs import ServedBlobs
from corral.worker.ingress.blobs import BUSY_RETRY_S
from tests.simulation.census import Census
from tests.simulation.simulation import Broken
from tests.simulation.virtual_time import VirtualClock, VirtualLoop

CHUNK = 64
TROUBLE_S = 40.0
REST_S = 240.0
LOOK_S = 0.5
SHOWN = 60
LIMITS = PlanLimits(fallback_s=2.0)
_CLEAN_UP, _ORDER = "clean up", "stage"
AT_ONCE = CleanupPolicy(unused_s=0.0, partial_s=3600.0, fresh_s=0.0)
SIGNING_KEY = Signer.new_private_key()


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


@dataclass(frozen=True)
class Weights:
    model: str
    content: bytes

    @property
    def digest(self) -> str:
        return digest_of(self.content)

    @property
    def file(self) -> ReplicaFile:
        return ReplicaFile(f"{self.model}/set/weights", self.digest, len(self.content))

    @property
    def listed(self) -> ChunkList:
        pieces = (self.content[at : at + CHUNK] for at in range(0, len(self.content), CHUNK))
        return ChunkList(len(self.content), CHUNK, tuple(map(digest_of, pieces)))


@dataclass
class Conduct:
    """How a machine answers requests for chunks."""

    is_away: bool = False
    lies: bool = False
    stalls: bool = False
    breaks: float = 0.0  # probability
    slow_s: float = 0.4  # per chunk


class SimulatedController:
    """Its blob listener, and what it knows of who has what: gone with the process."""

    def __init__(self, world: Transfers, name: str) -> None:
        self.world = world
        self.name = name
        self.conduct = Conduct()
        self.blobs: set[str] = set()
        self.sent = 0
        self.restart()

    def restart(self) -> None:
        world = self.world
        tokens = IngressTokens(Signer(SIGNING_KEY), world.clock)
        members = cast(ActiveNodes, world)
        self.peers = BlobPeers(
            BlobTracker(seed=world.chance.randrange(1000)), tokens, members, cast(Bus, None), world.clock
        )

    def read(self, digest: str, start: int, count: int) -> tuple[bytes, str]:
        if digest not in self.blobs:
            raise NotFound(f"{self.name} has no {digest}")
        self.sent += count
        return self.world.by_digest[digest].content[start : start + count], ""


class SimulatedWorker:
    def __init__(self, world: Transfers, name: str) -> None:
        self.world = world
        self.name = name
        self.conduct = Conduct()
        self.has_lied = False
        self.disk_is_full = False
        self.reading: dict[str, Weights] = {}  # by model: files of a running process
        self.lives = 0
        self.folder = world.folder / name / "0"
        self.folder.mkdir(parents=True)
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in order, so that a seed replays
        self.start()

    def start(self) -> None:
        clock = self.world.clock
        self.served = ServedBlobs(slots=self.world.slots)
        limit = RateLimit(0, clock)
        session = cast(aiohttp.ClientSession, self)  # SimulatedSource takes it for the one who asks
        self.exchange = PeerExchange(self.served, session, self._announce, clock, max_download=limit)
        space = DiskSpace(reserve_bytes=0, measure=lambda _folder: 0 if self.disk_is_full else 1 << 40)
        fleet = SimulatedFleetBlobs(session, exchange=self.exchange, limits=self.world.limits, clock=clock, space=space)
        fleet.world = self.world
        self.files = WorkerFiles(self.folder, fleet, clock, in_use=self.in_use, space=space, cleanup=AT_ONCE)
        self.spawn(self.exchange.run())

    def kill(self, *, loses_power: bool) -> None:
        """With -9: what is on the disk now is what the next life finds. The processes of models live on, unless the
        machine loses power."""
        self.lives += 1
        after = self.world.folder / self.name / str(self.lives)
        _copy_with_links(self.folder, after)
        for task in self.tasks:
            task.cancel()
        self.tasks = {}
        self.folder = after
        if loses_power:
            self.reading.clear()
            self.world.boot_id.write_text(f"boot {self.world.chance.random()}")
            for sparse in (after / ".blobs" / "incoming").glob("*.sparse"):
                _lose_bytes(sparse, self.world.chance)
        self.start()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.world.spawn(work)
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task

    def in_use(self) -> frozenset[Path]:
        return frozenset(self.folder / weights.file.path for weights in self.reading.values())

    async def stage(self, weights: Weights) -> None:
        """An order. Raises CorralError."""
        urls = tuple(f"http://{controller}" for controller in self.world.controllers)

        def on_progress(progress: Progress) -> None:
            for name in progress.banned:
                if name not in self.world.liars:
                    self.world.failed(f"{self.name} banned {name}, which never sent wrong data")

        with self.files.protect([weights.file]):
            await self.files.ensure([weights.file], urls, "token", on_progress)
            path = self.folder / weights.file.path
            if path.read_bytes() != weights.content:
                self.world.failed(f"{self.name} calls {weights.model} staged, and its bytes are wrong")
            if self.world.chance.random() < 0.5:
                self.reading[weights.model] = weights

    def read(self, digest: str, start: int, count: int) -> tuple[bytes, str]:
        """As the ingress answers another worker."""
        found = self.served.find(digest)
        if found is None or not found.covers(start, count):
            raise NotFound(f"{self.name} does not have these bytes")
        with found.path.open("rb") as file:
            file.seek(start)
            data = file.read(count)
        if self.conduct.lies:
            self.world.liars.add(self.name)
            return bytes(255 - byte for byte in data), ""
        return data, found.have.encode() if found.have is not None else ""

    def check(self) -> None:
        """A file that has its name has its content."""
        for path in self.folder.glob("*/set/weights"):
            known = self.world.weights.get(path.parts[-3])
            if known is None or path.read_bytes() != known.content:
                self.world.failed(f"{self.name} has wrong bytes at {path.parts[-3]}/set/weights")
        finished = self.folder / ".blobs" / "sha256"
        for path in finished.iterdir() if finished.is_dir() else ():
            if hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
                self.world.failed(f"{self.name} has a finished blob with wrong bytes")
        for weights in self.reading.values():
            if not (self.folder / weights.file.path).is_file():
                self.world.failed(f"{self.name} removed {weights.model}, which a process reads")

    async def _announce(self, message: AnnounceBlobs) -> BlobHints | None:
        await asyncio.sleep(self.world.chance.uniform(0.001, 0.05))
        up = [each for each in self.world.controllers.values() if not each.conduct.is_away]
        if not up:
            raise Unreachable("no controller answers")
        url = f"http://{self.name}"
        return self.world.chance.choice(up).peers.exchange(self.name, self.name, url, message)


Server = SimulatedController | SimulatedWorker


class SimulatedFleetBlobs(FleetBlobs):
    """Knows the chunk lists when a controller answers."""

    world: Transfers

    async def _find_chunk_list(self, urls: Sequence[str], token: SourceToken, wanted: ExpectedBlob) -> ChunkList | None:
        await asyncio.sleep(self.world.chance.uniform(0.001, 0.2))
        if all(each.conduct.is_away for each in self.world.controllers.values()):
            raise Unreachable("no controller answers")
        return self.world.by_digest[wanted.digest].listed


class SimulatedSource:
    """In the place of `HttpSource`."""

    def __init__(
        self,
        session: Any,
        name: str,
        kind: SourceKind,
        url: str,
        authorize: Callable[[bool], Awaitable[Mapping[str, str]]],
        _limit: RateLimit,
        **_tls: object,
    ) -> None:
        self.worker: SimulatedWorker = session
        self.name = name
        self.kind = kind
        self._server, self._digest = url.removeprefix("http://").split("/blobs/")
        self._authorize = authorize

    async def read(self, start: int, count: int, on_bytes: Callable[[int], None]) -> ReceivedChunk:
        world = self.worker.world
        if "Authorization" not in await self._authorize(False):
            raise Denied("no token")
        server = world.servers[self._server]
        with server.served.upload() if isinstance(server, SimulatedWorker) else contextlib.nullcontext(True) as is_free:
            if not is_free and not server.conduct.is_away:
                raise SourceBusy(BUSY_RETRY_S)
            return await self._read(server, start, count, on_bytes)

    async def _read(self, server: Server, start: int, count: int, on_bytes: Callable[[int], None]) -> ReceivedChunk:
        world = self.worker.world
        life = getattr(server, "lives", 0)
        conduct = server.conduct
        if conduct.is_away:
            raise TransferBroken(f"{self._server} cannot be reached")
        data, has = server.read(self._digest, start, count)
        if conduct.stalls:
            await asyncio.sleep(10.0)
            raise TransferBroken(f"{self._server} sends nothing")
        await world.send(server, self.worker, count, on_bytes)
        if conduct.is_away or life != getattr(server, "lives", 0) or world.chance.random() < conduct.breaks:
            raise TransferBroken(f"{self._server} closed the connection")
        return ReceivedChunk([data], has)


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


def _copy_with_links(source: Path, target: Path) -> None:
    """Files with several names have them afterwards too, and their times."""
    known: dict[int, Path] = {}
    for folder, _, names in os.walk(source):
        there = target / Path(folder).relative_to(source)
        there.mkdir(parents=True, exist_ok=True)
        for name in names:
            old, new = Path(folder) / name, there / name
            inode = old.stat().st_ino
            if inode in known:
                os.link(known[inode], new)
            else:
                shutil.copy2(old, new)
                known[inode] = new


def _lose_bytes(path: Path, chance: Random) -> None:
    """What the kernel had not written when the power went."""
    content = bytearray(path.read_bytes())
    for start in range(0, len(content), CHUNK):
        if chance.random() < 0.4:
            content[start : start + CHUNK] = bytes(len(content[start : start + CHUNK]))
    path.write_bytes(content)
