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

from corral.blobs.serving.server import BlobListener, Refusal, ServingLimits
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import UrlRemote, open_session
from corral.kit.certificates import Ca, make_ca
from corral.kit.errors import Denied, NotFound
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


@asynccontextmanager
async def serving(
    folder: Path, *, limits: ServingLimits | None = None, tls: ssl.SSLContext | None = None, trust: str = ""
) -> AsyncIterator[Site]:
    store = BlobStore(folder / "blobs")
    store.path(DIGEST).write_bytes(CONTENT)
    context = ssl.create_default_context(cadata=trust) if trust else None

    def find(digest: str) -> Path | None:
        blob = store.find(digest)
        return blob.path if blob is not None else None

    async with (
        BlobListener(find, check, tls=lambda: tls, limits=limits) as listener,
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
