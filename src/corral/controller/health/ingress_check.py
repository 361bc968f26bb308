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
        self.wake = Wake()

    async def run(self) -> None:
        await run_every("ingress check", self._interval_s, self.look, clock=self._clock, wake=self.wake)

    async def look(self) -> None:
        if not await self._leadership.lead("ingress-check"):
            return
        async with self._store.read() as tx:
            due = [node for node in await nodes.list_(tx) if _is_checked(node)]
        if not due:
            return
        gate = asyncio.Semaphore(_AT_ONCE)
        async with aiohttp.ClientSession(timeout=self._timeout) as http:
            faults = await asyncio.gather(*(self._try(http, node, gate) for node in due))
        changed = [(node, fault) for node, fault in zip(due, faults, strict=True) if _is_news(node, fault)]
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
            reason = str(error) or type(error).__name__
            return f"{node.ingress_url} cannot be reached ({reason}): open its port, or set --advertise on {node.name}"
        return ""


def _is_checked(node: Node) -> bool:
    return node.approved and node.status != "offline" and node.protocol > 0 and bool(node.ingress_url)


def _is_news(node: Node, fault: str) -> bool:
    return node.ingress_ok is None or node.ingress_error != fault or node.ingress_ok != (not fault)
