"""The driver with sources in memory that lie, stall, disconnect and die: a file counts only when its hash is right."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from corral.blobs.chunks import ChunkList, list_chunks
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace, WrongDigest
from corral.blobs.swarm.chunk_set import ChunkSet
from corral.blobs.swarm.download import SwarmDownload
from corral.blobs.swarm.planner import PlanLimits, SourceKind
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.swarm.sources import ReceivedChunk, SourceBusy
from corral.blobs.transfer.remote import TransferBroken
from corral.kit.clock import SystemClock
from corral.kit.errors import CorralError, Denied, NotFound, Unreachable

CHUNK = 1000
LIMITS = PlanLimits(first_pause_s=0.001, cap_pause_s=0.005, min_overtake_s=0.02, fallback_s=0.05)


@dataclass
class MemorySource:
    content: bytes
    name: str = "controller"
    kind: SourceKind = SourceKind.CONTROLLER
    act: Callable[[int], object] = lambda _start: None  # raises, returns other bytes, or returns None: serve
    wait_s: float = 0.0
    served: list[int] = field(default_factory=list)

    async def read(self, start: int, count: int, on_bytes: Callable[[int], None]) -> ReceivedChunk:
        await asyncio.sleep(self.wait_s)
        acted = self.act(start)
        data = acted if isinstance(acted, bytes) else self.content[start : start + count]
        on_bytes(len(data))
        self.served.append(start // CHUNK)
        return ReceivedChunk([data[:100], data[100:]])


@dataclass
class Case:
    content: bytes
    listed: ChunkList
    path: Path
    banned: list[str] = field(default_factory=list)
    seen: list[tuple[int, int]] = field(default_factory=list)

    def download(self, *sources: MemorySource, seed: int = 0, space: DiskSpace | None = None) -> SwarmDownload:
        digest = "sha256:" + hashlib.sha256(self.content).hexdigest()
        made = SwarmDownload(
            digest,
            self.listed,
            self.path,
            name="weights",
            on_bytes=lambda have, total: self.seen.append((have, total)),
            limits=LIMITS,
            seed=seed,
            space=space or DiskSpace(reserve_bytes=0),
            on_banned=self.banned.append,
        )
        for source in sources:
            made.offer(source)
        return made


@pytest.fixture
def case(tmp_path: Path) -> Case:
    content = os.urandom(20 * CHUNK + 1)
    whole = tmp_path / "whole"
    whole.write_bytes(content)
    return Case(content, list_chunks(whole, chunk_bytes=CHUNK), tmp_path / "x.sparse")


def peer(
    case: Case, name: str, act: Callable[[int], object] = lambda _start: None, wait_s: float = 0.0
) -> MemorySource:
    return MemorySource(case.content, name, SourceKind.PEER, act, wait_s)


async def test_a_file_from_the_controller_alone(case: Case) -> None:
    download = case.download(MemorySource(case.content))
    await download.run()
    assert case.path.read_bytes() == case.content
    assert download.received == {"controller": len(case.content)}
    assert case.seen[-1] == (len(case.content), len(case.content))


async def test_a_peer_that_sends_wrong_bytes_is_banned_and_named(case: Case) -> None:
    liar, honest = peer(case, "liar", lambda _start: b"x" * CHUNK), peer(case, "honest")
    download = case.download(MemorySource(case.content), liar, honest)
    download.assign([], is_unrestricted=False)
    await download.run()
    assert case.path.read_bytes() == case.content
    assert case.banned[0] == "liar"
    assert "liar" not in download.received
    assert len(liar.served) <= LIMITS.per_peer


async def test_a_stalled_peer_is_overtaken(case: Case) -> None:
    stalled = peer(case, "stalled", wait_s=60.0)
    download = case.download(MemorySource(case.content), stalled, peer(case, "fast"))
    async with asyncio.timeout(10):
        await download.run()
    assert case.path.read_bytes() == case.content
    assert stalled.served == []


async def test_all_peers_gone_falls_back_to_the_controller(case: Case) -> None:
    def gone(_start: int) -> object:
        raise TransferBroken("disconnected")

    download = case.download(MemorySource(case.content), peer(case, "a", gone), peer(case, "b", gone))
    download.assign([], is_unrestricted=False)
    async with asyncio.timeout(10):
        await download.run()
    assert download.received == {"controller": len(case.content)}


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TransferBroken("no"), Unreachable), (NotFound("no"), NotFound), (Denied("no"), Denied)],
)
async def test_without_any_source_the_error_of_the_controller_is_raised(
    case: Case, error: Exception, kind: type[CorralError]
) -> None:
    def fail(_start: int) -> object:
        raise error

    download = case.download(MemorySource(case.content, act=fail))
    async with asyncio.timeout(10):
        with pytest.raises(kind):
            await download.run()


async def test_a_cancelled_download_is_resumed_with_its_verified_chunks(case: Case) -> None:
    def stop_later(_start: int) -> object:
        if len(first.served) >= 7:
            task.cancel()
        return None

    first = MemorySource(case.content, act=stop_later)
    task = asyncio.create_task(case.download(first).run())
    with pytest.raises(asyncio.CancelledError):
        await task
    second = MemorySource(case.content)
    await case.download(second).run()
    assert case.path.read_bytes() == case.content
    assert len(second.served) <= 21 - 7 + LIMITS.per_controller


async def test_no_space_is_reported_before_the_first_byte(case: Case) -> None:
    source = MemorySource(case.content)
    download = case.download(source, space=DiskSpace(reserve_bytes=0, measure=lambda _folder: 10))
    with pytest.raises(NoSpace):
        await download.run()
    assert source.served == []


async def test_a_chunk_list_of_another_file_is_found_out(case: Case, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"y" * len(case.content))
    case.listed = list_chunks(other, chunk_bytes=CHUNK)
    download = case.download(MemorySource(other.read_bytes()))
    with pytest.raises(WrongDigest, match="chunk list"):
        await download.run()
    assert not case.path.exists()  # with the same list a retry would end the same way


async def test_a_peer_that_has_nothing_yet_gets_no_request(case: Case) -> None:
    early, count = peer(case, "early"), len(case.listed.chunks)
    download = case.download(MemorySource(case.content))
    download.offer(early, ChunkSet(count))
    await download.run()
    assert early.served == []
    assert download.received == {"controller": len(case.content)}


@pytest.mark.parametrize("seed", range(25))
async def test_any_mixture_of_bad_peers_gives_the_right_file(case: Case, seed: int) -> None:
    rng = random.Random(seed)

    def misbehave(_start: int) -> object:
        roll = rng.random()
        if roll < 0.15:
            raise TransferBroken("disconnected")
        if roll < 0.25:
            raise SourceBusy(0.01)
        if roll < 0.3:
            raise NotFound("not here")
        if roll < 0.35:
            return os.urandom(CHUNK)
        if roll < 0.4:
            return b"short"
        return None

    peers = [peer(case, f"p{number}", misbehave, wait_s=rng.random() * 0.01) for number in range(5)]
    download = case.download(MemorySource(case.content, wait_s=0.002), *peers, seed=seed)
    for each in peers:
        download.offer(each, ChunkSet(21, rng.getrandbits(21)))
    download.assign(rng.sample(range(21), 3), is_unrestricted=False)
    async with asyncio.timeout(20):
        await download.run()
    assert case.path.read_bytes() == case.content
    assert sum(download.received.values()) == len(case.content)


def test_a_rate_limit_lets_a_burst_pass_and_then_keeps_the_rate() -> None:
    limit = RateLimit(1000.0, SystemClock())
    start = SystemClock().monotonic()
    assert limit.reserve(250, start) == pytest.approx(0.0, abs=0.01)
    assert limit.reserve(1000, start) == pytest.approx(1.0, abs=0.01)
    assert limit.reserve(1000, start + 1.0) == pytest.approx(1.0, abs=0.01)
    assert not RateLimit(0, SystemClock()).is_limited
