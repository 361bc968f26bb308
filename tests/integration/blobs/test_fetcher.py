"""One thing over a real connection: whole, resumed, changed, busy, cut, wrong, cancelled."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace, TooLarge, WrongDigest
from corral.blobs.transfer.fetcher import Fetched, Fetcher, FetchLimits
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import HttpTimeouts, UrlRemote, open_session
from corral.kit.errors import Denied, Failed, Invalid, NotFound, Unreachable
from tests.support.blob_server import BlobServer, Served
from tests.support.processes import free_port
from tests.support.waiting import until

DATA = os.urandom(300_000)
DIGEST = "sha256:" + hashlib.sha256(DATA).hexdigest()
QUICK = FetchLimits(tries=3, first_wait_s=0.01, cap_wait_s=0.02)


@pytest.fixture
async def server() -> AsyncIterator[BlobServer]:
    async with BlobServer() as server:
        yield server


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session(HttpTimeouts(connect_s=20.0, stall_s=20.0)) as session:
        yield session


class Fetch:
    def __init__(self, session: aiohttp.ClientSession, folder: Path) -> None:
        self.session = session
        self.path = folder / "x.part"
        self.seen: list[tuple[int, int]] = []

    async def __call__(
        self, url: str, digest: str = "", size: int = 0, *, limits: FetchLimits = QUICK, room: DiskSpace | None = None
    ) -> Fetched:
        fetcher = Fetcher(limits, space=room)

        def at(have: int, total: int) -> None:
            assert asyncio.get_running_loop(), "told in a thread"
            self.seen.append((have, total))

        return await fetcher.fetch(UrlRemote(self.session, url), self.path, ExpectedBlob(digest, size), at)


@pytest.fixture
def fetch(session: aiohttp.ClientSession, tmp_path: Path) -> Fetch:
    return Fetch(session, tmp_path)


async def test_all_of_it_comes_with_its_digest(server: BlobServer, fetch: Fetch) -> None:
    got = await fetch(server.put("/x", DATA))
    assert got == Fetched(DIGEST, len(DATA))
    assert fetch.path.read_bytes() == DATA
    assert fetch.path.stat().st_mode & 0o777 == 0o600
    assert fetch.seen[-1] == (len(DATA), len(DATA))
    assert [have for have, _ in fetch.seen] == sorted(have for have, _ in fetch.seen)


async def test_an_empty_thing(server: BlobServer, fetch: Fetch) -> None:
    assert (await fetch(server.put("/x", b""))).size == 0


async def test_without_a_length(server: BlobServer, fetch: Fetch) -> None:
    assert await fetch(server.put("/x", DATA, length=False), DIGEST) == Fetched(DIGEST, len(DATA))


async def test_cut_in_the_middle_it_goes_on_from_there(server: BlobServer, fetch: Fetch) -> None:
    server.cut_after = [100_000, 120_000]
    got = await fetch(server.put("/x", DATA), DIGEST, len(DATA))
    assert got.digest == DIGEST
    assert [asked.range for asked in server.asked] == ["", "bytes=100000-", "bytes=220000-"]
    assert server.bytes_sent == len(DATA)  # not a byte twice


async def test_a_line_that_breaks_often_but_moves_is_never_given_up(server: BlobServer, fetch: Fetch) -> None:
    server.cut_after = [70_000] * 4  # more breaks than tries
    assert (await fetch(server.put("/x", DATA), DIGEST)).digest == DIGEST


async def test_a_line_that_breaks_and_does_not_move_is(server: BlobServer, fetch: Fetch) -> None:
    server.cut_after = [10] * 10
    with pytest.raises(Unreachable, match="tried 3 times"):
        await fetch(server.put("/x", DATA), DIGEST)
    assert len(server.asked) == 3
    assert fetch.path.stat().st_size == 30  # kept for the next time


async def test_a_later_process_goes_on(server: BlobServer, fetch: Fetch) -> None:
    fetch.path.write_bytes(DATA[:200_000])
    assert (await fetch(server.put("/x", DATA), DIGEST)).digest == DIGEST
    assert server.asked[0].range == "bytes=200000-"
    assert server.asked[0].if_range == ""  # the digest says in the end whether it fits
    assert fetch.seen[0] == (200_000, 0)


async def test_what_is_all_there_needs_no_server(fetch: Fetch) -> None:
    fetch.path.write_bytes(DATA)
    assert (await fetch("http://127.0.0.1:1/x", DIGEST, len(DATA))).digest == DIGEST


async def test_what_is_all_there_without_a_known_size_is_asked_about(server: BlobServer, fetch: Fetch) -> None:
    fetch.path.write_bytes(DATA)
    assert (await fetch(server.put("/x", DATA), DIGEST)).digest == DIGEST
    assert server.bytes_sent == 0


async def test_without_a_digest_only_the_same_thing_is_gone_on_with(server: BlobServer, fetch: Fetch) -> None:
    url = server.put("/x", DATA, etag='"one"')
    server.cut_after = [100_000, 10, 10]
    with pytest.raises(Unreachable):
        await fetch(url, limits=FetchLimits(tries=2, first_wait_s=0.01))
    assert server.asked[1].if_range == '"one"'
    other = os.urandom(len(DATA))
    server.put("/x", other, etag='"two"')
    server.cut_after = []
    await fetch(url)
    assert fetch.path.read_bytes() == other


async def test_a_weak_validator_is_none_but_a_date_is_one(server: BlobServer, fetch: Fetch) -> None:
    server.cut_after = [100_000]
    date = "Wed, 21 Oct 2026 07:28:00 GMT"
    await fetch(server.put("/x", DATA, etag='W/"one"', modified=date))
    assert server.asked[1].if_range == date
    server.asked.clear()
    fetch.path.unlink()
    server.cut_after = [100_000]
    await fetch(server.put("/y", DATA, etag='W/"one"'))
    assert server.bytes_sent == len(DATA) + 100_000 + len(DATA)  # nothing vouches for the first part: from the start


async def test_a_server_without_ranges(server: BlobServer, fetch: Fetch) -> None:
    server.cut_after = [100_000]
    assert (await fetch(server.put("/x", DATA, ranges=False), DIGEST)).digest == DIGEST
    assert fetch.path.read_bytes() == DATA


async def test_a_damaged_part_is_noticed_and_all_fetched_again(server: BlobServer, fetch: Fetch) -> None:
    fetch.path.write_bytes(b"x" + DATA[1:100_000])
    assert (await fetch(server.put("/x", DATA), DIGEST)).digest == DIGEST
    assert fetch.path.read_bytes() == DATA


async def test_a_part_longer_than_the_thing_is_dropped(server: BlobServer, fetch: Fetch) -> None:
    fetch.path.write_bytes(DATA + b"more")
    assert (await fetch(server.put("/x", DATA), DIGEST, len(DATA))).digest == DIGEST


async def test_wrong_digest_twice(server: BlobServer, fetch: Fetch) -> None:
    wrong = "sha256:" + "0" * 64
    with pytest.raises(WrongDigest, match="twice"):
        await fetch(server.put("/x", DATA), wrong)
    assert server.bytes_sent == 2 * len(DATA)  # once may be the line's fault
    assert not fetch.path.exists()


async def test_wrong_digest_once(server: BlobServer, fetch: Fetch) -> None:
    server.at_first["/x"] = Served(b"y" * 10)
    assert (await fetch(server.put("/x", DATA), DIGEST)).digest == DIGEST
    assert len(server.asked) == 2


@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1])
async def test_another_size_than_promised(server: BlobServer, fetch: Fetch, size: int) -> None:
    with pytest.raises(WrongDigest, match="bytes, not"):
        await fetch(server.put("/x", DATA), DIGEST, size)


async def test_more_than_promised(server: BlobServer, fetch: Fetch) -> None:
    with pytest.raises(WrongDigest, match="sends more"):
        await fetch(server.put("/x", DATA, length=False), DIGEST, 1000)
    assert fetch.path.stat().st_size <= 1000


async def test_more_than_allowed(server: BlobServer, fetch: Fetch) -> None:
    limits = FetchLimits(tries=1, max_bytes=1000)
    with pytest.raises(TooLarge):
        await fetch(server.put("/x", DATA), limits=limits)
    with pytest.raises(TooLarge):
        await fetch(server.put("/x", DATA, length=False), limits=limits)
    with pytest.raises(TooLarge):
        await fetch(server.put("/x", DATA), size=2000, limits=limits)


async def test_busy_is_tried_again_as_the_server_asks(server: BlobServer, fetch: Fetch) -> None:
    server.statuses = [(503, {"Retry-After": "0"}), (429, {})]
    assert (await fetch(server.put("/x", DATA), DIGEST)).digest == DIGEST


@pytest.mark.parametrize(("status", "error"), [(404, NotFound), (401, Denied), (403, Denied), (400, Failed)])
async def test_a_refusal_is_not_repeated(server: BlobServer, fetch: Fetch, status: int, error: type[Exception]) -> None:
    server.statuses = [(status, {})] * 3
    with pytest.raises(error):
        await fetch(server.put("/x", DATA))
    assert len(server.asked) == 1


async def test_nobody_listens(fetch: Fetch) -> None:
    with pytest.raises(Unreachable, match="cannot be reached"):
        await fetch(f"http://127.0.0.1:{free_port()}/x")


@pytest.mark.parametrize("url", ["ftp://example.invalid/x", "http://", "http://[::1/x", "nonsense", "http://a b/"])
async def test_what_is_no_url(fetch: Fetch, url: str) -> None:
    with pytest.raises((Invalid, Unreachable)):
        await fetch(url, limits=FetchLimits(tries=1))


async def test_a_stalled_line_is_tried_again(server: BlobServer, tmp_path: Path) -> None:
    async with open_session(HttpTimeouts(connect_s=20.0, stall_s=1.5)) as session:
        fetch = Fetch(session, tmp_path)
        url = server.put("/x", DATA)
        server.pause.clear()
        with pytest.raises(Unreachable, match="no data received for too long"):
            await fetch(url, limits=FetchLimits(tries=2, first_wait_s=0.01))
        assert len(server.asked) == 2


async def test_cancelled_the_bytes_stop_at_once_and_what_came_is_kept(server: BlobServer, fetch: Fetch) -> None:
    url = server.put("/x", bytes(50_000_000))
    task = asyncio.create_task(fetch(url, "sha256:" + "0" * 64))
    await until(lambda: len(fetch.seen) > 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    kept = fetch.path.stat().st_size
    assert 0 < kept <= fetch.seen[-1][0]
    await until(lambda: server.broken_off == 1)  # the server saw us go
    assert server.bytes_sent < kept + 10_000_000  # what was on the way
    assert fetch.path.read_bytes() == bytes(kept)


async def test_the_disk_is_asked_first(server: BlobServer, fetch: Fetch) -> None:
    room = DiskSpace(reserve_bytes=0, measure=lambda _folder: len(DATA) - 1)
    with pytest.raises(NoSpace, match="not enough disk"):
        await fetch(server.put("/x", DATA), room=room)
    assert fetch.path.stat().st_size == 0


async def test_only_what_is_missing_needs_room(server: BlobServer, fetch: Fetch) -> None:
    fetch.path.write_bytes(DATA[:200_000])
    room = DiskSpace(reserve_bytes=0, measure=lambda _folder: 100_000)
    assert (await fetch(server.put("/x", DATA), DIGEST, room=room)).digest == DIGEST


async def test_a_disk_that_fails_has_a_name(server: BlobServer, fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpace, match="the disk is full"):
        await fetch(server.put("/x", DATA))


async def test_credentials_do_not_follow_a_redirect_elsewhere(server: BlobServer, fetch: Fetch) -> None:
    async with BlobServer() as other:
        other.put("/y", DATA)
        server.statuses = [(302, {"Location": other.url("/y")})]
        url = server.url("/x").replace("http://", "http://ann:secret@")
        assert (await fetch(url, DIGEST)).digest == DIGEST
        assert server.asked[0].authorization.startswith("Basic ")
        assert other.asked[0].authorization == ""


async def test_passwords_in_a_url_are_not_told(server: BlobServer, fetch: Fetch) -> None:
    url = server.url("/missing?token=hush").replace("http://", "http://ann:secret@")
    with pytest.raises(NotFound) as error:
        await fetch(url)
    assert "secret" not in error.value.message
    assert "hush" not in error.value.message
