"""Indexes from a real HTTP server and from files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from corral.contract.sources import ImageIndex
from corral.gallery.backends.factory import GalleryOptions, open_resolver
from corral.gallery.backends.library import LibraryOptions
from corral.gallery.backends.resolution import Machine, ResolvedBackend, Unresolved
from corral.gallery.galleries import Gallery
from corral.gallery.index_fetcher import HttpDownloader, IndexFetcher, follow_ref
from corral.kit.clock import SystemClock
from corral.kit.errors import CorralError, Failed, Invalid, NotFound, Unreachable

INDEX = b"- {name: thing, uri: 'https://example.com/t.tar.gz', sha256: '" + b"a" * 64 + b"'}\n"


class Site:
    """A server whose pages are handlers; it remembers what it was asked with."""

    def __init__(self) -> None:
        self.asked: list[web.Request] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        match request.path:
            case "/index.yaml" | "/v2/index.yaml":
                return web.Response(body=INDEX)
            case "/latest.ref":
                return web.Response(text="v2/index.yaml\n")
            case "/moved":
                raise web.HTTPFound("/index.yaml")
            case "/elsewhere":
                raise web.HTTPFound(self.url.replace("127.0.0.1", "localhost") + "/index.yaml")
            case "/round":
                raise web.HTTPFound("/round")
            case "/big":
                return web.Response(body=b"#" * 5000)
            case "/slow":
                await asyncio.Event().wait()
            case "/cut":
                answer = web.StreamResponse(headers={"Content-Length": "1000"})
                await answer.prepare(request)
                await answer.write(b"- name")
                assert request.transport is not None
                request.transport.abort()
                return answer
            case "/broken":
                raise web.HTTPInternalServerError
            case "/org/repo/master/dir/index.yaml":
                return web.Response(body=INDEX)
        raise web.HTTPNotFound


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    site = Site()
    runner = web.AppRunner(_app(site), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        site.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield site
    finally:
        await runner.cleanup()


def _app(site: Site) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", site.handle)
    return app


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as site:
        yield site


@pytest.fixture
async def fetcher(site: Site, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[IndexFetcher]:
    """Its parameter is how long it waits for an answer."""
    timeout = aiohttp.ClientTimeout(sock_connect=30, sock_read=getattr(request, "param", 30.0))
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield IndexFetcher(HttpDownloader(session, max_bytes=4000), base_folder=tmp_path, github=site.url)


@pytest.mark.parametrize("path", ["/index.yaml", "/moved", "/latest.ref"])
async def test_pages(site: Site, fetcher: IndexFetcher, path: str) -> None:
    assert await fetcher.fetch(site.url + path) == INDEX
    assert all(request.headers["User-Agent"].startswith("Corral/") for request in site.asked)


async def test_github(fetcher: IndexFetcher) -> None:
    assert await fetcher.fetch("github:org/repo/dir/index.yaml@master") == INDEX
    assert await fetcher.fetch("github://org/repo/dir/index.yaml@master") == INDEX


@pytest.mark.parametrize(
    ("path", "error", "fetcher"),
    [
        ("/nothing", NotFound, 30.0),
        ("/broken", Failed, 30.0),
        ("/big", Failed, 30.0),
        ("/slow", Unreachable, 0.3),
        ("/cut", Unreachable, 30.0),
        ("/round", Unreachable, 30.0),
    ],
    indirect=["fetcher"],
)
async def test_failures(site: Site, fetcher: IndexFetcher, path: str, error: type[CorralError]) -> None:
    with pytest.raises(error):
        await fetcher.fetch(site.url + path)


async def test_nobody_listens(fetcher: IndexFetcher) -> None:
    with pytest.raises(Unreachable):
        await fetcher.fetch("http://127.0.0.1:1/index.yaml")
    for url in ("ftp://example.com/x", "index.yaml", "", "oci://x"):
        with pytest.raises(Invalid):
            await fetcher.fetch(url)


async def test_credentials_stay_with_their_host(site: Site, fetcher: IndexFetcher) -> None:
    with_password = site.url.replace("http://", "http://user:secret@")
    assert await fetcher.fetch(with_password + "/elsewhere") == INDEX
    first, second = site.asked
    assert "Authorization" in first.headers
    assert "Authorization" not in second.headers
    with pytest.raises(NotFound) as told:
        await fetcher.fetch(with_password + "/nothing")
    assert "secret" not in told.value.message


@pytest.mark.parametrize(
    ("url", "text", "expected"),
    [
        ("https://h/a/b.ref", "c.yaml\n", "https://h/a/c.yaml"),
        ("https://h/b.ref?x=1", "d/c.yaml", "https://h/d/c.yaml?x=1"),
        ("file:///a/b.ref", "c.yaml", "file:///a/c.yaml"),
    ],
)
def test_a_ref_replaces_the_last_segment(url: str, text: str, expected: str) -> None:
    assert follow_ref(url, text.encode()) == expected


@pytest.mark.parametrize("text", ["", "  ", "../x", "a/../x", "/etc/passwd", "https://evil/x", "two words", "x" * 2000])
def test_refs_that_lead_elsewhere(text: str) -> None:
    with pytest.raises(Invalid):
        follow_ref("https://h/a/b.ref", text.encode())


async def test_files_inside_the_base_folder(fetcher: IndexFetcher, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "index.yaml").write_bytes(INDEX)
    (tmp_path / "sub" / "now.ref").write_text("index.yaml")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "sub" / "index.yaml")
    for name in ("sub/index.yaml", "sub/now.ref", "link.yaml", "sub/../sub/index.yaml"):
        assert await fetcher.fetch(f"file://{tmp_path}/{name}") == INDEX


async def test_files_outside_it(
    fetcher: IndexFetcher, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "index.yaml").write_bytes(INDEX)
    (tmp_path / "link.yaml").symlink_to(outside / "index.yaml")
    (tmp_path / "folder").symlink_to(outside)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (outside / "index.yaml", tmp_path / "link.yaml", tmp_path / "folder" / "index.yaml"):
        with pytest.raises(Invalid, match=r"outside .*--gallery-folder"):
            await fetcher.fetch(f"file://{path}")
    nowhere = IndexFetcher(fetcher.fetch, base_folder=tmp_path / "not-there")
    with pytest.raises(Invalid, match=r"outside the gallery folder .*/not-there"):
        await nowhere.fetch(f"file://{outside}/index.yaml")
    with pytest.raises(NotFound, match=r"the file .*/no-folder/nothing\.yaml does not exist"):
        await fetcher.fetch(f"file://{tmp_path}/no-folder/nothing.yaml")
    for bad in (tmp_path, tmp_path / "loop", f"{tmp_path}/a%00b"):
        with pytest.raises(Failed):
            await fetcher.fetch(f"file://{bad}")
    (tmp_path / "big.yaml").write_bytes(b"#" * (33 << 20))
    with pytest.raises(Failed, match="more than"):
        await fetcher.fetch(f"file://{tmp_path}/big.yaml")


async def test_no_base_folder_no_files(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        fetcher = IndexFetcher(HttpDownloader(session))
        with pytest.raises(Invalid):
            await fetcher.fetch(f"file://{tmp_path}")


class NoRegistry:
    async def look_up(self, reference: str) -> ImageIndex:
        raise NotFound(reference)


async def test_put_together(site: Site, tmp_path: Path) -> None:
    """A process finds a thing through a dead primary's mirror, and the next process finds it with everything dead."""
    gallery = Gallery("g", "http://127.0.0.1:1/index.yaml", (f"{site.url}/latest.ref",))
    options = GalleryOptions(galleries=(gallery,), cache_folder=tmp_path, library=LibraryOptions(candidate_s=5))
    async with open_resolver(options, NoRegistry(), clock=SystemClock(), env={}) as resolver:
        got = await resolver.resolve("g@thing", Machine())
        assert isinstance(got, ResolvedBackend)
        assert got.digest == "sha256:" + "a" * 64
        unknown = await resolver.resolve("thin", Machine())
        assert isinstance(unknown, Unresolved)
        assert unknown.nearest == ("thing",)
    dead = Gallery("g", "http://127.0.0.1:1/index.yaml")
    options = GalleryOptions(galleries=(dead,), cache_folder=tmp_path)
    async with open_resolver(options, NoRegistry(), clock=SystemClock(), env={}) as resolver:
        assert isinstance(await resolver.resolve("thing", Machine()), ResolvedBackend)


async def test_every_place_a_redirect_leads_to_is_asked_about_first() -> None:
    checked: list[str] = []

    async def check(url: str) -> None:
        checked.append(url)
        if "localhost" in url:
            raise Invalid("not there")

    async with serving() as site, aiohttp.ClientSession() as session:
        download = HttpDownloader(session, check=check)
        assert await download(f"{site.url}/moved") == INDEX
        assert checked == [f"{site.url}/moved", f"{site.url}/index.yaml"]
        with pytest.raises(Invalid, match="not there"):
            await download(f"{site.url}/elsewhere")
        assert [request.path for request in site.asked][-1] == "/elsewhere"
        with pytest.raises(Failed, match="redirected more than 6 times"):
            await download(f"{site.url}/round")
        with pytest.raises(NotFound):
            await download(f"{site.url}/nothing")
