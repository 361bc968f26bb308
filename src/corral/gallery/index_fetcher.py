"""Downloads an index from the URL of a gallery (docs/reference/wire/gallery.md#gallery-sources). `entries.py` parses
it."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal, overload
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

import aiohttp

from corral import __version__
from corral.contract.sources import RAW_GITHUB, github_url
from corral.kit.errors import Failed, Invalid, NotFound, Unreachable, reason_of

USER_AGENT = f"Corral/{__version__} ({sys.platform}; {platform.machine()})"
_MAX_REF_CHARS = 1024
_BLOCK = 1 << 16
_MAX_REDIRECTS = 6
_REDIRECTS = (301, 302, 303, 307, 308)


# Returns the body of an http(s) URL. Raises NotFound, Failed or Unreachable.
Download = Callable[[str], Awaitable[bytes]]


class IndexFetcher:
    """`http(s)://`, `github:` and `file://`, each with or without `.ref`."""

    def __init__(
        self,
        download: Download,
        *,
        base_folder: Path | None = None,
        max_bytes: int = 32 << 20,
        github: str = RAW_GITHUB,
    ) -> None:
        self._download = download
        self._base_folder = base_folder
        self._max_bytes = max_bytes
        self._github = github

    async def fetch(self, url: str) -> bytes:
        """Raises Invalid for a URL that can never be read, otherwise what the download raises."""
        if url.startswith(("github:", "github://")):
            url = github_url(url.removeprefix("github:").lstrip("/"), self._github)
        if urlsplit(url).path.endswith(".ref"):
            url = follow_ref(url, await self._read(url))
        return await self._read(url)

    async def _read(self, url: str) -> bytes:
        scheme, _, rest = url.partition("://")
        if scheme in ("http", "https"):
            return await self._download(url)
        if scheme == "file":
            return await asyncio.to_thread(self._read_file, Path(unquote(rest)))
        raise Invalid(f"{url[:200]!r} is not a valid URL of an index: use http(s)://, file:// or github:")

    def _read_file(self, path: Path) -> bytes:
        if self._base_folder is None:
            raise Invalid(f"file:// galleries need a configured folder: {path}")
        try:
            real = path.resolve(strict=True)
            if not real.is_relative_to(self._base_folder.resolve()):
                raise Invalid(f"{path} is outside the gallery folder {self._base_folder} (--gallery-folder)")
            with real.open("rb") as file:
                body = file.read(self._max_bytes + 1)
        except FileNotFoundError as error:
            raise NotFound(f"the file {path} does not exist") from error
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links is a RuntimeError, NUL a ValueError
            raise Failed(f"{path} cannot be read: {error}") from error
        if len(body) > self._max_bytes:
            raise Failed(f"{path} has more than {self._max_bytes} bytes")
        return body


class HttpDownloader:
    """Downloads with aiohttp. Redirects are followed; credentials in a URL are not sent to another host. `check` is
    called with every URL before the request, and raises for a URL that must not be requested."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        max_bytes: int = 32 << 20,
        check: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._session = session
        self._max_bytes = max_bytes
        self._check = check

    async def __call__(self, url: str) -> bytes:
        if self._check is None:
            return await self._get(url)
        for _ in range(_MAX_REDIRECTS):
            await self._check(url)
            found = await self._get(url, follow=False)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise Failed(f"{display_url(url)}: redirected more than {_MAX_REDIRECTS} times")

    @overload
    async def _get(self, url: str) -> bytes: ...

    @overload
    async def _get(self, url: str, *, follow: Literal[False]) -> bytes | str: ...

    async def _get(self, url: str, *, follow: bool = True) -> bytes | str:
        """The body; with `follow` false, the target of a redirect."""
        try:
            async with self._session.get(url, headers={"User-Agent": USER_AGENT}, allow_redirects=follow) as answer:
                if not follow and answer.status in _REDIRECTS and (place := answer.headers.get("Location")):
                    return place
                if answer.status == 404:
                    raise NotFound(f"{display_url(url)}: not found (404)")
                if answer.status >= 400:
                    raise Failed(f"{display_url(url)} answered {answer.status}")
                return await self._body(url, answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unreachable(f"{display_url(url)}: {_reason(error)}") from error

    async def _body(self, url: str, answer: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for block in answer.content.iter_chunked(_BLOCK):
            body += block
            if len(body) > self._max_bytes:
                raise Failed(f"{display_url(url)} has more than {self._max_bytes} bytes")
        return bytes(body)


Stamp = tuple[int, ...]


def stamp_of(url: str) -> Stamp:
    """Changes when the file of a `file://` URL is created, changed or removed; always empty for other URLs.
    Blocking."""
    if not url.startswith("file://"):
        return ()
    path = Path(unquote(url.removeprefix("file://")))
    stamp = _stamp_of_file(path)
    if stamp and path.suffix == ".ref":
        with contextlib.suppress(OSError, Invalid):
            target = follow_ref(url, path.read_bytes()[: _MAX_REF_CHARS + 1])
            stamp += _stamp_of_file(Path(unquote(target.removeprefix("file://"))))
    return stamp


def _stamp_of_file(path: Path) -> Stamp:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


def follow_ref(url: str, body: bytes) -> str:
    """The text of a `.ref` replaces the last segment of its URL."""
    text = body[: _MAX_REF_CHARS + 1].decode("utf-8", errors="replace").strip()
    if not text or len(text) > _MAX_REF_CHARS or any(ord(char) <= 0x20 for char in text):
        raise Invalid(f"{display_url(url)} does not contain a file name")
    if text.startswith("/") or ".." in text.split("/") or "://" in text:
        raise Invalid(f"{display_url(url)} names {text[:100]!r}, which is not in the same folder")
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{text}", fragment=""))


def _reason(error: Exception) -> str:
    """The system's short reason of a failed connection, instead of aiohttp's long text."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        return reason_of(error.os_error)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def display_url(url: str) -> str:
    """The URL without user and password, for errors and logs."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))
