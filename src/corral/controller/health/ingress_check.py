"""Does a node's one port answer where we think it is, and is it that node? Says clearly when not.

Where to look is the node's own word, so nothing there is trusted: a redirect is not followed, little is read, and the
token shown is good for that node alone and for this one question.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence

import aiohttp

from corral.contract.access import Scope
from corral.contract.codec import Message, Undecodable, always, decode
from corral.controller.access.signing import IngressTokens
from corral.controller.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.errors import reason_of
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store import nodes, revisions
from corral.store.api import Store
from corral.store.nodes import Node

log = get_log(__name__)

_LEASE = "ingress-check"
_AT_ONCE = 32
_SURE_AFTER = 4  # failures in a row; a worker that has just been let in still has to fetch its certificate
_SOON_S = 2.0
_LARGEST_ANSWER = 16 * 1024
_TOKEN_LIFE_S = 900.0  # a worker goes by the clock of whichever controller it heard last, and those differ too


class Hello(Message, frozen=True):
    """Of the ingress's answer, what tells whether it is the right one."""

    node_id: str = always(str)


class IngressCheck:
    name = "ingress check"

    def __init__(
        self,
        store: Store,
        tokens: IngressTokens,
        leadership: Leadership,
        clock: Clock,
        *,
        interval_s: float,
        timeout_s: float,
        ca_pem: str,
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._leadership = leadership
        self._clock = clock
        self._interval_s = interval_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._trust = ssl.create_default_context(cadata=ca_pem) if ca_pem else None
        self._failures: dict[str, int] = {}
        self.wake = Wake()

    async def run(self) -> None:
        await run_every("ingress check", self._interval_s, self.look, clock=self._clock, wake=self.wake)

    async def look(self) -> None:
        if not await self._lead():
            return
        async with self._store.read() as tx:
            due = [node for node in await nodes.list_(tx) if _is_checked(node)]
        self._failures = {node.id: self._failures[node.id] for node in due if node.id in self._failures}
        async with aiohttp.ClientSession(
            timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        ) as http:
            for start in range(0, len(due), _AT_ONCE):
                # A large fleet behind a closed firewall takes minutes, one timeout after the other: longer than the
                # lease lasts, unless it is renewed on the way.
                if start and not await self._lead():
                    return
                await self._check(http, due[start : start + _AT_ONCE])
        if self._failures:
            asyncio.get_running_loop().call_later(_SOON_S, self.wake.set)

    async def _lead(self) -> bool:
        return await self._leadership.lead(_LEASE, every_s=self._interval_s)

    async def _check(self, http: aiohttp.ClientSession, due: Sequence[Node]) -> None:
        faults = await asyncio.gather(*(self._try(http, node) for node in due))
        changed = [(node, fault) for node, fault in zip(due, faults, strict=True) if self._is_news(node, fault)]
        if not changed:
            return
        async with self._store.write() as tx:
            await self._leadership.require(tx, _LEASE)
            for node, fault in changed:
                columns = {"ingress_ok": not fault, "ingress_error": fault}
                # Lost against another change: the next round sees the node as it is then.
                await nodes.update(tx, node.id, columns, expected=node.row_version)
            await revisions.bump(tx, "nodes")

    async def _try(self, http: aiohttp.ClientSession, node: Node) -> str:
        """What is wrong, in words; empty when nothing is."""
        try:
            return await self._ask(http, node)
        except TimeoutError:
            return f"{node.ingress_url} does not answer: open its port on {node.name}, or set --advertise there"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return (
                f"{node.ingress_url} cannot be reached ({_reason(error)}): "
                f"open its port, or set --advertise on {node.name}"
            )
        except Exception:  # whatever one node manages to answer, the others are still looked at
            log.exception("ingress check failed", node=node.name)
            return f"{node.ingress_url} could not be checked; the controller's log has the details"

    async def _ask(self, http: aiohttp.ClientSession, node: Node) -> str:
        token = self._tokens.sign("controller", [Scope.PROBE], aud=node.id, life_s=_TOKEN_LIFE_S)
        async with http.get(
            f"{node.ingress_url}/corral/hello",
            headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"},
            allow_redirects=False,
            ssl=self._trust or True,
            # The cluster's certificates are for node ids, not for addresses that anybody could claim.
            server_hostname=node.id if self._trust and node.ingress_url.startswith("https:") else None,
        ) as answer:
            if answer.status != 200:
                return f"{node.ingress_url} answered {answer.status}: is another program or another node there?"
            told = await _beginning_of(answer)
        try:
            hello = decode(Hello, told)
        except Undecodable:
            return f"{node.ingress_url} is answered by something else than a worker; set --advertise on {node.name}"
        if hello.node_id != node.id:
            return f"{node.ingress_url} is answered by another node; set --advertise on {node.name}"
        return ""

    def _is_news(self, node: Node, fault: str) -> bool:
        """Good news at once; bad news when it is sure."""
        if not fault:
            self._failures.pop(node.id, None)
            return node.ingress_ok is not True
        if fault == node.ingress_error:
            self._failures.pop(node.id, None)
            return False
        self._failures[node.id] = self._failures.get(node.id, 0) + 1
        if self._failures[node.id] < _SURE_AFTER:
            return False
        del self._failures[node.id]
        return True


def _is_checked(node: Node) -> bool:
    return node.approved and node.status != "offline" and node.protocol > 0 and bool(node.ingress_url)


async def _beginning_of(answer: aiohttp.ClientResponse) -> bytes:
    told = bytearray()
    while len(told) <= _LARGEST_ANSWER and (piece := await answer.content.read(_LARGEST_ANSWER)):
        told += piece
    return bytes(told)


def _reason(error: Exception) -> str:
    """In few words: the library's own text carries the innards of its TLS context."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not this node's, or not from this cluster's CA"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return "it does not speak TLS"
    if isinstance(error, aiohttp.ClientConnectorError):
        return reason_of(error.os_error)
    return str(error)[:200] or type(error).__name__
