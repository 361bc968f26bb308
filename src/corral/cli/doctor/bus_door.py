"""Knocks at the bus as a stranger: does it answer, is it closed to those without credentials?"""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import suppress
from urllib.parse import urlsplit

from corral.cli.doctor.findings import Finding, fail, ok

_HELLO = b'CONNECT {"verbose":false,"pedantic":false,"lang":"corral-doctor","version":"1","protocol":1}\r\nPING\r\n'


async def check_bus_door(url: str, *, timeout_s: float = 5.0) -> Finding:
    try:
        async with asyncio.timeout(timeout_s):
            return await _knock(url)
    except TimeoutError:
        return fail("bus door", f"{url} does not answer", "see <data>/logs/bus.log")
    except (OSError, ValueError) as error:
        return fail("bus door", f"{url}: {error}", "is the bus running? see <data>/logs/bus.log")


async def _knock(url: str) -> Finding:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname or "127.0.0.1", parts.port or 4222)
    try:
        hello = await reader.readline()
        if not hello.startswith(b"INFO "):
            return fail("bus door", f"{url} is not a NATS server", "another program has the port: choose --bus-port")
        info = json.loads(hello.removeprefix(b"INFO "))
        words = f"NATS {info.get('version', '?')} at {url}"
        if parts.scheme == "tls" and not info.get("tls_required"):
            return fail("bus door", f"{words} has no TLS", "restart `corral up --lan`")
        if info.get("tls_required"):
            blind = ssl.create_default_context()  # we show no secret and believe nothing: who it is does not matter
            blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
            await writer.start_tls(blind)
        writer.write(_HELLO)
        with suppress(ConnectionError):  # it may close before it has read everything
            await writer.drain()
        return _verdict(words, url, await _answer(reader))
    finally:
        writer.close()
        with suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The first line that says whether we are in. An INFO in between is only news."""
    try:
        while (line := await reader.readline()).startswith(b"INFO "):
            pass
    except ConnectionError:
        return b""
    return line


def _verdict(words: str, url: str, line: bytes) -> Finding:
    if line.startswith(b"PONG"):
        return fail(
            "bus door",
            f"{words} lets anybody in without credentials",
            "give it accounts or users: whoever reaches the port can command every node",
        )
    if b"Authorization" in line or not line:
        return ok("bus door", f"{words} is closed to strangers")
    return fail("bus door", f"{url} answers {line!r}", "see <data>/logs/bus.log")
