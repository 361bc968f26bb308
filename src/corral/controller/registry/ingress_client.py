"""How the controller asks a node's ingress something. Where it is, is the node's own word, so nothing there is trusted:
a redirect is not followed, a bounded part is read, and the token shown is good for that node and that purpose alone."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager

import aiohttp
from yarl import URL

from corral.contract.access import Scope
from corral.controller.access.signing import IngressTokens
from corral.kit.errors import CorralError, Failed, NotFound, Unreachable, reason_of
from corral.store.tables.nodes import Node

OWN_LOG = "/corral/log"  # at the worker
_TOKEN_LIFE_S = 900.0  # a worker goes by the clock of whichever controller it heard last, and those differ too
_LARGEST_METRICS = 4 * 1024 * 1024
_LARGEST_LOGS = 32 * 1024 * 1024  # a thousand lines of the longest kind fit


class IngressClient:
    def __init__(
        self,
        tokens: IngressTokens,
        *,
        timeout_s: float,
        ca_pem: str,
        logs_timeout_s: float = 15.0,
        shared_token: str = "",
    ) -> None:
        """`logs_timeout_s` is the contract's. `shared_token` is what LocalAI workers know us by."""
        self._tokens = tokens
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._logs_timeout_s = logs_timeout_s
        self._shared_token = shared_token
        self._trust = ssl.create_default_context(cadata=ca_pem) if ca_pem else None

    def session(self) -> aiohttp.ClientSession:
        """For one round of questions; close it afterwards."""
        return aiohttp.ClientSession(timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)

    async def get(
        self, http: aiohttp.ClientSession, node: Node, path: str, scope: Scope, *, largest: int
    ) -> tuple[int, bytes]:
        """Status and at most a little over `largest` bytes. Raises what aiohttp raises; `reason` puts it in words."""
        async with self._ask(http, node, path, scope) as answer:
            if answer.status != 200:
                return answer.status, b""
            body = bytearray()
            while len(body) <= largest and (piece := await answer.content.read(largest)):
                body += piece
            return 200, bytes(body)

    def _ask(
        self, http: aiohttp.ClientSession, node: Node, path: str, scope: Scope
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return http.get(
            URL(f"{node.ingress_url}{path}", encoded=True),
            headers={"Authorization": f"Bearer {self._token(node, scope)}", "Accept-Encoding": "identity"},
            allow_redirects=False,
            ssl=self._trust or True,
            # The cluster's certificates are for node ids, not for addresses that anybody could claim.
            server_hostname=node.id if self._trust and node.ingress_url.startswith("https:") else None,
        )

    def _token(self, node: Node, scope: Scope) -> str:
        if node.shares_token:  # LocalAI's, which knows one token only
            return self._shared_token
        return self._tokens.sign("controller", [scope], aud=node.id, life_s=_TOKEN_LIFE_S)

    @contextlib.asynccontextmanager
    async def tunnel(
        self, node: Node, path: str, headers: list[tuple[bytes, bytes]]
    ) -> AsyncIterator[tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]]:
        """A WebSocket of the node's: the head of its answer, and both directions. `headers` are the handshake's."""
        where = URL(_with_ingress(node).ingress_url)
        trust = (self._trust or ssl.create_default_context()) if where.scheme == "https" else None
        name = node.id if self._trust is not None else where.host
        lines = [
            f"GET {path} HTTP/1.1\r\nhost: {where.raw_authority}\r\n".encode(),
            f"authorization: Bearer {self._token(node, Scope.LOGS)}\r\n".encode(),
            b"upgrade: websocket\r\nconnection: Upgrade\r\n",
            *(key + b": " + value + b"\r\n" for key, value in headers),
            b"\r\n",
        ]
        with _in_words(node):
            async with asyncio.timeout(self._logs_timeout_s):
                reader, writer = await asyncio.open_connection(
                    where.host, where.port, ssl=trust, server_hostname=name if trust is not None else None
                )
        try:
            with _in_words(node):
                async with asyncio.timeout(self._logs_timeout_s):
                    writer.writelines(lines)
                    head = await reader.readuntil(b"\r\n\r\n")
            if head.split(b" ", 2)[1:2] != [b"101"]:
                raise Failed(f"{node.name} answered {head[:40]!r} instead of its log")
            yield head, reader, writer
        finally:
            writer.close()

    async def logs(self, node: Node, path: str) -> bytes:
        """JSON of its own, about what its backends wrote."""
        with _in_words(node):
            async with asyncio.timeout(self._logs_timeout_s), self.session() as http:
                status, body = await self.get(http, _with_ingress(node), path, Scope.LOGS, largest=_LARGEST_LOGS)
        if status != 200 or len(body) > _LARGEST_LOGS:
            raise _without_logs(node, path, status)
        return body

    async def follow(self, node: Node, path: str) -> AsyncGenerator[bytes, None]:
        """The same, on and on, until either side leaves. What fails before the first byte is raised here."""
        stack = contextlib.AsyncExitStack()
        try:
            with _in_words(node):
                endless = aiohttp.ClientTimeout(total=None, sock_connect=self._logs_timeout_s)
                http = await stack.enter_async_context(
                    aiohttp.ClientSession(timeout=endless, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)
                )
                async with asyncio.timeout(self._logs_timeout_s):
                    asking = self._ask(http, _with_ingress(node), path, Scope.LOGS)
                    answer = await stack.enter_async_context(asking)
            if answer.status != 200:
                raise _without_logs(node, path, answer.status)
        except BaseException:
            await stack.aclose()
            raise
        return _pieces(answer, stack)

    async def metrics(self, node: Node) -> bytes:
        """The metrics of the worker, for clients such as Prometheus that may not open its ingress."""
        if not node.ingress_url or node.protocol == 0:
            raise Failed(f"{node.name} offers no metrics")
        with _in_words(node):
            async with self.session() as http:
                status, body = await self.get(http, node, "/metrics", Scope.LOGS, largest=_LARGEST_METRICS)
        if status != 200 or len(body) > _LARGEST_METRICS:
            raise Failed(f"{node.name} answered {status} instead of its metrics")
        return body


def _without_logs(node: Node, path: str, status: int) -> CorralError:
    if status == 404 and path.startswith(OWN_LOG):
        return NotFound(
            f"the worker of {node.name} is of an earlier version of Corral, which does not offer its own log; "
            "upgrade it, or read the log on that machine"
        )
    return Failed(f"{node.name} answered {status} instead of its logs")


def _with_ingress(node: Node) -> Node:
    if not node.ingress_url:
        raise NotFound(f"{node.name} has no ingress to ask for logs")
    return node


@contextlib.contextmanager
def _in_words(node: Node) -> Iterator[None]:
    """What the library raises, as ours."""
    try:
        yield
    except TimeoutError as error:
        raise Unreachable(f"{node.name} did not answer in time at {node.ingress_url}") from error
    except (aiohttp.ClientError, OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
        raise Unreachable(f"{node.name} cannot be reached at {node.ingress_url} ({reason(error)})") from error


async def _pieces(answer: aiohttp.ClientResponse, stack: contextlib.AsyncExitStack) -> AsyncGenerator[bytes, None]:
    async with stack:
        with contextlib.suppress(aiohttp.ClientError, OSError):  # the node is gone: so is its log
            async for piece in answer.content.iter_any():
                yield piece


def reason(error: Exception) -> str:
    """In few words: the library's own text carries the innards of its TLS context."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not this node's, or not from this cluster's CA"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return "it does not speak TLS"
    if isinstance(error, aiohttp.ClientConnectorError):
        return reason_of(error.os_error)
    return str(error)[:200] or type(error).__name__
