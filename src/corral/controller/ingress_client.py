"""How the controller asks a node's ingress something. Where it is, is the node's own word, so nothing there is trusted:
a redirect is not followed, a bounded part is read, and the token shown is good for that node and that purpose alone."""

from __future__ import annotations

import ssl

import aiohttp

from corral.contract.access import Scope
from corral.controller.access.signing import IngressTokens
from corral.kit.errors import Failed, Unreachable, reason_of
from corral.store.nodes import Node

_TOKEN_LIFE_S = 900.0  # a worker goes by the clock of whichever controller it heard last, and those differ too
_LARGEST_METRICS = 4 * 1024 * 1024


class IngressClient:
    def __init__(self, tokens: IngressTokens, *, timeout_s: float, ca_pem: str) -> None:
        self._tokens = tokens
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._trust = ssl.create_default_context(cadata=ca_pem) if ca_pem else None

    def session(self) -> aiohttp.ClientSession:
        """For one round of questions; close it afterwards."""
        return aiohttp.ClientSession(timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)

    async def get(
        self, http: aiohttp.ClientSession, node: Node, path: str, scope: Scope, *, largest: int
    ) -> tuple[int, bytes]:
        """Status and at most a little over `largest` bytes. Raises what aiohttp raises; `reason` puts it in words."""
        token = self._tokens.sign("controller", [scope], aud=node.id, life_s=_TOKEN_LIFE_S)
        async with http.get(
            f"{node.ingress_url}{path}",
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            allow_redirects=False,
            ssl=self._trust or True,
            # The cluster's certificates are for node ids, not for addresses that anybody could claim.
            server_hostname=node.id if self._trust and node.ingress_url.startswith("https:") else None,
        ) as answer:
            if answer.status != 200:
                return answer.status, b""
            told = bytearray()
            while len(told) <= largest and (piece := await answer.content.read(largest)):
                told += piece
            return 200, bytes(told)

    async def metrics(self, node: Node) -> bytes:
        """The worker's own numbers, for whoever may not open its ingress: Prometheus, say."""
        if not node.ingress_url or node.protocol == 0:
            raise Failed(f"{node.name} offers no metrics")
        try:
            async with self.session() as http:
                status, told = await self.get(http, node, "/metrics", Scope.LOGS, largest=_LARGEST_METRICS)
        except TimeoutError as error:
            raise Unreachable(f"{node.name} did not answer in time at {node.ingress_url}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreachable(f"{node.name} cannot be reached at {node.ingress_url} ({reason(error)})") from error
        if status != 200 or len(told) > _LARGEST_METRICS:
            raise Failed(f"{node.name} answered {status} instead of its metrics")
        return told


def reason(error: Exception) -> str:
    """In few words: the library's own text carries the innards of its TLS context."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not this node's, or not from this cluster's CA"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return "it does not speak TLS"
    if isinstance(error, aiohttp.ClientConnectorError):
        return reason_of(error.os_error)
    return str(error)[:200] or type(error).__name__
