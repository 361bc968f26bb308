"""Downloads a blob in chunks: sends the planner's requests, stores what arrives, and reports progress.

The caller offers sources and assignments while the download runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from corral.blobs.chunks import ChunkList
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import WrongDigest
from corral.blobs.swarm.chunk_file import ChunkFile, remove_chunk_file
from corral.blobs.swarm.chunk_set import ChunkSet, decode_chunks
from corral.blobs.swarm.planner import ChunkPlanner, ChunkRequest, PlanLimits, SourceKind
from corral.blobs.swarm.sources import ChunkSource, ReceivedChunk, SourceBusy
from corral.blobs.transfer.partial_file import OnBytes
from corral.blobs.transfer.remote import TransferBroken
from corral.kit.errors import CorralError, Denied, Failed, Invalid, NotFound, Unreachable
from corral.kit.log import get_log
from corral.kit.tasks import Wake, background
from corral.kit.threads import run_in_thread, run_uncancelled

log = get_log(__name__)

TICK_S = 0.2  # at most so long until a pause of a source or a slow request is noticed
SPACE_CHECK_CHUNKS = 16
REPORT_EVERY_S = 0.1  # between whole chunks


class SwarmDownload:
    """One blob. `run` once; the other methods are for the same event loop while it runs."""

    def __init__(
        self,
        digest: str,
        listed: ChunkList,
        path: Path,
        *,
        name: str,
        on_bytes: OnBytes,
        limits: PlanLimits | None = None,
        space: DiskSpace | None = None,
        seed: int = 0,
        monotonic: Callable[[], float] = time.monotonic,
        on_received: Callable[[SourceKind, int], None] = lambda _kind, _count: None,
        on_banned: Callable[[str], None] = lambda _source: None,
    ) -> None:
        """`on_bytes` gets the received and the total bytes, `on_received` the verified bytes of each chunk, and
        `on_banned` the name of a source that sent a wrong one."""
        self.digest = digest
        self.name = name
        self.file = ChunkFile(path, listed)
        self.received: Counter[str] = Counter()  # verified bytes by source
        self._limits = limits
        self._space = space or DiskSpace()
        self._seed = seed
        self._monotonic = monotonic
        self._on_bytes = on_bytes
        self._on_received = on_received
        self.on_chunk: Callable[[], None] = lambda: None  # called after each verified chunk
        self._on_banned = on_banned
        self._sources: dict[str, ChunkSource] = {}
        self._planner = ChunkPlanner(self.file.have, limits, seed=seed, now_s=monotonic())
        self._tasks: dict[ChunkRequest, asyncio.Task[None]] = {}
        self._arriving: Counter[ChunkRequest] = Counter()  # bytes of open requests
        self._wake = Wake()
        self._hash_wake = Wake()
        self._errors: dict[str, CorralError] = {}  # the last of each source
        self._fatal: BaseException | None = None
        self._reported_s = float("-inf")

    @property
    def have(self) -> ChunkSet:
        return self.file.have

    @property
    def needs_assignment(self) -> bool:
        return self._planner.needs_assignment

    def offer(self, source: ChunkSource, has: ChunkSet | None = None) -> None:
        """The source may be used; `has` None: for every chunk."""
        self._sources[source.name] = source
        self._planner.offer(source.name, source.kind, ChunkSet.complete(self.have.count) if has is None else has)
        self._wake.set()

    def keep_only_peers(self, names: Collection[str]) -> None:
        """Peers other than these are no longer offered."""
        for name, source in self._sources.items():
            if source.kind is SourceKind.PEER and name not in names:
                self._planner.withdraw(name)

    def assign(self, chunks: Iterable[int], *, is_unrestricted: bool) -> None:
        self._planner.assign(chunks, is_unrestricted=is_unrestricted)
        self._wake.set()

    async def run(self) -> str:
        """Until the file is complete and has its digest. Returns the digest.

        Raises Unreachable, NotFound or Denied when no source is left, NoSpace, WrongDigest when all chunks are right
        and the whole is not, OSError. Verified chunks stay on the disk."""
        try:
            await run_in_thread(self.file.open)
            self._space.require(self.file.path.parent, self.file.listed.size - self.file.have_bytes, self.name)
            self._restart_planner()
            self._report()
            while True:
                async with background(self._hash_beginning()):
                    await self._fetch_all()
                if await run_in_thread(self.file.finish) == self.digest:
                    return self.digest
                # The disk lost or changed bytes that were verified when they arrived, or the list is wrong.
                damaged = await run_in_thread(self.file.verify_again)
                log.warning("a complete download has another digest", digest=self.digest, damaged_chunks=damaged)
                if not damaged:
                    await run_uncancelled(self.discard)  # a retry with another list must not end the same way
                    raise WrongDigest(f"{self.name}: its chunk list does not describe {self.digest}")
                self._restart_planner()
        finally:
            self.file.close()

    def discard(self) -> None:
        """Remove the file. Blocking."""
        remove_chunk_file(self.file.path)

    def _restart_planner(self) -> None:
        self._planner.have = self.file.have

    async def _hash_beginning(self) -> None:
        while True:
            await self._hash_wake.wait(60.0)
            await run_in_thread(self.file.hash_beginning)

    async def _fetch_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                while not self._planner.is_complete:
                    self._start_requests(group)
                    await self._wake.wait(TICK_S)
                    if self._fatal is not None:
                        raise self._fatal
                    if self._planner.is_lost():
                        raise self._lost()
                for task in self._tasks.values():
                    task.cancel()
        except BaseExceptionGroup as group_error:
            # Requests handle their own errors, so the group has one error: that of the loop.
            raise group_error.exceptions[0] from None

    def _start_requests(self, group: asyncio.TaskGroup) -> None:
        while (request := self._planner.next_request(self._monotonic())) is not None:
            task = group.create_task(self._fetch_chunk(request), name=f"chunk {request.chunk} from {request.source}")
            self._tasks[request] = task

    async def _fetch_chunk(self, request: ChunkRequest) -> None:
        try:
            await self._receive(request)
        except asyncio.CancelledError:
            self._planner.on_cancelled(request)
            raise
        except SourceBusy as busy:
            self._planner.on_busy(request, self._monotonic(), wait_s=busy.wait_s)
        except TransferBroken as error:
            self._fail(request, Unreachable(str(error)))
        except NotFound as error:
            self._errors[request.source] = error
            if self._sources[request.source].kind is SourceKind.PEER:
                self._planner.on_missing(request)
            else:
                self._planner.on_failure(request, self._monotonic(), is_final=True)
        except (Denied, Failed, Invalid) as error:
            self._fail(request, error, is_final=isinstance(error, Denied))
        except Exception as error:  # the disk, or a defect: the loop raises it
            self._planner.on_cancelled(request)
            self._fatal = error
        finally:
            self._tasks.pop(request, None)
            self._arriving.pop(request, None)
            self._wake.set()

    def _fail(self, request: ChunkRequest, error: CorralError, *, is_final: bool = False) -> None:
        self._errors[request.source] = error
        log.info("a source failed", digest=self.digest, source=request.source, reason=error.message)
        self._planner.on_failure(request, self._monotonic(), is_final=is_final)

    async def _receive(self, request: ChunkRequest) -> None:
        source = self._sources[request.source]
        start, count = self.file.listed.span(request.chunk)

        def on_bytes(size: int) -> None:
            self._arriving[request] += size
            now_s = self._monotonic()
            self._planner.on_bytes(request, now_s)
            if now_s - self._reported_s >= REPORT_EVERY_S:  # pieces are many
                self._report()

        received = await source.read(start, count, on_bytes)
        if not await run_uncancelled(self.file.write, request.chunk, received.pieces):
            self._planner.on_wrong_chunk(request)
            self._errors[request.source] = WrongDigest(f"{request.source} sent a wrong chunk")
            log.warning("a source sent a wrong chunk and is banned", digest=self.digest, source=request.source)
            self._on_banned(request.source)
            return
        self._account(request, count, received)

    def _account(self, request: ChunkRequest, count: int, received: ReceivedChunk) -> None:
        self._arriving.pop(request, None)
        if request.chunk not in self._planner.have:
            self.received[request.source] += count
            self._on_received(self._sources[request.source].kind, count)
        for other in self._planner.on_chunk(request, self._monotonic()):
            if (task := self._tasks.get(other)) is not None:
                task.cancel()
        if received.peer_has and self._sources[request.source].kind is SourceKind.PEER:
            try:
                has = decode_chunks(received.peer_has, self.have.count)
                self._planner.offer(request.source, SourceKind.PEER, has)
            except Invalid as error:
                log.debug("a peer's list of chunks cannot be read", source=request.source, reason=error.message)
        if len(self._planner.have) % SPACE_CHECK_CHUNKS == 0:
            self._space.require(self.file.path.parent, 0, self.name)
        self._hash_wake.set()
        self._report()
        self.on_chunk()

    def _report(self) -> None:
        self._reported_s = self._monotonic()
        total = self.file.listed.size
        self._on_bytes(min(total, self.file.have_bytes + self._arriving.total()), total)

    def _lost(self) -> CorralError:
        """The error of a download without sources: that of a controller, if there is one."""
        by_kind = sorted(
            self._errors.items(), key=lambda each: self._sources[each[0]].kind is not SourceKind.CONTROLLER
        )
        if not by_kind:
            return NotFound(f"no source has {self.digest}")
        error = by_kind[0][1]
        return error if not isinstance(error, Unreachable) else Unreachable(f"{error.message}; tried repeatedly")
