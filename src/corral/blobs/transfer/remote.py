"""HTTP resources to download: opening a response, and translating the errors of aiohttp.

A `Remote` is one resource that can be requested. There are two kinds: a plain URL, and a blob of an image registry,
which needs a token.
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
class HttpTimeouts:
    connect_s: float = 30.0
    stall_s: float = 60.0  # a connection without a byte for so long is dead; there is no limit for the whole transfer


class Remote(Protocol):
    """One resource that can be requested repeatedly, from any offset."""

    @property
    def name(self) -> str:
        """For messages: contains no credentials."""

    @property
    def key(self) -> str:
        """Identifies the resource when its digest is not known."""

    def open(self, headers: Mapping[str, str]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """GET it. Raises `TransferBroken` when the connection fails, another error when a retry is useless."""


class TransferBroken(Exception):
    """The connection failed or the server is busy: a retry may help. Never leaves this package."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


@contextlib.asynccontextmanager
async def open_session(
    times: HttpTimeouts | None = None, *, trust: ssl.SSLContext | None = None, inside: bool = False
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that does not decode response bodies. `inside`: for peers of the cluster, without proxies and without
    logins from .netrc. `trust` None: the system's trusted certificates."""
    times = times or HttpTimeouts()
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
async def translate_errors(what: str) -> AsyncIterator[None]:
    """Translate aiohttp's errors into ours: `TransferBroken` where a retry may help."""
    try:
        yield
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, ValueError) as error:
        raise Invalid(f"{what}: the URL is not valid") from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise Denied(f"{what}: its certificate is not trusted: {error}") from error
    except aiohttp.TooManyRedirects as error:
        raise Failed(f"{what} redirects too many times") from error
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        raise TransferBroken(explain(what, error)) from error


def explain(what: str, error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"{what}: no data received for too long"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"{what} cannot be reached: {error.os_error.strerror or error.os_error}"
    return f"{what}: the connection broke: {mask_secrets(str(error)) or type(error).__name__}"


def refuse_downgrade(response: aiohttp.ClientResponse, requested: URL, what: str) -> None:
    """Raises Denied if an https request was redirected to http: anybody in between could have changed the content."""
    if requested.scheme == "https" and any(hop.scheme != "https" for hop in (*_hops(response), response.url)):
        raise Denied(f"{what} redirects from https to plain http")


def _hops(response: aiohttp.ClientResponse) -> list[URL]:
    return [earlier.url for earlier in response.history]


def display_url(url: str) -> str:
    """A URL without user, password and query, for messages."""
    try:
        return str(URL(url).with_user(None).with_query(None).with_fragment(None))
    except ValueError:
        return url[:100]


@dataclass(frozen=True)
class UrlRemote:
    """A plain URL."""

    session: aiohttp.ClientSession
    url: str
    # Sent to the requested host only: aiohttp drops Authorization on a redirect to another host.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    label: str = ""  # for messages; empty: the URL

    @property
    def name(self) -> str:
        return self.label or display_url(self.url)

    @property
    def key(self) -> str:
        return self.url

    @contextlib.asynccontextmanager
    async def open(self, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        # Only the request is inside: errors of the caller's own code must not be translated.
        async with translate_errors(self.name):
            response = await self.session.get(self.url, headers={**headers, **self.headers})
        async with response:
            refuse_downgrade(response, URL(self.url), self.name)
            yield response


def buffered_bytes(response: aiohttp.ClientResponse) -> list[bytes]:
    """Bytes that had arrived when the connection broke. aiohttp raises before it returns them and has no public access
    to them; if a later version stores them elsewhere, they are fetched again."""
    return list(getattr(response.content, "_buffer", ()))


async def read_bounded(response: aiohttp.ClientResponse, max_bytes: int, what: str) -> bytes:
    """Read a small document. Raises TooLarge for more than `max_bytes`."""
    parts: list[bytes] = []
    size = 0
    while True:
        async with translate_errors(what):
            part = await response.content.readany()
        if not part:
            return b"".join(parts)
        size += len(part)
        if size > max_bytes:
            raise TooLarge(f"{what} is larger than {max_bytes} bytes")
        parts.append(part)
