"""One GET without asyncio, for the lists of the CLI (`cli/lists.py`): importing asyncio takes longer than they run.

Reads only what needs no decision: every other answer and every error is None, and the caller repeats the request with
the whole client, which knows what they mean. A server that is silent is not asked twice.
"""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corral.client.endpoint import Endpoint

_MAX_BYTES = 256 << 20


def get(endpoint: Endpoint, path: str, timeout_s: float) -> bytes | None:
    """The body of the answer 200. `path` is sent as it is; `timeout_s` is for the connection, then for the answer.
    Raises TimeoutError when that is over."""
    scheme, _, rest = endpoint.url.partition("://")
    authority, slash, prefix = rest.partition("/")
    name, port = _split(authority, 443 if scheme == "https" else 80)
    request = (
        f"GET {slash}{prefix}{path} HTTP/1.1\r\nHost: {authority}\r\nAuthorization: Bearer {endpoint.key}\r\n"
        "Accept: application/json\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
    )
    if port == 0 or not request.isascii() or not (endpoint.key + authority + prefix).isprintable() or " " in rest:
        return None
    try:
        host = name.encode("ascii")  # as text it is encoded as IDNA, which is a module of its own
        with socket.create_connection((host, port), timeout=timeout_s) as plain:  # type: ignore[arg-type]  # takes bytes
            if scheme == "http":
                return _body(_exchange(plain, request, timeout_s))
            with _secured(plain, endpoint, host) as connection:
                return _body(_exchange(connection, request, timeout_s))
    except TimeoutError:
        raise
    except (OSError, ValueError, EOFError):
        return None


def _split(authority: str, default: int) -> tuple[str, int]:
    name, colon, digits = authority.rpartition(":")
    if not colon or authority.endswith("]"):
        name, digits = authority, str(default)
    return name.strip("[]"), int(digits) if digits.isdecimal() else 0


def _secured(plain: socket.socket, endpoint: Endpoint, host: bytes) -> socket.socket:
    """As `trust_of` in `connection.py`, without its messages. Raises OSError or ValueError."""
    import ssl

    from corral.kit.ca_pin import is_pin, trust_context

    if is_pin(endpoint.ca):
        raise ValueError("a pinned CA is fetched by the whole client")
    if endpoint.ca:
        with open(endpoint.ca, encoding="utf-8") as file:
            context = trust_context(file.read())
    else:
        context = ssl.create_default_context()
    context.check_hostname = not endpoint.any_name
    return context.wrap_socket(plain, server_hostname=host)


def _exchange(connection: socket.socket, request: str, timeout_s: float) -> bytes:
    until = time.monotonic() + timeout_s
    connection.sendall(request.encode("ascii"))
    pieces, size = [], 0
    while piece := connection.recv(1 << 18):
        # The timeout of a socket is for each piece: a server could send a byte a second for ever.
        if time.monotonic() > until:
            raise TimeoutError("the answer takes too long")
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_BYTES:
            raise ValueError("the answer is too long")
    return b"".join(pieces)


def _body(answer: bytes) -> bytes | None:
    """Of an answer whose connection was closed after it. None unless it is whole and has the status 200."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    if not blank or not status.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
        return None
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if len(fields) != len(lines):
        return None  # a field twice, such as two lengths
    if b"transfer-encoding" in fields:
        return _joined(body) if fields[b"transfer-encoding"].lower() == b"chunked" else None
    return body if fields.get(b"content-length") == str(len(body)).encode() else None


def _joined(body: bytes) -> bytes | None:
    """The chunks as one. Raises ValueError for a size that is not hexadecimal."""
    pieces: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].partition(b";")[0], 16)
        at = end + 2 + size + 2
        if size < 0 or at > len(body):
            return None
        if size == 0:
            return b"".join(pieces)
        pieces.append(body[end + 2 : at - 2])
