"""Scripted workers on any bus: a Corral worker that accepts first, and a LocalAI worker exact to the contract.

They keep an inventory and do what they are told after a while that the test sets, or when it says so. Everything they
were asked is written down. They are written from docs/reference/wire, in the wire's own words.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from corral.bus.api import Bus, Subscription
from corral.contract.codec import decode, encode
from corral.contract.messages import backends as wire
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat
from corral.contract.messages.replicas import ReplicaProcess

_times = itertools.count(1)


@dataclass
class Asked:
    """One request as it came, in the wire's words."""

    subject: str
    body: dict[str, Any]


@dataclass
class Script:
    """How the next orders go. Changed by the test while the worker runs."""

    takes_s: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)  # fields of BackendResult; one per order, first first
    hold: asyncio.Event | None = None  # work ends only when it is set
    lose_results: bool = False  # the event that tells an outcome never leaves
    lie: bool = False  # says that it is done, and is not
    digest: str = ""  # what a worker that resolves for itself finds
    lists: dict[str, str] = field(default_factory=dict)  # by name it was asked for, the only one it lists it under


class ScriptedWorker:
    """What both kinds share: an inventory, and a diary."""

    def __init__(self, bus: Bus, node_id: str) -> None:
        self.bus = bus
        self.node_id = node_id
        self.script = Script()
        self.asked: list[Asked] = []
        self.installed: dict[str, dict[str, Any]] = {}
        self.at_once = 0
        self.most_at_once = 0
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def orders(self, subject: str = "") -> list[dict[str, Any]]:
        """Bodies of what was asked on `backend.<subject>`, lists apart."""
        return [
            one.body
            for one in self.asked
            if (one.subject == f"backend.{subject}" if subject else one.subject != "backend.list")
        ]

    def put(self, name: str, **row: Any) -> None:
        self.installed[name] = {"name": name, "is_system": False, "is_meta": False, "installed_at": self._now()} | row

    async def stop(self) -> None:
        """The process dies: nothing is said any more."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _now(self) -> str:
        return f"2026-01-01T00:00:00.{next(_times):06}Z"

    def _note(self, subject: str, message: object) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(encode(message))
        self.asked.append(Asked(subject, body))
        return body

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.script.hold is not None:
                await self.script.hold.wait()
            await asyncio.sleep(self.script.takes_s)
        finally:
            self.at_once -= 1

    def _change(self, kind: str, order: dict[str, Any]) -> None:
        if self.script.lie:
            return
        name = self._listed(order["backend"])
        if kind == "delete":
            self.installed.pop(name, None)
            return
        digest = order.get("digest") or self.script.digest
        row = self.installed.get(name, {})
        fetched = [each for each in row.get("fetched", []) if each != digest]
        if order.get("fetch_only"):
            self.installed[name] = row | {"fetched": [digest, *fetched]}
            return
        previous = [row["digest"], *row.get("previous", [])] if row.get("digest", digest) != digest else []
        kept = {"previous": [each for each in previous if each != digest], "fetched": fetched}
        told = {key: value for key, value in kept.items() if value}
        self.put(name, **({"digest": digest} if digest else {}), version=order.get("version", ""), **told)

    def _listed(self, backend: str) -> str:
        return self.script.lists.get(backend, backend)

    async def _list(self, asked: wire.ListBackends, _tokens: object) -> wire.BackendList:
        self._note("backend.list", asked)
        return wire.BackendList(backends=self.listed())

    def listed(self) -> tuple[wire.NodeBackend, ...]:
        return tuple(decode(wire.NodeBackend, json.dumps(row).encode()) for row in self.installed.values())


class CorralWorker(ScriptedWorker):
    """Accepts first; remembers what it did by (op_id, attempt); reports by event and by heartbeat."""

    def __init__(self, bus: Bus, node_id: str, *, boot_id: str = "boot-1") -> None:
        super().__init__(bus, node_id)
        self.boot_id = boot_id
        self.outcomes: dict[tuple[str, int], wire.BackendResult] = {}
        self.running: dict[tuple[str, int], tuple[str, str]] = {}  # → kind, backend
        self.damaged: tuple[str, ...] = ()  # files of whatever is verified
        self.cured = False  # whether the libraries are there now that orders were refused for
        self.listed_processes: tuple[ReplicaProcess, ...] = ()  # in its heartbeats
        self.carried_out: list[tuple[str, str, int]] = []  # kind, op_id, attempt of everything really done
        self._seq = 1  # zero is the word of those who do not number, and their last word counts
        self._listed_last: tuple[wire.NodeBackend, ...] = ()
        self._cancelled: set[tuple[str, int]] = set()
        self._stopping: dict[tuple[str, int], asyncio.Event] = {}
        self._serial: dict[str, asyncio.Lock] = {}

    async def start(self) -> CorralWorker:
        for call, kind in (
            (wire.INSTALL_BACKEND, "install"),
            (wire.UPGRADE_BACKEND, "upgrade"),
            (wire.DELETE_BACKEND, "delete"),
        ):
            serve: Any = self.bus.serve
            self._subscriptions.append(await serve(call, self._taking(kind), concurrency=64, node=self.node_id))
        self._subscriptions.append(await self.bus.serve(wire.LIST_BACKENDS, self._list, node=self.node_id))
        self._subscriptions.append(await self.bus.serve(wire.CANCEL_BACKEND, self._cancel, node=self.node_id))
        self._subscriptions.append(await self.bus.serve(wire.VERIFY_BACKEND, self._verify, node=self.node_id))
        return self

    def inventory(self) -> tuple[tuple[wire.NodeBackend, ...], int]:
        """With its number, as real ones tell it: an older list, heard late, is known to be older."""
        rows = self.listed()
        if rows != self._listed_last:
            self._seq += 1
            self._listed_last = rows
        return rows, self._seq

    async def _list(self, asked: wire.ListBackends, _tokens: object) -> wire.BackendList:
        self._note("backend.list", asked)
        rows, seq = self.inventory()
        return wire.BackendList(backends=rows, seq=seq)

    async def _verify(self, asked: wire.VerifyBackend, _tokens: object) -> wire.VerifyReply:
        self._note("backend.verify", asked)
        if asked.backend not in self.installed:
            return wire.VerifyReply(error=f"{asked.backend} is not installed here")
        changed = self.damaged
        return wire.VerifyReply(success=True, version="1.0", changed=changed[:20], damaged=len(changed))

    async def restart(self, *, forget: bool = True) -> None:
        """Killed and started again: what was under way is gone; with `forget` so is all memory of it."""
        await self.stop()
        self.running.clear()
        if forget:
            self.outcomes.clear()
        self.boot_id = f"boot-{next(_times)}"
        await self.start()

    async def beat(self) -> None:
        await self.send(self.heartbeat())

    async def send(self, beat: BusHeartbeat) -> None:
        await self.bus.publish(NODE_HEARTBEAT, beat, node=self.node_id)

    def heartbeat(self) -> BusHeartbeat:
        rows, seq = self.inventory()
        orders = [
            wire.OrderReport(op, attempt, kind, backend) for (op, attempt), (kind, backend) in self.running.items()
        ]
        orders += [
            wire.OrderReport(op, attempt, "install", result.backend, result, cured=self.cured and bool(result.missing))
            for (op, attempt), result in self.outcomes.items()
        ]
        return BusHeartbeat(
            boot_id=self.boot_id,
            inventory=rows,
            inventory_seq=seq,
            orders=tuple(orders),
            processes=self.listed_processes,
        )

    async def progress(self, op: str, **fields: Any) -> None:
        event = wire.InstallProgress(**({"op_id": op, "node_id": self.node_id} | fields))
        await self.bus.publish(wire.INSTALL_PROGRESS, event, node=self.node_id, op=op)

    def _taking(self, kind: str) -> Callable[[Any, object], Awaitable[Any]]:
        async def take(order: Any, _tokens: object) -> Any:
            body = self._note(f"backend.{kind}", order)
            reply = wire.InstallReply if kind == "install" else wire.StoppedReply
            assert body.get("accept") is True, "a Corral controller always lets us accept first"
            key = (body["op_id"], body["attempt"])
            if key in self.outcomes:
                self._start(self._tell(kind, self.outcomes[key]))
            elif key not in self.running:
                self.running[key] = (kind, body["backend"])
                self._start(self._carry_out(kind, body, key))
            return reply(success=True, accepted=True)

        return take

    async def _carry_out(self, kind: str, body: dict[str, Any], key: tuple[str, int]) -> None:
        stopping = self._stopping.setdefault(key, asyncio.Event())
        fields: dict[str, Any] = {"success": True}
        async with self._serial.setdefault(body["backend"], asyncio.Lock()):
            work, stop = asyncio.ensure_future(self._work()), asyncio.ensure_future(stopping.wait())
            try:
                await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            finally:
                work.cancel()
                stop.cancel()
                await asyncio.gather(work, stop, return_exceptions=True)
            if stopping.is_set():
                fields = {"success": False, "cancelled": True, "error": "cancelled"}
            elif self.script.failures:
                fields = {"success": False, **self.script.failures.pop(0)}
            else:
                self.carried_out.append((kind, *key))
                self._change(kind, body)
        result = wire.BackendResult(
            op_id=key[0], attempt=key[1], node_id=self.node_id, backend=body["backend"], **fields
        )
        self.outcomes[key] = result
        self.running.pop(key, None)
        if not self.script.lose_results:
            await self._tell(kind, result)

    async def _tell(self, kind: str, result: wire.BackendResult) -> None:
        event = {"install": wire.INSTALL_RESULT, "upgrade": wire.UPGRADE_RESULT, "delete": wire.DELETE_RESULT}[kind]
        await self.bus.publish(event, result, node=self.node_id, op=result.op_id)

    async def _cancel(self, asked: wire.CancelBackend, _tokens: object) -> wire.CancelReply:
        self._note("backend.cancel", asked)
        keys = [key for key, (_, name) in self.running.items() if key[0] == asked.op_id and name == asked.backend]
        for key in keys:
            self._stopping.setdefault(key, asyncio.Event()).set()
        return wire.CancelReply(success=True, running=bool(keys))


class LocalAIWorker(ScriptedWorker):
    """Answers when it is done; no `accept`, no digest unless told to have one, no cancel, perhaps no upgrade."""

    def __init__(self, bus: Bus, node_id: str, *, upgrades: bool = True) -> None:
        super().__init__(bus, node_id)
        self.upgrades = upgrades

    async def start(self) -> LocalAIWorker:
        serve: Any = self.bus.serve
        calls = [(wire.INSTALL_BACKEND, "install"), (wire.DELETE_BACKEND, "delete")]
        if self.upgrades:
            calls.append((wire.UPGRADE_BACKEND, "upgrade"))
        for call, kind in calls:
            many = 64 if kind != "delete" else 1
            self._subscriptions.append(await serve(call, self._doing(kind), concurrency=many, node=self.node_id))
        self._subscriptions.append(await self.bus.serve(wire.LIST_BACKENDS, self._list, node=self.node_id))
        return self

    def _doing(self, kind: str) -> Callable[[Any, object], Awaitable[Any]]:
        reply = wire.InstallReply if kind == "install" else wire.StoppedReply

        async def do(order: Any, _tokens: object) -> Any:
            body = self._note(f"backend.{kind}", order)
            await self._work()
            if self.script.failures:
                return reply(success=False, error=self.script.failures.pop(0).get("error", ""))
            there = self._listed(body["backend"]) in self.installed
            if kind != "install" or not there or body.get("force"):
                self._change(kind, body | {"digest": self.script.digest})
            return reply(success=True)

        return do


@contextlib.asynccontextmanager
async def running(worker: Any) -> Any:
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()
