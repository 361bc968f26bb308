"""Brings an index's bytes from where a gallery says it is (docs/reference/wire/gallery.md#gallery-sources). Reading
them is `entries.py`'s."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal, Protocol, overload
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

import aiohttp

from corral import __version__
from corral.contract.sources import RAW_GITHUB, github_url
from corral.kit.errors import Failed, Invalid, NotFound, Unreachable, reason_of

USER_AGENT = f"Corral/{__version__} ({sys.platform}; {platform.machine()})"
_LONGEST_REF = 1024
_BLOCK = 1 << 16
_MOST_HOPS = 6
_REDIRECTS = (301, 302, 303, 307, 308)


class Download(Protocol):
    async def __call__(self, url: str) -> bytes:
        """The body of an http(s) URL. Raises NotFound, Failed or Unreachable."""


class IndexFetcher:
    """`http(s)://`, `github:` and `file://`, each with or without `.ref`."""

    def __init__(
        self,
        download: Download,
        *,
        base_folder: Path | None = None,
        most_bytes: int = 32 << 20,
        github: str = RAW_GITHUB,
    ) -> None:
        self._download = download
        self._base_folder = base_folder
        self._most_bytes = most_bytes
        self._github = github

    async def fetch(self, url: str) -> bytes:
        """Raises Invalid for what can never be read, else what the download raises."""
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
        raise Invalid(f"{url[:200]!r} is not where an index can be; write http(s)://, file:// or github:")

    def _read_file(self, path: Path) -> bytes:
        if self._base_folder is None:
            raise Invalid(f"file:// galleries need a folder they may be in: {path}")
        try:
            real = path.resolve(strict=True)
            if not real.is_relative_to(self._base_folder.resolve()):  # nothing is in a folder that is not there
                may = f"{self._base_folder}, where galleries may be"
                raise Invalid(f"{path} is outside {may}; --gallery-folder names another")
            with real.open("rb") as file:
                body = file.read(self._most_bytes + 1)
        except FileNotFoundError as error:
            raise NotFound(f"there is no {path}") from error
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links is a RuntimeError, NUL a ValueError
            raise Failed(f"{path} cannot be read: {error}") from error
        if len(body) > self._most_bytes:
            raise Failed(f"{path} has more than {self._most_bytes} bytes")
        return body


class HttpDownload:
    """Over aiohttp. Redirects are followed; credentials in a URL do not travel to another host. `check` is asked about
    every URL before anybody is sent there, and raises for one nobody may be sent to."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        most_bytes: int = 32 << 20,
        check: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._session = session
        self._most_bytes = most_bytes
        self._check = check

    async def __call__(self, url: str) -> bytes:
        if self._check is None:
            return await self._get(url)
        for _ in range(_MOST_HOPS):
            await self._check(url)
            found = await self._get(url, follow=False)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise Failed(f"{shown_url(url)}: redirected more than {_MOST_HOPS} times")

    @overload
    async def _get(self, url: str) -> bytes: ...

    @overload
    async def _get(self, url: str, *, follow: Literal[False]) -> bytes | str: ...

    async def _get(self, url: str, *, follow: bool = True) -> bytes | str:
        """The body; without following, where it leads."""
        try:
            async with self._session.get(url, headers={"User-Agent": USER_AGENT}, allow_redirects=follow) as answer:
                if not follow and answer.status in _REDIRECTS and (place := answer.headers.get("Location")):
                    return place
                if answer.status == 404:
                    raise NotFound(f"{shown_url(url)}: there is nothing (404)")
                if answer.status >= 400:
                    raise Failed(f"{shown_url(url)} answered {answer.status}")
                return await self._body(url, answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unreachable(f"{shown_url(url)}: {_words(error)}") from error

    async def _body(self, url: str, answer: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for block in answer.content.iter_chunked(_BLOCK):
            body += block
            if len(body) > self._most_bytes:
                raise Failed(f"{shown_url(url)} has more than {self._most_bytes} bytes")
        return bytes(body)


Stamp = tuple[int, ...]


def stamp_of(url: str) -> Stamp:
    """Changes when the file a `file://` URL leads to changes, comes or goes; always empty for other URLs. Blocks for as
    long as the disk does."""
    if not url.startswith("file://"):
        return ()
    path = Path(unquote(url.removeprefix("file://")))
    stamp = _stamp_of_file(path)
    if stamp and path.suffix == ".ref":
        with contextlib.suppress(OSError, Invalid):
            target = follow_ref(url, path.read_bytes()[: _LONGEST_REF + 1])
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
    text = body[: _LONGEST_REF + 1].decode("utf-8", errors="replace").strip()
    if not text or len(text) > _LONGEST_REF or any(ord(char) <= 0x20 for char in text):
        raise Invalid(f"{shown_url(url)} does not name a file")
    if text.startswith("/") or ".." in text.split("/") or "://" in text:
        raise Invalid(f"{shown_url(url)} names {text[:100]!r}, which is not beside it")
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{text}", fragment=""))


def _words(error: Exception) -> str:
    """The system's few words where a connection failed, instead of the library's long ones."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        return reason_of(error.os_error)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def shown_url(url: str) -> str:
    """Without user and password: errors are shown to people and logged."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))
