"""A blob listener and those who ask it: our own fetcher, aiohttp, and people who say nothing or nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest

from corral.blobs.serving.growing_file import GrowingFile
from corral.blobs.serving.server import BlobListener, Refusal, ServingLimits
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher, FetchLimits
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import UrlRemote, open_session
from corral.kit.certificates import Ca, make_ca
from corral.kit.errors import CorralError, Denied, NotFound
from tests.support.blob_server import BlobServer
from tests.support.waiting import DEADLINE_S, until

CONTENT = os.urandom(3_000_000)
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
SHOWN = {"Authorization": "Bearer good"}


def check(authorization: str) -> Refusal | None:
    if authorization == "Bearer good":
        return None
    return Refusal(401, "no") if authorization != "Bearer other" else Refusal(403, "not for this")


@dataclass
class Site:
    url: str
    listener: BlobListener
    session: aiohttp.ClientSession
    store: BlobStore

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def page(self, digest: str = DIGEST) -> UrlRemote:
        return UrlRemote(self.session, f"{self.url}/blobs/{digest}", SHOWN)


def growing_in(store: BlobStore, digest: str) -> GrowingFile | None:
    incoming = store.find_incoming(digest)
    if incoming is None or not incoming.size:
        return None
    return GrowingFile(incoming.path, incoming.size, lambda: store.find_incoming(digest) is not None)


@asynccontextmanager
async def serving(
    folder: Path, *, limits: ServingLimits | None = None, tls: ssl.SSLContext | None = None, trust: str = ""
) -> AsyncIterator[Site]:
    store = BlobStore(folder / "blobs", Fetcher(FetchLimits(tries=2, first_wait_s=0.01)))
    store.path(DIGEST).write_bytes(CONTENT)
    context = ssl.create_default_context(cadata=trust) if trust else None

    def find(digest: str) -> Path | None:
        blob = store.find(digest)
        return blob.path if blob is not None else None

    async with (
        BlobListener(
            find, check, find_growing=lambda digest: growing_in(store, digest), tls=lambda: tls, limits=limits
        ) as listener,
        open_session(trust=context, inside=True) as session,
    ):
        port = await listener.listen("127.0.0.1", 0)
        yield Site(f"{'https' if tls else 'http'}://127.0.0.1:{port}", listener, session, store)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path) as opened:
        yield opened


async def test_whole_and_in_parts(site: Site) -> None:
    url = f"{site.url}/blobs/{DIGEST}"
    async with site.session.get(url, headers=SHOWN) as answer:
        assert (answer.status, answer.headers["ETag"]) == (200, f'"{DIGEST}"')
        assert await answer.read() == CONTENT
    async with site.session.head(url, headers=SHOWN) as answer:
        assert (answer.status, answer.content_length) == (200, len(CONTENT))
    async with site.session.get(url, headers={**SHOWN, "Range": "bytes=1000-1999"}) as answer:
        assert (answer.status, answer.headers["Content-Range"]) == (206, f"bytes 1000-1999/{len(CONTENT)}")
        assert await answer.read() == CONTENT[1000:2000]
    async with site.session.get(url, headers={**SHOWN, "Range": f"bytes={len(CONTENT)}-"}) as answer:
        assert (answer.status, answer.headers["Content-Range"]) == (416, f"bytes */{len(CONTENT)}")
    await until(lambda: site.listener.sent_bytes == len(CONTENT) + 1000)


async def test_nobody_comes_in_without_a_token(site: Site) -> None:
    url = f"{site.url}/blobs/{DIGEST}"
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer bad"}, 401),
        ({"Authorization": "Bearer other"}, 403),
    ):
        async with site.session.get(url, headers=headers) as answer:
            assert answer.status == status
    async with site.session.get(f"{site.url}/blobs/sha256:{'0' * 64}") as answer:
        assert answer.status == 401  # not even whether it is here
    with pytest.raises(Denied):
        await site.store.obtain(UrlRemote(site.session, url), ExpectedBlob("sha256:" + "1" * 64))


async def test_what_is_not_here(site: Site) -> None:
    for path in ("/", "/blobs/x", f"/blobs/sha256:{'0' * 64}", "/blobs/../incoming"):
        async with site.session.get(site.url + path, headers=SHOWN) as answer:
            assert answer.status == 404
    async with site.session.put(f"{site.url}/blobs/{DIGEST}", headers=SHOWN) as answer:
        assert answer.status == 405
    with pytest.raises(NotFound):
        await Fetcher().fetch(site.page("sha256:" + "2" * 64), site.store.folder / "x", ExpectedBlob())


async def test_a_transfer_goes_on_where_it_stopped(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "half"
    path.write_bytes(CONTENT[:1_000_000])
    fetched = await Fetcher().fetch(site.page(), path, ExpectedBlob(DIGEST, len(CONTENT)))
    assert (fetched.digest, path.read_bytes()) == (DIGEST, CONTENT)
    await until(lambda: site.listener.sent_bytes == 2_000_000)


async def test_a_blob_that_is_removed_is_sent_to_its_end(site: Site) -> None:
    async with site.session.get(f"{site.url}/blobs/{DIGEST}", headers=SHOWN) as answer:
        site.store.discard(DIGEST)
        assert await answer.read() == CONTENT
    async with site.session.get(f"{site.url}/blobs/{DIGEST}", headers=SHOWN) as answer:
        assert answer.status == 404


def certified(folder: Path) -> tuple[ssl.SSLContext, str]:
    """The server's side, and the CA."""
    now = datetime.now(UTC)
    made = make_ca("test", now)
    issued = Ca(made.certificate_pem, made.key_pem).issue_server(["127.0.0.1"], now, life=timedelta(days=1))
    (folder / "crt").write_text(issued.certificate_pem)
    (folder / "key").write_text(issued.key_pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "crt", folder / "key")
    return context, made.certificate_pem


