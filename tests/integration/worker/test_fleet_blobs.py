"""Blobs of several chunks from real listeners: in parallel, resumed after kill -9, and from whichever source works."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest

from corral.blobs.chunks import list_chunks
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace, WrongDigest
from corral.blobs.progress import Progress
from corral.blobs.store import Blob, BlobStore
from corral.blobs.swarm.planner import PlanLimits
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.transfer.fetcher import Fetcher, FetchLimits
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import open_session
from corral.contract.codec import encode
from corral.kit.clock import SystemClock
from corral.kit.errors import Denied, NotFound, Unreachable
from corral.worker.files.fleet_blobs import FleetBlobs
from tests.support.blob_source import BlobSource, blob_source
from tests.support.processes import free_port
from tests.support.waiting import until

MIB = 1 << 20
CONTENT = os.urandom(18 * MIB + 5)
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
WANTED = ExpectedBlob(DIGEST, len(CONTENT))
FAST = PlanLimits(first_pause_s=0.01, cap_pause_s=0.02)


@dataclass
class Site:
    folder: Path
    source: BlobSource
    session: aiohttp.ClientSession
    seen: list[Progress] = field(default_factory=list)

    @property
    def store(self) -> BlobStore:
        return BlobStore(self.folder / "store")

    async def obtain(self, *urls: str, fleet: FleetBlobs | None = None, token: str = "a-token") -> Blob:
        fleet = fleet or FleetBlobs(self.session, limits=FAST)
        return await fleet.obtain(
            self.store, WANTED, urls or self.source.urls, token, self.seen.append, name="m/w.gguf"
        )


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with blob_source(tmp_path) as source, open_session(inside=True) as session:
        source.add("m/w.gguf", CONTENT)
        yield Site(tmp_path, source, session)


async def test_a_blob_comes_in_chunks_and_once(site: Site) -> None:
    blob = await site.obtain()
    assert blob.path.read_bytes() == CONTENT
    assert site.source.listener.sent_bytes == len(CONTENT)
    assert site.seen[-1].sources == {"controller": len(CONTENT)}
    assert site.seen[-1].file == "m/w.gguf"
    assert os.listdir(site.folder / "store" / "incoming") == []
    await site.obtain()
    assert site.source.listener.sent_bytes == len(CONTENT)


async def test_two_callers_share_one_transfer(site: Site) -> None:
    store, fleet = site.store, FleetBlobs(site.session)
    both = [fleet.obtain(store, WANTED, site.source.urls, "a-token", name=name) for name in ("one/w", "two/w")]
    first, second = await asyncio.gather(*both)
    assert first == second
    assert site.source.listener.sent_bytes == len(CONTENT)


async def test_several_controllers_share_the_work(site: Site, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    async with blob_source(tmp_path / "second") as second:
        second.add("m/w.gguf", CONTENT)
        await site.obtain(*site.source.urls, *second.urls)
        assert site.source.listener.sent_bytes + second.listener.sent_bytes == len(CONTENT)
        assert min(site.source.listener.sent_bytes, second.listener.sent_bytes) > 0


async def test_a_controller_that_is_gone_costs_nothing_but_time(site: Site) -> None:
    await site.obtain("http://127.0.0.1:9", *site.source.urls)
    assert site.source.listener.sent_bytes == len(CONTENT)


async def test_what_no_source_gives(site: Site) -> None:
    impatient = BlobStore(site.folder / "x", Fetcher(FetchLimits(tries=2, first_wait_s=0.01)))
    with pytest.raises(Unreachable, match=r"m/w\.gguf"):
        await FleetBlobs(site.session, limits=FAST).obtain(
            impatient, WANTED, ["http://127.0.0.1:9"], "", name="m/w.gguf"
        )
    with pytest.raises(Denied):
        await site.obtain(token="stolen")
    site.source.store.discard(DIGEST)
    with pytest.raises(NotFound):
        await site.obtain()


async def test_an_expired_token_is_renewed_once_for_all_connections(site: Site) -> None:
    renewed: list[str] = []

    async def fresh() -> str:
        renewed.append("please")
        return site.source.token

    await site.obtain(fleet=FleetBlobs(site.session, fresh_token=fresh), token="old")
    assert len(renewed) == 1


async def test_downloads_keep_to_the_limit(site: Site) -> None:
    loop, limit = asyncio.get_running_loop(), RateLimit(12 * MIB, SystemClock())
    began = loop.time()
    await site.obtain(fleet=FleetBlobs(site.session, max_download=limit))
    assert loop.time() - began > 0.9  # 18 MiB at 12 MiB/s, less the first quarter of a second


async def test_a_damaged_chunk_list_of_a_controller_is_not_used(site: Site) -> None:
    (site.source.store.folder / "chunks" / f"{DIGEST[7:]}.json").write_text('{"size":3,"chunks":["x"]}')
    blob = await site.obtain()  # in one piece
    assert blob.path.read_bytes() == CONTENT


async def test_a_damaged_blob_of_a_controller_is_removed_and_counts_nowhere(site: Site) -> None:
    """A list of the damaged bytes would make them look right, chunk by chunk."""
    stored = site.source.store.path(DIGEST)
    stored.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(NotFound, match=r"m/w\.gguf"):
        await site.obtain()
    assert not stored.exists()  # the controller fetches it again from its origin
    site.source.add("m/w.gguf", CONTENT)
    blob = await site.obtain()
    assert blob.path.read_bytes() == CONTENT


async def test_a_list_of_damaged_bytes_goes_with_them(site: Site) -> None:
    damaged = bytes(9 * MIB)
    listed = encode(list_chunks(write(site.folder / "damaged", damaged + CONTENT[9 * MIB :])))
    (site.source.store.folder / "chunks" / f"{DIGEST[7:]}.json").write_bytes(listed)
    with pytest.raises(WrongDigest):
        await site.obtain()
    assert os.listdir(site.folder / "store" / "sha256") == []
    site.source.store.accept(write(site.source.store.partial_path("again"), CONTENT), DIGEST, len(CONTENT))
    blob = await site.obtain()
    assert blob.path.read_bytes() == CONTENT


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


async def test_a_controller_that_restarts_before_it_lists_the_chunks_costs_none_of_them(site: Site) -> None:
    """The chunks that are here are not fetched again in one piece."""
    async with open_session(inside=True) as session:
        slow = FleetBlobs(session, limits=FAST, max_download=RateLimit(6 * MIB, SystemClock()))
        running = asyncio.create_task(site.obtain(fleet=slow))
        await until(lambda: site.store.partial_bytes(DIGEST) >= 4 * MIB, "a chunk", timeout_s=30)
        running.cancel()
        await asyncio.wait([running])
    kept = site.store.partial_bytes(DIGEST)
    await until(lambda: not site.source.listener._open, "the cancelled reader is gone", timeout_s=10)
    before, away, clock = site.source.listener.sent_bytes, free_port(), WatchedClock()
    fleet = FleetBlobs(site.session, limits=replace(FAST, max_failures=500), clock=clock)
    running = asyncio.create_task(site.obtain(f"http://127.0.0.1:{away}", fleet=fleet))
    await clock.is_waiting.wait()
    await site.source.listener.listen("127.0.0.1", away)
    await running
    assert site.source.listener.sent_bytes - before == len(CONTENT) - kept


class WatchedClock(SystemClock):
    def __init__(self) -> None:
        self.is_waiting = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.is_waiting.set()
        await super().sleep(seconds)


@pytest.mark.parametrize("size", [0, 1, 4 * MIB, 4 * MIB + 1])
async def test_a_file_of_any_size(site: Site, size: int) -> None:
    file = site.source.add("m/any", CONTENT[:size])
    fleet = FleetBlobs(site.session, limits=FAST)
    for store in (site.store, BlobStore(site.folder / "second")):
        wanted = ExpectedBlob(file.digest, file.size_bytes)
        blob = await fleet.obtain(store, wanted, site.source.urls, "a-token", name="any")
        assert (blob.size, blob.path.read_bytes()) == (size, CONTENT[:size])


KILLED = """
import asyncio, sys
from pathlib import Path
from corral.blobs.store import BlobStore
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.transfer.fetcher import Fetcher, FetchLimits
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import open_session
from corral.kit.clock import SystemClock
from corral.worker.files.fleet_blobs import FleetBlobs

