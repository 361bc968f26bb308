"""The controller's node API as Python calls (docs/reference/wire/nodes.md#node-api). This module sends and decodes;
what an error response means is `join/responses.py`."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from corral import __version__
from corral.contract.codec import Message, Undecodable, always, decode, encode
from corral.contract.messages.artifacts import ArtifactOffer, ArtifactRequest
from corral.contract.messages.blobs import AnnounceBlobs, BlobHints
from corral.contract.messages.nodes import HeartbeatReceived, HttpHeartbeat, NodeRegistered, RegisterNode
from corral.kit.errors import CorralError
from corral.kit.log import get_log

log = get_log(__name__)
T = TypeVar("T")
MAX_RESPONSE_BYTES = 1 << 20


class ControllerUnreachable(CorralError):
    """No response, or none that can be decoded. The call may or may not have happened; every call may be repeated."""

    code = "controller_away"


class ErrorResponse(CorralError):
    """The controller responded with a status other than 2xx."""

    code = "answered"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RefreshCredentials(Message, frozen=True):
    csr: str = ""


class ReplicaInFlight(Message, frozen=True):
    """The one field of a replica that leaving waits for."""

    in_flight: int = always(int)


class ControllerApi:
    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self._base_url = base_url.rstrip("/")

    async def register(self, body: RegisterNode) -> NodeRegistered:
        reply = await self._post("/api/node/register", body.token, body, NodeRegistered)
        if not reply.id:
            raise ControllerUnreachable("the controller's response to the registration names no node")
        return reply

    async def credentials(self, node_id: str, token: str, *, csr: str = "") -> NodeRegistered:
        path = f"/api/node/{node_id}/credentials"
        return await self._post(path, token, RefreshCredentials(csr=csr), NodeRegistered)

    async def heartbeat(self, node_id: str, token: str, beat: HttpHeartbeat) -> HeartbeatReceived:
        return await self._post(f"/api/node/{node_id}/heartbeat", token, beat, HeartbeatReceived)

    async def announce_blobs(self, node_id: str, token: str, announced: AnnounceBlobs) -> BlobHints:
        return await self._post(f"/api/node/{node_id}/blobs", token, announced, BlobHints)

    async def artifacts(self, node_id: str, token: str, request: ArtifactRequest) -> ArtifactOffer:
        return await self._post(f"/api/node/{node_id}/artifacts", token, request, ArtifactOffer)

    async def drain(self, node_id: str, token: str) -> None:
        await self._send("POST", f"/api/node/{node_id}/drain", token, None)

    async def deregister(self, node_id: str, token: str) -> None:
        await self._send("POST", f"/api/node/{node_id}/deregister", token, None)

    async def in_flight(self, node_id: str, token: str) -> int:
        """How many requests the controller counts on this node's replicas."""
        answer = await self._send("GET", f"/api/node/{node_id}/models", token, None)
        rows = _read(list[ReplicaInFlight], answer if answer.strip() not in (b"", b"null") else b"[]")
        return sum(row.in_flight for row in rows)

    async def _post(self, path: str, token: str, body: Message, kind: type[T]) -> T:
        return _read(kind, await self._send("POST", path, token, body))

    async def _send(self, method: str, path: str, token: str, body: Message | None) -> bytes:
        request_id = secrets.token_hex(8)  # the controller logs it too
        headers = {
            "Authorization": f"Bearer {token}",
            "User-Agent": f"corral-worker/{__version__}",
            "X-Request-Id": request_id,
        }
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with self._session.request(
                method,
                self._base_url + path,
                data=encode(body) if body is not None else None,
                headers=headers,
                allow_redirects=False,  # a redirect must not carry the token to another server
            ) as answer:
                content = await _read_bounded(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ControllerUnreachable(f"{self._base_url} cannot be reached: {_reason(error)}") from error
        log.debug("controller called", path=path, status=answer.status, request_id=request_id)
        if 200 <= answer.status < 300:
            return content
        if 300 <= answer.status < 400:
            raise ErrorResponse(answer.status, answer.headers.get("Location", "nowhere"))
        raise ErrorResponse(answer.status, error_message(content))


@asynccontextmanager
async def open_controller(
    base_url: str, *, timeout_s: float, trust: ssl.SSLContext | None
) -> AsyncIterator[ControllerApi]:
    """`trust` None: the certificates that the system trusts."""
    connector = aiohttp.TCPConnector(ssl=trust if trust is not None else True, limit=8)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        yield ControllerApi(session, base_url)


async def _read_bounded(answer: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for piece in answer.content.iter_chunked(1 << 16):
        content += piece
        if len(content) > MAX_RESPONSE_BYTES:
            raise ValueError(f"the response is longer than {MAX_RESPONSE_BYTES} bytes")
    return bytes(content)


def _read(kind: type[T], content: bytes) -> T:
    try:
        return decode(kind, content)
    except Undecodable as error:
        raise ControllerUnreachable(f"the controller's response cannot be decoded: {error}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "no response in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted ({error.certificate_error}); is --ca right?"
    return str(error) or type(error).__name__


def error_message(body: bytes, limit: int = 400) -> str:
    """The message of an error response, ours or LocalAI's: `{"error":{"message":…}}` or `{"error":"…"}`."""
    text = body.decode(errors="replace").strip()
    try:
        error = msgspec.json.decode(body)["error"]
        text = error if isinstance(error, str) else str(error["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        pass  # a proxy's page, or nothing: show the body
    one_line = " ".join(text.split())
    return (one_line if len(one_line) <= limit else one_line[:limit] + "…") or "no reason given"
