"""Does a node's one port answer where we think it is, and is it that node? Says clearly when not.

How it is asked, and that nothing it says is trusted, is `ingress_client`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import aiohttp

from corral.contract.access import Scope
from corral.contract.codec import Message, Undecodable, always, decode
from corral.controller.registry.changes import NodeChanges, Overtaken
from corral.controller.registry.ingress_client import IngressClient, reason
from corral.controller.registry.transitions import NodeEvent
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store
from corral.store.tables import nodes, revisions
from corral.store.tables.nodes import Node

log = get_log(__name__)

_LEASE = "ingress-check"
_AT_ONCE = 32
_SURE_AFTER = 4  # failures in a row; a worker that has just been let in still has to fetch its certificate
_SOON_S = 2.0
_HEARTBEATS_ARE_WRITTEN = timedelta(seconds=3)  # in batches: one from before may be written so much later
_LARGEST_ANSWER = 16 * 1024


class Kind(StrEnum):
    WELL = "well"
    REFUSED = "refused"
    SILENT = "silent"
    WRONG = "wrong"  # something answers, and not as this node's ingress would
    NOT_RUNNING = "not running"
    UNDECIDED = "undecided"  # the next rounds tell


@dataclass(frozen=True)
class Fault:
    kind: Kind
    text: str = ""  # for people; empty when all is well


WELL = Fault(Kind.WELL)


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
        changes: NodeChanges,
        *,
        interval_s: float,
        silent_after_s: float,
    ) -> None:
        """`silent_after_s`: without a heartbeat for so long, a port that does not answer means that no worker runs."""
        self._store = store
        self._changes = changes
        self._silent_after = timedelta(seconds=silent_after_s)
        self._ingresses = ingresses
        self._leadership = leadership
        self._clock = clock
        self._interval_s = interval_s
        self._failures: dict[str, int] = {}
        self._failing_since: dict[str, datetime] = {}  # on the database's clock
        self.wake = Wake()

    async def run(self) -> None:
        await run_every("ingress check", self._interval_s, self.run_once, clock=self._clock, wake=self.wake)

    async def run_once(self) -> None:
        if not await self._lead():
            return
        async with self._store.read() as tx:
            now = await tx.now()
            due = [node for node in await nodes.list_(tx) if _is_checked(node)]
        self._failures = {node.id: self._failures[node.id] for node in due if node.id in self._failures}
        failing = self._failing_since
        self._failing_since = {node.id: failing[node.id] for node in due if node.id in failing}
        async with self._ingresses.session() as http:
            for start in range(0, len(due), _AT_ONCE):
                # A large fleet behind a closed firewall takes minutes, one timeout after the other: longer than the
                # lease lasts, unless it is renewed on the way.
                if start and not await self._lead():
                    return
                await self._check(http, due[start : start + _AT_ONCE], now)
        if self._failures:
            asyncio.get_running_loop().call_later(_SOON_S, self.wake.set)

    async def _lead(self) -> bool:
        return await self._leadership.lead(_LEASE, every_s=self._interval_s)

    async def _check(self, http: aiohttp.ClientSession, due: Sequence[Node], now: datetime) -> None:
        found = await asyncio.gather(*(self._try(http, node) for node in due))
        faults = [self._classify(node, fault, now) for node, fault in zip(due, found, strict=True)]
        changed = [(node, fault) for node, fault in zip(due, faults, strict=True) if self._has_changed(node, fault)]
        if not changed:
            return
        async with self._store.write() as tx:
            await self._leadership.require(tx, _LEASE)
            for node, fault in changed:
                columns = {"ingress_ok": not fault.text, "ingress_error": fault.text}
                # Lost against another change: the next round sees the node as it is then.
                with contextlib.suppress(Overtaken):
                    if fault.kind is Kind.NOT_RUNNING:
                        await self._changes.apply_in(tx, node, NodeEvent.WORKER_MISSING, columns)
                    else:
                        await self._changes.write(tx, node, columns)
            await revisions.bump(tx, "nodes")
        for node, _ in changed:
            self._changes.notify(node.id)

    def _classify(self, node: Node, fault: Fault, now: datetime) -> Fault:
        if fault.kind not in (Kind.REFUSED, Kind.SILENT):
            self._failing_since.pop(node.id, None)
            return fault
        since = self._failing_since.setdefault(node.id, now)
        return classify_fault(node, fault, since=since, now=now, silent_after=self._silent_after)

    async def _try(self, http: aiohttp.ClientSession, node: Node) -> Fault:
        try:
            wrong = await self._ask(http, node)
            return Fault(Kind.WRONG, wrong) if wrong else WELL
        except TimeoutError:
            words = f"{node.ingress_url} does not answer: open its port on {node.name}, or set --advertise there"
            return Fault(Kind.SILENT, words)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            words = (
                f"{node.ingress_url} cannot be reached ({reason(error)}): "
                f"open its port, or set --advertise on {node.name}"
            )
            return Fault(_kind_of(error), words)
        except Exception:  # whatever one node manages to answer, the others are still looked at
            log.exception("ingress check failed", node=node.name)
            return Fault(Kind.WRONG, f"{node.ingress_url} could not be checked; the controller's log has the details")

    async def _ask(self, http: aiohttp.ClientSession, node: Node) -> str:
        status, body = await self._ingresses.get(http, node, "/corral/hello", Scope.PROBE, largest=_LARGEST_ANSWER)
        if status != 200:
            return f"{node.ingress_url} answered {status}: is another program or another node there?"
        try:
            hello = decode(Hello, body)
        except Undecodable:
            return f"{node.ingress_url} is answered by something else than a worker; set --advertise on {node.name}"
        if hello.node_id != node.id:
            return f"{node.ingress_url} is answered by another node; set --advertise on {node.name}"
        return ""

    def _has_changed(self, node: Node, fault: Fault) -> bool:
        """Good news at once; bad news when it is sure."""
        if not fault.text:
            self._failures.pop(node.id, None)
            return node.ingress_ok is not True
        if fault.text == node.ingress_error:
            self._failures.pop(node.id, None)
            return False
        self._failures[node.id] = self._failures.get(node.id, 0) + 1
        if self._failures[node.id] < _SURE_AFTER or fault.kind is Kind.UNDECIDED:
            return False
        del self._failures[node.id]
        return True


def classify_fault(node: Node, fault: Fault, *, since: datetime, now: datetime, silent_after: timedelta) -> Fault:
    """Decide whether the port of a node is closed or its worker does not run. A running worker has sent heartbeats
    since its port stopped answering, and a worker that the controller has reached before did not lose its port by
    accident."""
    last_heartbeat_at = node.last_heartbeat or node.created_at
    missing = _not_running(node)
    if now - last_heartbeat_at >= silent_after:
        return missing
    # The verdict clears `ingress_ok`: without this the next check would ask people to open the port after all.
    was_reached = node.ingress_ok or node.ingress_error == missing.text
    if was_reached and last_heartbeat_at <= since + _HEARTBEATS_ARE_WRITTEN:
        return missing if fault.kind is Kind.REFUSED else Fault(Kind.UNDECIDED, fault.text)
    return fault


def _not_running(node: Node) -> Fault:
    words = f"its worker seems not to be running: no heartbeats, and nothing answers at {node.ingress_url}"
    return Fault(Kind.NOT_RUNNING, f"{words}; start it on {node.name} and see its log")


def _kind_of(error: Exception) -> Kind:
    """Refused: the machine answers that no process listens on the port."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionRefusedError):
        return Kind.REFUSED
    return Kind.SILENT if isinstance(error, aiohttp.ClientConnectorError | OSError) else Kind.WRONG


def _is_checked(node: Node) -> bool:
    return node.approved and node.status != "offline" and node.protocol > 0 and bool(node.ingress_url)
