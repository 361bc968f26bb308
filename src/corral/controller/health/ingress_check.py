"""Does a node's one port answer where we think it is, and is it that node? Says clearly when not."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp

from corral.contract.access import Scope
from corral.controller.access.signing import IngressTokens
from corral.controller.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.tasks import Wake, run_every
from corral.store import nodes, revisions
from corral.store.api import Store
from corral.store.nodes import Node

_AT_ONCE = 32
_SURE_AFTER = 4  # failures in a row; a worker that has just been let in still has to fetch its certificate
_SOON_S = 2.0


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
        if not await self._leadership.lead("ingress-check"):
            return
        async with self._store.read() as tx:
            due = [node for node in await nodes.list_(tx) if _is_checked(node)]
        self._failures = {node.id: self._failures[node.id] for node in due if node.id in self._failures}
        if not due:
            return
        gate = asyncio.Semaphore(_AT_ONCE)
        async with aiohttp.ClientSession(timeout=self._timeout) as http:
            faults = await asyncio.gather(*(self._try(http, node, gate) for node in due))
        changed = [(node, fault) for node, fault in zip(due, faults, strict=True) if self._is_news(node, fault)]
        if self._failures:
            asyncio.get_running_loop().call_later(_SOON_S, self.wake.set)
        if not changed:
            return
        async with self._store.write() as tx:
            for node, fault in changed:
                columns = {"ingress_ok": not fault, "ingress_error": fault}
                # Lost against another change: the next round sees the node as it is then.
                await nodes.update(tx, node.id, columns, expected=node.row_version)
            await revisions.bump(tx, "nodes")

    async def _try(self, http: aiohttp.ClientSession, node: Node, gate: asyncio.Semaphore) -> str:
        token = self._tokens.sign("controller", [Scope.PROBE], aud=node.id, life_s=60)
        where = f"{node.ingress_url}/corral/hello"
        try:
            async with (
                gate,
                http.get(where, headers={"Authorization": f"Bearer {token}"}, ssl=self._trust or True) as answer,
            ):
                if answer.status != 200:
                    return f"{node.ingress_url} answered {answer.status}: is another program or another node there?"
                told = await answer.json()
                if not isinstance(told, dict) or told.get("node_id") != node.id:
                    return f"{node.ingress_url} is answered by another node; set --advertise on {node.name}"
        except TimeoutError:
            return f"{node.ingress_url} does not answer: open its port on {node.name}, or set --advertise there"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return (
                f"{node.ingress_url} cannot be reached ({_reason(error)}): "
                f"open its port, or set --advertise on {node.name}"
            )
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


def _reason(error: Exception) -> str:
    """In few words: the library's own text carries the innards of its TLS context."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not from this cluster's CA"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return "it does not speak TLS"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or "no connection"
    return str(error) or type(error).__name__