async def main(folder, digest, size, url, token):
    async with open_session(inside=True) as session:
        slow = RateLimit(6 << 20, SystemClock())
        fleet = FleetBlobs(session, max_download=slow)
        await fleet.obtain(BlobStore(Path(folder)), ExpectedBlob(digest, int(size)), [url], token, name="w")

asyncio.run(main(*sys.argv[1:]))
"""


async def test_after_kill_9_only_the_chunks_under_way_are_sent_again(site: Site) -> None:
    url = site.source.urls[0].replace("{host}", "127.0.0.1")
    arguments = [str(site.folder / "store"), DIGEST, str(len(CONTENT)), url, site.source.token]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, *arguments)
    try:
        bitmap = site.folder / "store" / "incoming" / f"{DIGEST[7:]}.sparse.have"

        def has_two_chunks() -> bool:
            return bitmap.exists() and bitmap.read_bytes().partition(b"\n")[2][:1].hex() not in ("", "00", "01")

        await until(has_two_chunks, "two verified chunks", timeout_s=30)
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    kept = bin(bitmap.read_bytes().partition(b"\n")[2][0]).count("1")
    await until(lambda: not site.source.listener._open, "the killed reader is gone", timeout_s=10)
    before = site.source.listener.sent_bytes
    await site.obtain()
    assert kept >= 1
    assert site.source.listener.sent_bytes - before == len(CONTENT) - kept * 4 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 10 MiB; `mount -o remount` makes it larger."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "none", folder]).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


async def test_a_disk_that_becomes_full_keeps_its_chunks_and_the_rest_follows(site: Site, small_disk: Path) -> None:
    # As if other programs used the space up after the download began.
    space = DiskSpace(reserve_bytes=0, measure=lambda _folder: 100 * MIB)
    store, fleet = BlobStore(small_disk / "store"), FleetBlobs(site.session, space=space)
    with pytest.raises(NoSpace):
        await fleet.obtain(store, WANTED, site.source.urls, "a-token", name="w")
    assert store.find(DIGEST) is None
    kept = (small_disk / "store" / "incoming" / f"{DIGEST[7:]}.sparse.have").read_bytes().partition(b"\n")[2]
    assert kept != b"\0"
    remount = ["mount", "-o", "remount,size=64m", str(small_disk)]
    assert await (await asyncio.create_subprocess_exec(*remount)).wait() == 0
    blob = await fleet.obtain(store, WANTED, site.source.urls, "a-token", name="w")
    assert blob.path.read_bytes() == CONTENT