async def test_over_tls(tmp_path: Path) -> None:
    context, ca = certified(tmp_path)
    async with serving(tmp_path, tls=context, trust=ca) as site:
        fetched = await Fetcher().fetch(site.page(), tmp_path / "x", ExpectedBlob(DIGEST, len(CONTENT)))
        assert fetched.size == len(CONTENT)
        plain, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(f"GET /blobs/{DIGEST} HTTP/1.1\r\nAuthorization: Bearer good\r\n\r\n".encode())
        with contextlib.suppress(ConnectionResetError):
            assert CONTENT[:100] not in await plain.read()
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()


async def test_silence_and_nonsense_hold_nobody_up(tmp_path: Path) -> None:
    async with serving(tmp_path, limits=ServingLimits(connections=2, first_request_s=4.0)) as site:
        lines = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(3)]
        (silent, _), (nonsense, says), (full, _) = lines
        assert (await full.read()).startswith(b"HTTP/1.1 503 ")
        says.write(b"hello\r\n\r\n")
        assert (await nonsense.read()).startswith(b"HTTP/1.1 400 ")
        assert await silent.read() == b""
        for _, writer in lines:
            writer.close()
            await writer.wait_closed()
        fetched = await Fetcher().fetch(site.page(), tmp_path / "x", ExpectedBlob(DIGEST, len(CONTENT)))
        assert fetched.size == len(CONTENT)


@pytest.mark.parametrize("secure", [False, True])
async def test_a_crowd_without_tokens_keeps_nobody_out(tmp_path: Path, secure: bool) -> None:
    context, ca = certified(tmp_path)
    limits = ServingLimits(connections=6, unauthenticated=3, first_request_s=600.0)
    async with serving(tmp_path, limits=limits, tls=context if secure else None, trust=ca) as site:
        crowd = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(20)]
        first = crowd[0][0]
        assert await first.read() == b"", "the eldest give way"
        url = f"{site.url}/blobs/{DIGEST}"

        async def is_served() -> bool:
            """Perhaps not at the first try: those who give way take a moment to be gone."""
            try:
                async with site.session.get(url, headers=SHOWN) as answer:
                    return answer.status == 200 and await answer.read() == CONTENT
            except aiohttp.ClientError:
                return False

        await until(is_served, "an answer for one who shows a token")
        crowd += [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(20)]
        async with site.session.get(url, headers=SHOWN) as answer:  # on the line it has, which has shown its token
            assert await answer.read() == CONTENT
        for _, writer in crowd:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.mark.parametrize("secure", [False, True])
