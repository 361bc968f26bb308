"""Machines of the simulation of transfers: controllers and workers without sockets, and how they answer badly."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

import aiohttp

from corral.blobs.chunks import ChunkList
from corral.blobs.digests import digest_of
from corral.blobs.disk import DiskSpace
from corral.blobs.progress import Progress
from corral.blobs.swarm.planner import SourceKind
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
from corral.kit.errors import Denied, NotFound, Unreachable
from corral.kit.signing import Signer
from corral.worker.files.blob_exchange import PeerExchange
from corral.worker.files.cleanup import CleanupPolicy
from corral.worker.files.fleet_blobs import FleetBlobs, SourceToken
from corral.worker.files.model_files import WorkerFiles
from corral.worker.files.served_blobs import ServedBlobs
from corral.worker.ingress.blobs import BUSY_RETRY_S

if TYPE_CHECKING:
    from tests.simulation.transfers import Transfers

CHUNK = 64
AT_ONCE = CleanupPolicy(unused_s=0.0, partial_s=3600.0, fresh_s=0.0)
SIGNING_KEY = Signer.new_private_key()


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
