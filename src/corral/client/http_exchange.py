"""One HTTP/1.1 request and its whole answer, on asyncio's streams: what almost every command needs.

aiohttp, which takes longer to import than such a command to run, serves only what is streamed (`streams.py`). No
redirects, no proxies, no compression; an answer is at most `MAX_BODY_BYTES` long.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from corral.client.errors import BrokenAnswer, ConnectFailed, Disconnected, NotHttp
from corral.kit.errors import Invalid

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 256 * 1024 * 1024  # a list of a thousand nodes has less than 10 MiB
_MAX_IDLE = 4
_MAX_IDLE_S = 15.0  # the gateway closes idle connections later
_CLOSE_S = 1.0
_SECOND_ADDRESS_S = 0.25  # then the next address of a name is tried beside the first
_REPEATABLE = ("GET", "PUT", "DELETE")
_NO_BODY = (204, 304)
_IN_TARGETS = "/?&=%:@!$'()*+,;~[]"
_HEX = frozenset(b"0123456789abcdefABCDEF")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]  # the names in lower case
    body: bytes


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class HttpExchange:
    """Sends requests to one server. A connection that is still open after an answer is used again, but not for a
    request that must not be sent twice: the server may be closing it."""

    def __init__(self, url: str, trust: ssl.SSLContext | None, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self.url = url
        self._trust = trust
        self._name = parts.hostname or ""
        self._port = parts.port or (443 if trust is not None else 80)
        self._prefix = parts.path
        self._headers = {"Host": _host(self._name, parts.port), **headers}
        self._idle: list[tuple[float, _Connection]] = []

    async def request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, body: bytes | None, timeout_s: float
    ) -> Answer:
        """Raises ConnectFailed or ssl.SSLError if nothing was sent; otherwise Disconnected, BrokenAnswer, NotHttp,
        TimeoutError or another OSError."""
        message = _head(method, self._prefix + path, {**self._headers, **(headers or {})}, body) + (body or b"")
        async with asyncio.timeout(timeout_s):
            if method in _REPEATABLE and (idle := self._take_idle()) is not None:
                try:
                    return await self._exchange(idle, message)
                except ConnectionError:
                    pass  # the server closed it between two requests
            return await self._exchange(await self._connect(), message)

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for _, connection in idle:
            await _close(connection)

    async def _connect(self) -> _Connection:
        try:
            opened = await asyncio.open_connection(
                self._name,
                self._port,
                ssl=self._trust,
                limit=MAX_HEAD_BYTES,
                happy_eyeballs_delay=_SECOND_ADDRESS_S,
            )
        except ssl.SSLError:
            raise
        except OSError as error:
            raise ConnectFailed(error) from error
        except UnicodeError as error:
            raise ConnectFailed(OSError(f"{self._name!r} is not a host name")) from error
        return _Connection(*opened)

    async def _exchange(self, connection: _Connection, message: bytes) -> Answer:
        try:
            # Without `drain`: a server that refuses a request may answer before it has read all of it.
            connection.writer.write(message)
            answer, is_reusable = await _read_answer(connection.reader)
        except ssl.SSLError as error:
            connection.writer.transport.abort()
            raise ConnectionAbortedError(str(error)) from error  # not a matter of trust: the handshake is over
        except BaseException:
            connection.writer.transport.abort()
            raise
        if is_reusable and len(self._idle) < _MAX_IDLE:
            self._idle.append((asyncio.get_running_loop().time(), connection))
        else:
            await _close(connection)
        return answer

    def _take_idle(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            since, connection = self._idle.pop()
            if now - since < _MAX_IDLE_S and not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.transport.abort()
        return None


async def _close(connection: _Connection) -> None:
    connection.writer.close()
    try:
        async with asyncio.timeout(_CLOSE_S):
            await connection.writer.wait_closed()
    except OSError:  # a TimeoutError is one
        connection.writer.transport.abort()


def _host(name: str, port: int | None) -> str:
    shown = f"[{name}]" if ":" in name else name
    if not shown.isascii():
        try:
            shown = shown.encode("idna").decode()
        except UnicodeError as error:
            raise Invalid(f"{name!r} is not a host name") from error
    return shown if port is None else f"{shown}:{port}"


def _head(method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    lines = [f"{method} {quote(target, safe=_IN_TARGETS)} HTTP/1.1"]
    for name, value in headers.items():
        if not value.isprintable():
            raise Invalid(f"the {name} header cannot be sent: it contains a control character; check the key")
        lines.append(f"{name}: {value}")
    lines.append("Accept-Encoding: identity")
    if body is not None or method not in ("GET", "DELETE"):
        lines.append(f"Content-Length: {len(body or b'')}")
    return "\r\n".join([*lines, "", ""]).encode()


async def _read_answer(reader: asyncio.StreamReader) -> tuple[Answer, bool]:
    """The answer, and whether its connection can be used again."""
    while True:
        status, is_reusable = await _read_status(reader)
        headers = await _read_fields(reader)
        if status >= 200:
            break
    try:
        body, has_end = await _read_body(reader, status, headers)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise BrokenAnswer from error
    is_closed = "close" in headers.get("connection", "").lower()
    return Answer(status, headers, body), is_reusable and has_end and not is_closed


async def _read_status(reader: asyncio.StreamReader) -> tuple[int, bool]:
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise NotHttp("it does not answer in HTTP/1.1") from error
        raise Disconnected("Server disconnected") from error
    except asyncio.LimitOverrunError as error:
        raise NotHttp("it does not answer in HTTP/1.1") from error
    version, _, rest = line.partition(b" ")
    status = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not status.isdigit() or len(status) < 3 or rest[3:4].isdigit():
        raise NotHttp("it does not answer in HTTP/1.1")
    return int(status), version == b"HTTP/1.1"


async def _read_fields(reader: asyncio.StreamReader) -> dict[str, str]:
    fields: dict[str, str] = {}
    size = 0
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raise BrokenAnswer from error
        except asyncio.LimitOverrunError as error:
            raise NotHttp("its answer has too large a head") from error
        size += len(line)
        if size > MAX_HEAD_BYTES:
            raise NotHttp("its answer has too large a head")
        text = line.decode("utf-8", errors="replace").rstrip("\r\n")
        if not text:
            return fields
        name, colon, value = text.partition(":")
        name, value = name.lower(), value.strip()
        if not colon or not name or name != name.strip():
            raise NotHttp("its answer has a damaged head")
        if name in ("content-length", "transfer-encoding") and fields.get(name, value) != value:
            raise NotHttp("its answer has two lengths")
        fields[name] = value


async def _read_body(reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]) -> tuple[bytes, bool]:
    """The body, and whether it ends before its connection does."""
    if status in _NO_BODY:
        return b"", True
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        if coding.lower() != "chunked" or length is not None:
            raise NotHttp("its answer has an unknown transfer encoding")
        return await _read_chunks(reader), True
    if length is not None:
        if not (length.isascii() and length.isdigit()):
            raise NotHttp("its answer has a damaged length")
        return await reader.readexactly(_checked(int(length[:20]))), True
    pieces = bytearray()
    while piece := await reader.read(MAX_HEAD_BYTES):
        pieces += piece
        _checked(len(pieces))
    return bytes(pieces), False


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        try:
            line = await reader.readuntil(b"\r\n")
        except asyncio.LimitOverrunError as error:
            raise NotHttp("its answer has a damaged chunk") from error
        digits = line.partition(b";")[0].strip()
        if not 0 < len(digits) <= 16 or not _HEX.issuperset(digits):
            raise NotHttp("its answer has a damaged chunk")
        size = int(digits, 16)
        if size == 0:
            await _read_fields(reader)
            return bytes(body)
        _checked(len(body) + size)
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise NotHttp("its answer has a damaged chunk")


def _checked(size: int) -> int:
    if size > MAX_BODY_BYTES:
        raise NotHttp(f"its answer is longer than {MAX_BODY_BYTES >> 20} MiB")
    return size
