"""`/ws/nodes/:id/backend-logs/:model`: a WebSocket passed through to the node's own
(docs/reference/wire/http-nodes.md#backend-logs).

The bytes are the worker's and the client's; of the worker's, user and password of URLs are hidden. So uvicorn is given
this in place of a library for WebSockets: who may come in, and where the connection leads, is all that is decided.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from litestar.connection import ASGIConnection

from corral.contract.codec import encode
from corral.controller.access.keys import Access
from corral.controller.access.principal import Principal, Role, require
from corral.controller.api.auth import authenticate
from corral.controller.api.errors import status_of
from corral.controller.api.logs import LOGS
from corral.controller.api.redacted_frames import pass_redacted
from corral.controller.registry.ingress_client import IngressClient
from corral.controller.registry.nodes import NodeAdmin
from corral.kit.errors import CorralError, Denied, Invalid, NotFound
from corral.kit.log import get_log
from corral.kit.redact import redact_url_bytes
from corral.kit.tasks import run_until_first_ends

log = get_log(__name__)
_HEAD_BYTES = 64 * 1024
_PIECE = 64 * 1024
# Without `sec-websocket-extensions`: what is compressed cannot be redacted.
_HANDSHAKE = (b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-protocol")


class TunnelRequest(NamedTuple):
    """The upgrade request."""

    node: str
    model: str  # percent-encoded, as it came
    headers: list[tuple[bytes, bytes]]

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")


class LogTunnels:
    """`async with`: leaving the block closes all connections. `protocol` is an argument for uvicorn."""

    def __init__(
        self, access: Access, nodes: NodeAdmin, ingresses: IngressClient, *, recheck_s: float = 15.0, most: int = 256
    ) -> None:
        """`recheck_s`: how soon a key that was revoked is noticed."""
        self._access = access
        self._nodes = nodes
        self._ingresses = ingresses
        self._recheck_s = recheck_s
        self._most = most
        self._open: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> LogTunnels:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def protocol(self, **_of_uvicorn: object) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=_HEAD_BYTES), self._connected)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except CorralError as error:
            _refuse(writer, status_of(error), error)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is gone, or is none
        except Exception:
            log.exception("a log tunnel failed")
        finally:
            self._open.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = read_request(await reader.readuntil(b"\r\n\r\n"))
        principal = await self._admit(request)
        node = await self._nodes.node(request.node)
        shown = [(name, value) for name, value in request.headers if name in _HANDSHAKE]
        async with self._ingresses.tunnel(node, f"{LOGS}/{request.model}/ws", shown) as (head, from_node, to_node):
            writer.write(head)
            await run_until_first_ends(
                _pass_on(reader, to_node), pass_redacted(from_node, writer), self._until_unwelcome(principal)
            )

    async def _admit(self, request: TunnelRequest) -> Principal:
        if len(self._open) > self._most:
            raise Denied(f"{self._most} others follow logs already")
        # A browser sends its cookies with a WebSocket that any page opens, and says which page that was.
        origin = request.header(b"origin").decode(errors="replace")
        hosts = {request.header(name).decode(errors="replace") for name in (b"host", b"x-forwarded-host")}
        if origin and urlsplit(origin).netloc not in hosts - {""}:
            raise Denied("the Origin is another host than this one")
        scope: Any = {"type": "websocket", "path": "/", "headers": request.headers, "query_string": b"", "state": {}}
        principal = await authenticate(ASGIConnection(scope), self._access)
        require(principal, Role.VIEWER)
        return principal

    async def _until_unwelcome(self, principal: Principal) -> None:
        welcome = True
        while welcome:
            await asyncio.sleep(self._recheck_s)
            with contextlib.suppress(CorralError):  # the database is away: no reason to think otherwise of anybody
                welcome = await self._access.is_welcome(principal)


def read_request(head: bytes) -> TunnelRequest:
    """Uvicorn has parsed it once already: names are in lower case, and it is an upgrade to WebSocket."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    parts = (words[1] if len(words) > 1 else "").partition("?")[0].split("/")
    # "", ws, nodes, NODE, backend-logs, MODEL (which may have slashes of its own)
    if parts[1:3] != ["ws", "nodes"] or len(parts) < 6 or parts[4] != "backend-logs" or not parts[5]:
        raise NotFound("there is no such WebSocket here")
    pairs = [line.partition(":") for line in lines if line]
    headers = [(name.strip().lower().encode("latin-1"), value.strip().encode("latin-1")) for name, _, value in pairs]
    request = TunnelRequest(unquote(parts[3]), "%2F".join(parts[5:]), headers)
    if not request.header(b"sec-websocket-key"):
        raise Invalid("the WebSocket request has no key")
    return request


def _refuse(writer: asyncio.StreamWriter, status: int, error: CorralError) -> None:
    body = redact_url_bytes(encode({"error": {"code": status, "message": error.message, "type": "node_error"}}))
    head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"connection: close\r\n\r\n" + body)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
