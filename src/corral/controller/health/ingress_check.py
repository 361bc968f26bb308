"""Does a node's one port answer where we think it is, and is it that node? Says clearly when not.

How it is asked, and that nothing it says is trusted, is `ingress_client`'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from corral.contract.access import Scope
from corral.contract.codec import Message, Undecodable, always, decode
from corral.controller.ingress_client import IngressClient, reason
from corral.controller.leadership import Leadership
from corral.kit.clock import Clock
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


class Hello(Message, frozen=True):
    """Of the ingress's answer, what tells whether it is the right one."""

    node_id: str = always(str)


class IngressCheck:
    name = "ingress check"

    def __init__(
        self,
        store: Store,
        ingresses: IngressClient,
        leadership: Leadership,
        clock: Clock,
        *,
        interval_s: float,
    ) -> None:
        self._store = store
        self._ingresses = ingresses
        self._leadership = leadership
        self._clock = clock
        self._interval_s = interval_s
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
        async with self._ingresses.session() as http:
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
                f"{node.ingress_url} cannot be reached ({reason(error)}): "
                f"open its port, or set --advertise on {node.name}"
            )
        except Exception:  # whatever one node manages to answer, the others are still looked at
            log.exception("ingress check failed", node=node.name)
            return f"{node.ingress_url} could not be checked; the controller's log has the details"

    async def _ask(self, http: aiohttp.ClientSession, node: Node) -> str:
        status, told = await self._ingresses.get(http, node, "/corral/hello", Scope.PROBE, largest=_LARGEST_ANSWER)
        if status != 200:
            return f"{node.ingress_url} answered {status}: is another program or another node there?"
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
