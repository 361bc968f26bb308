"""Connects to the bus without credentials: the bus must answer, and must refuse the connection."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import suppress
from urllib.parse import urlsplit

from corral.cli.doctor.findings import Finding, fail, ok

_HELLO = b'CONNECT {"verbose":false,"pedantic":false,"lang":"corral-doctor","version":"1","protocol":1}\r\nPING\r\n'


async def check_bus_access(url: str, *, timeout_s: float = 5.0) -> Finding:
    try:
        async with asyncio.timeout(timeout_s):
            return await _probe(url)
    except TimeoutError:
        return fail("bus access", f"the bus at {url} does not answer", "read <data>/logs/bus.log")
    except (OSError, ValueError) as error:
        return fail("bus access", f"{url}: {error}", "check that the bus is running; read <data>/logs/bus.log")


async def _probe(url: str) -> Finding:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname or "127.0.0.1", parts.port or 4222)
    try:
        hello = await reader.readline()
        if not hello.startswith(b"INFO "):
            return fail(
                "bus access",
                f"{url} is not a NATS server",
                "another program uses the port: choose another with --bus-port",
            )
        info = json.loads(hello.removeprefix(b"INFO "))
        server = f"NATS {info.get('version', '?')} at {url}"
        if parts.scheme == "tls" and not info.get("tls_required"):
            return fail("bus access", f"{server} does not use TLS", "restart `corral up --lan`")
        if info.get("tls_required"):
            # The check sends no secret and trusts no answer, so the certificate does not matter.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            await writer.start_tls(context)
        writer.write(_HELLO)
        with suppress(ConnectionError):  # the server may close before it has read everything
            await writer.drain()
        return _verdict(server, url, await _answer(reader))
    finally:
        writer.close()
        with suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The first line that accepts or refuses the connection. Further INFO lines are skipped."""
    try:
        while (line := await reader.readline()).startswith(b"INFO "):
            pass
    except ConnectionError:
        return b""
    return line


def _verdict(server: str, url: str, line: bytes) -> Finding:
    if line.startswith(b"PONG"):
        return fail(
            "bus access",
            f"{server} accepts clients without credentials",
            "configure accounts or users on it: every client that reaches the port can control every node",
        )
    if b"Authorization" in line or not line:
        return ok("bus access", f"{server} refuses clients without credentials")
    return fail("bus access", f"{url} answers {line!r}", "read <data>/logs/bus.log")
