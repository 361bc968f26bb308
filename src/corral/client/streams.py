"""Streamed answers and uploads, through aiohttp. Imported at the first use: the import takes longer than most commands.

aiohttp's errors become those of `errors.py`.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from corral.client.errors import BrokenAnswer, ConnectFailed, Disconnected


class StreamedAnswer:
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer
        self.status = answer.status
        self.headers = answer.headers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._answer.__aexit__(kind, error, trace)

    async def read(self) -> bytes:
        with _translated_errors():
            return await self._answer.read()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        with _translated_errors():
            async for piece in self._answer.content.iter_any():
                yield piece


class Streams:
    def __init__(self, url: str, trust: ssl.SSLContext | None, headers: Mapping[str, str]) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            # True: aiohttp's default, for plain http.
            connector=aiohttp.TCPConnector(ssl=trust if trust is not None else True),
            headers=headers,
        )

    async def send(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        total_s: float | None = None,
        connect_s: float | None = None,
        silence_s: float | None = None,
    ) -> StreamedAnswer:
        """Send a request; returns at the head of the answer."""
        timeout = aiohttp.ClientTimeout(total=total_s, connect=connect_s, sock_read=silence_s)
        # Already encoded: encoding again would split names with slashes or dots into segments.
        url = URL(self._url + path, encoded=True)
        with _translated_errors():
            return StreamedAnswer(
                # Never follow a redirect: the key must not be sent to another host.
                await self._session.request(
                    method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
                )
            )

    async def close(self) -> None:
        await self._session.close()


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except aiohttp.ClientError as error:
        raise _translate(error) from error


def _translate(error: aiohttp.ClientError) -> Exception:
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return error.certificate_error
        case aiohttp.ClientConnectorSSLError():
            return ssl.SSLError(str(error))
        case aiohttp.ClientConnectorError():
            return ConnectFailed(error.os_error)
        case aiohttp.ClientPayloadError():
            return BrokenAnswer()
        case aiohttp.ServerDisconnectedError():
            return Disconnected("Server disconnected")
        case TimeoutError():
            return TimeoutError()
        case _:
            return OSError(str(error) or type(error).__name__)