async def test_leaving_cuts_those_who_read_slowly(tmp_path: Path, secure: bool) -> None:
    big = os.urandom(1 << 20) * 64
    digest = "sha256:" + hashlib.sha256(big).hexdigest()
    context, ca = certified(tmp_path)
    async with serving(tmp_path, tls=context if secure else None, trust=ca) as site:
        site.store.path(digest).write_bytes(big)
        trust = ssl.create_default_context(cadata=ca) if secure else None
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port, limit=1 << 16, ssl=trust)
        writer.write(f"GET /blobs/{digest} HTTP/1.1\r\nAuthorization: Bearer good\r\n\r\n".encode())
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    got = 0
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while piece := await reader.read(1 << 20):
                got += len(piece)
    assert got < len(big)
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()


# A blob that is still being fetched

NEW = os.urandom(2_000_000)
NEW_DIGEST = "sha256:" + hashlib.sha256(NEW).hexdigest()


async def read_all(site: Site, **headers: str) -> tuple[int, bytes]:
    page = UrlRemote(site.session, f"{site.url}/blobs/{NEW_DIGEST}", SHOWN)
    async with page.open(headers) as answer:
        return answer.status, await answer.read()


@asynccontextmanager
async def half_fetched(site: Site) -> AsyncIterator[tuple[BlobServer, asyncio.Task[object]]]:
    """The site has begun to fetch, and about half of the bytes are there."""
    async with BlobServer() as origin:
        page = UrlRemote(site.session, origin.put("/new", NEW))
        origin.hold_after = 1_000_000
        fetching = asyncio.create_task(site.store.obtain(page, ExpectedBlob(NEW_DIGEST, len(NEW))))
        await until(lambda: (here := site.store.find_incoming(NEW_DIGEST)) is not None and here.have >= 1_000_000)
        try:
            yield origin, fetching
        finally:
            fetching.cancel()
            await asyncio.wait([fetching])


async def test_a_blob_is_sent_while_it_is_fetched(site: Site) -> None:
    async with half_fetched(site) as (origin, fetching):
        whole = asyncio.create_task(read_all(site))
        part = asyncio.create_task(read_all(site, Range="bytes=1500000-1600000"))
        tail = asyncio.create_task(read_all(site, Range="bytes=-1000"))
        assert (await read_all(site, Range="bytes=100-199")) == (206, NEW[100:200])  # that is there already
        origin.pause.set()
        assert await whole == (200, NEW)
        assert await part == (206, NEW[1_500_000:1_600_001])
        assert await tail == (206, NEW[-1000:])
        await fetching


async def test_readers_are_cut_off_when_the_fetch_is_given_up(site: Site) -> None:
    async with half_fetched(site) as (_origin, fetching), site.page(NEW_DIGEST).open({}) as answer:
        await answer.content.readexactly(100_000)
        fetching.cancel()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    with pytest.raises(NotFound):
        await Fetcher().fetch(site.page(NEW_DIGEST), site.store.folder / "x", ExpectedBlob(NEW_DIGEST))


async def test_a_reader_of_wrong_bytes_notices(site: Site, tmp_path: Path) -> None:
    """The bytes are sent before they are verified: it is the reader who must not believe them."""
    async with BlobServer() as origin:
        page = UrlRemote(site.session, origin.put("/new", NEW[:-1] + b"x"))
        origin.hold_after = 1_000_000
        fetching = asyncio.create_task(site.store.obtain(page, ExpectedBlob(NEW_DIGEST, len(NEW))))
        await until(lambda: (here := site.store.find_incoming(NEW_DIGEST)) is not None and here.have >= 1_000_000)
        fetcher = Fetcher(FetchLimits(tries=2, first_wait_s=0.01))
        reading = asyncio.create_task(fetcher.fetch(site.page(NEW_DIGEST), tmp_path / "got", ExpectedBlob(NEW_DIGEST)))
        await until(lambda: (tmp_path / "got").is_file() and (tmp_path / "got").stat().st_size > 500_000)
        origin.pause.set()
        for failing in (fetching, reading):
            with pytest.raises(CorralError):
                await failing


async def test_a_blob_that_grows_is_sent_over_tls(tmp_path: Path) -> None:
    tls, ca = certified(tmp_path)
    async with serving(tmp_path, tls=tls, trust=ca) as site, half_fetched(site) as (origin, fetching):
        reading = asyncio.create_task(read_all(site))
        origin.pause.set()
        assert await reading == (200, NEW)
        await fetching
