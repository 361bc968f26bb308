"""Where bytes come from over HTTP: opening an answer, and translating what the driver raises.

A `Remote` knows how to ask for one thing; a registry's asks with a token, a plain URL's just asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
from yarl import URL

from corral import __version__
from corral.blobs.errors import TooLarge
from corral.kit.errors import Denied, Failed, Invalid
from corral.kit.log import mask_secrets

READ_BYTES = 1 << 20


@dataclass(frozen=True)
class HttpTimes:
    connect_s: float = 30.0
    stall_s: float = 60.0  # a line on which nothing came for so long is dead; there is no limit for the whole


class Remote(Protocol):
    """One thing that can be asked for again and again, from any place on."""

    @property
    def name(self) -> str:
        """For people: no credentials in it."""

    @property
    def key(self) -> str:
        """Tells this thing from others, when its digest is not known."""

    def ask(self, headers: Mapping[str, str]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """GET it. Raises `Broken` when the line fails, another error of ours when asking again is no use."""


class Broken(Exception):
    """The line failed, or the other side is busy: asking again may help. Never leaves this room."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


@contextlib.asynccontextmanager
async def open_session(
    times: HttpTimes | None = None, *, trust: ssl.SSLContext | None = None, inside: bool = False
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose answers come as the bytes that are stored, not decoded on the way. `inside` the cluster there is
    no proxy between us, and nobody's login from a file is shown; `trust` None means what the system trusts."""
    times = times or HttpTimes()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=times.connect_s, sock_read=times.stall_s)
    async with aiohttp.ClientSession(
        auto_decompress=False,
        headers={"User-Agent": f"corral/{__version__}", "Accept-Encoding": "identity"},
        timeout=timeout,
        read_bufsize=READ_BYTES,
        trust_env=not inside,
        connector=aiohttp.TCPConnector(ssl=trust if trust is not None else True),
        # A token endpoint must not be able to plant cookies that follow us to other hosts.
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        yield session


@contextlib.asynccontextmanager
async def translated(what: str) -> AsyncIterator[None]:
    """The driver's errors as ours: `Broken` where another try may help."""
    try:
        yield
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, ValueError) as error:
        raise Invalid(f"{what}: not a URL one can ask") from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise Denied(f"{what}: its certificate is not trusted: {error}") from error
    except aiohttp.TooManyRedirects as error:
        raise Failed(f"{what} redirects without end") from error
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        raise Broken(explain(what, error)) from error


def explain(what: str, error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"{what}: nothing came for too long"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"{what} cannot be reached: {error.os_error.strerror or error.os_error}"
    return f"{what}: the line broke: {mask_secrets(str(error)) or type(error).__name__}"


def refuse_downgrade(response: aiohttp.ClientResponse, asked: URL, what: str) -> None:
    """Encrypted when asked and plain when answered: somebody between could have put anything there."""
    if asked.scheme == "https" and any(hop.scheme != "https" for hop in (*_hops(response), response.url)):
        raise Denied(f"{what} redirects from https to plain http")


def _hops(response: aiohttp.ClientResponse) -> list[URL]:
    return [earlier.url for earlier in response.history]


def shown(url: str) -> str:
    """A URL without user, password and query, for messages."""
    try:
        return str(URL(url).with_user(None).with_query(None).with_fragment(None))
    except ValueError:
        return url[:100]


@dataclass(frozen=True)
class Page:
    """A plain URL."""

    session: aiohttp.ClientSession
    url: str
    # Only to the host that was asked: whoever it sends us on to does not see an Authorization (aiohttp drops it).
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return shown(self.url)

    @property
    def key(self) -> str:
        return self.url

    @contextlib.asynccontextmanager
    async def ask(self, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        # Only the asking is translated: what the caller does with the answer may fail in ways of its own.
        async with translated(self.name):
            response = await self.session.get(self.url, headers={**headers, **self.headers})
        async with response:
            refuse_downgrade(response, URL(self.url), self.name)
            yield response


def unread(response: aiohttp.ClientResponse) -> list[bytes]:
    """What had arrived when the line broke. The driver raises before it hands that out, and has no public way to it;
    where it keeps it elsewhere one day, it is merely fetched again."""
    return list(getattr(response.content, "_buffer", ()))


async def read_bounded(response: aiohttp.ClientResponse, most_bytes: int, what: str) -> bytes:
    """A small document, and never more than that."""
    parts: list[bytes] = []
    size = 0
    while True:
        async with translated(what):
            part = await response.content.readany()
        if not part:
            return b"".join(parts)
        size += len(part)
        if size > most_bytes:
            raise TooLarge(f"{what} is larger than {most_bytes} bytes")
        parts.append(part)
