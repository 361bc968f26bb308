"""Simulated workers, written from docs/reference/wire: a disk that survives, a process that does not.

A Corral worker accepts first, remembers what it did by (op_id, attempt), and tells by event and by heartbeat. A LocalAI
worker answers when it is done and is asked for its inventory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import msgspec

from corral.bus.local import LocalBus
from corral.contract.messages import backends as wire
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat, HttpHeartbeat
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.worker.agent.orders.runner import EventPublisher, OrderRunner
from corral.worker.metrics import WorkerMetrics
from tests.simulation.census import Census
from tests.simulation.processes import DiskOutcomes, Process, ProcessHost
from tests.simulation.upgrades import VersionsOnDisk, serving_releases

METRICS = WorkerMetrics()  # nobody looks at them, and they are slow to make
BEAT_S = 10.0
_REMEMBERED = 256
_TOLD_FOR_S = 600.0
_RESULTS = {"install": wire.INSTALL_RESULT, "upgrade": wire.UPGRADE_RESULT, "delete": wire.DELETE_RESULT}
_PHASES = ("resolving", "downloading", "verifying", "extracting", "starting")


@dataclass
class Luck:
    """How well things go on all machines; the simulation turns the knobs."""

    fails: float = 0.0  # chance of an order to fail
    permanently: float = 0.0  # ... and of that to be for good
    slow: float = 0.0  # chance of an order to take minutes
    dies: float = 0.0  # chance of the worker to die at a step of an order
    takes_s: tuple[float, float] = (0.2, 8.0)


@dataclass
class Disk:
    """What a machine keeps when its worker dies."""

    installed: dict[str, dict[str, Any]] = field(default_factory=dict)
    outcomes: OrderedDict[tuple[str, int], tuple[str, wire.BackendResult, float]] = field(default_factory=OrderedDict)
    outcomes_file: bytes | None = None
    seq: int = 1  # a worker numbers from one: zero is the word of those who do not number
    # What runs is no worker's child, and so is here: as long as the machine is on.
    processes: dict[str, Process] = field(default_factory=dict)
    process_ids: set[str] = field(default_factory=set)  # of all that ever ran
    versions: VersionsOnDisk | None = None  # of Corral; None: nobody releases any in this run

    def read_bytes(self) -> bytes:
        """Of the outcomes, as the real worker keeps them."""
        if self.outcomes_file is None:
            raise FileNotFoundError
        return self.outcomes_file

    def put(self, name: str, digest: str, version: str, at: str, variant: str = "") -> None:
        self.seq += 1
        before = self.installed.get(name)
        kept = before["previous"] if before is not None else ()
        if before is not None and before["digest"] != digest:
            kept = (before["digest"], *(one for one in kept if one not in (before["digest"], digest)))[:2]
        fetched = tuple(one for one in before["fetched"] if one != digest) if before is not None else ()
        self.installed[name] = {
            "digest": digest,
            "version": version,
            "installed_at": at,
            "previous": kept,
            "fetched": fetched,
            "variant": variant,
        }

    def fetch(self, name: str, digest: str) -> None:
        self.seq += 1
        row = self.installed[name]
        row["fetched"] = (digest, *(one for one in row["fetched"] if one != digest))[:2]

    def remove(self, name: str) -> None:
        if self.installed.pop(name, None) is not None:
            self.seq += 1

    def rows(self) -> tuple[wire.NodeBackend, ...]:
        """Builds under their own names, and for each the name it was asked for by."""
        rows = []
        for name, told in sorted(self.installed.items()):
            row = {key: value for key, value in told.items() if key != "variant"}
            build = told["variant"] or name
            rows.append(wire.NodeBackend(name=build, is_system=False, is_meta=False, **row))
            if build != name:
                date = told["installed_at"]
                meta = wire.NodeBackend(name=name, is_system=False, is_meta=True, installed_at=date)
                rows.append(msgspec.structs.replace(meta, meta_backend_for=build, version=told["version"]))
        return tuple(rows)


class Environment(Protocol):
    """What a worker needs of the simulation."""

    luck: Luck
    census: Census

    @property
    def clock(self) -> Clock: ...

    def note(self, *what: object) -> None: ...

    def failed(self, why: str) -> None:
        """Something is as it must never be."""

    def is_load_known(self) -> bool:
        """Whether what an ingress has told for a minute has arrived wherever somebody listened."""

    def join_bus(self, name: str) -> LocalBus: ...

    async def register(self, worker: Worker) -> bool:
        """As `POST /api/node/register`. False: the node was deleted. Raises CorralError while nobody answers."""

    def http_beat(self, worker: Worker, beat: HttpHeartbeat) -> None:
        """As `POST /api/node/{id}/heartbeat`."""

    def dies(self, worker: Worker) -> None:
        """The worker's process ends here and now; the simulation starts it again some time."""

    def changed(self, worker: Worker, name: str) -> None:
        """The disk is another from now on."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A process that outlives the worker."""

    def replaces(self, worker: Worker, after_s: float) -> None:
        """The worker ends, and the current version of Corral is started in its place."""

    def is_release(self, wheel: str) -> bool: ...

    def quality_of(self, wheel: str, worker: Worker) -> str:
        """Of a release, on such a machine: empty is good."""


class Worker:
    """What both kinds share. `run` is the process: cancelled is killed."""

    protocol = 1

    def __init__(self, sim: Environment, name: str, chance: Random, **known: Any) -> None:
        self.sim = sim
        self.name = name
        self.node_id = f"id-of-{name}"
        self.chance = chance
        self.known = known  # columns of the node
        self.disk = Disk()
        self.starts = 0
        self.bus: LocalBus | None = None
        self.deleted = False
        self.process_host: ProcessHost | None = None
        self.silent = False  # it lives, and nothing of it reaches anybody by HTTP
        self.others_bytes = 0  # memory that other programs take
        self.on_change: Callable[[], None] = lambda: None
        self.knows_releases = "yes"  # or "not", of an older worker, or "refuses"
        self._tasks: asyncio.TaskGroup | None = None
        self._locks: dict[str, asyncio.Lock] = {}

    @property
    def boot_id(self) -> str:
        return f"{self.name}-{self.starts}"

    async def run(self) -> None:
        """Registers, for as long as it takes; then serves for ever."""
        self.starts += 1
        self._locks = {}
        if self.disk.versions is not None:
            self.disk.versions.starts(self.sim.clock.now())
        self.forget()
        while True:
            try:
                if not await self.sim.register(self):
                    self.deleted = True
                    return
                break
            except CorralError:
                await asyncio.sleep(self.chance.uniform(1, 5))
        self.bus = bus = self.sim.join_bus(f"worker-{self.name}-{self.starts}")
        try:
            async with self.alive(bus), serving_releases(self, bus), asyncio.TaskGroup() as self._tasks:
                await self.serve(bus)
                while True:
                    await self.beat()
                    await self.pause()
        finally:
            bus.frozen = True
            if self.bus is bus:  # what is left of a life that was cut off may outlast the beginning of the next
                self.bus = self._tasks = None
            await bus.close()

    @contextlib.asynccontextmanager
    async def alive(self, bus: LocalBus) -> AsyncIterator[None]:
        """Around all that the process does."""
        yield

    async def pause(self) -> None:
        """Between two heartbeats."""
        await asyncio.sleep(BEAT_S * self.chance.uniform(0.9, 1.1))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None:
            work.close()
        else:
            self._tasks.create_task(work)

    def forget(self) -> None:
        """What only the process knew."""

    @property
    def available_ram(self) -> int:
        used = self.process_host.used_bytes if self.process_host is not None else 0
        return max(1, int(self.known.get("total_ram", 0)) - self.others_bytes - used)

    def orders_under_way(self) -> set[str]:
        """Of backends, by the id of their operation."""
        return set()

    async def serve(self, bus: LocalBus) -> None:
        raise NotImplementedError

    async def beat(self) -> None:
        raise NotImplementedError

    async def list_backends(self, _asked: wire.ListBackends, _tokens: object) -> wire.BackendList:
        return wire.BackendList(backends=self.disk.rows(), seq=self.disk.seq if self.protocol else 0)

    def lock(self, backend: str) -> asyncio.Lock:
        return self._locks.setdefault(backend, asyncio.Lock())

    async def step(self) -> None:
        """Between two things a worker does: it may die here."""
        if self.chance.random() < self.sim.luck.dies:
            self.sim.dies(self)
            await asyncio.Event().wait()

    def takes_s(self) -> float:
        luck = self.sim.luck
        return self.chance.uniform(60, 300) if self.chance.random() < luck.slow else self.chance.uniform(*luck.takes_s)

    def fails(self) -> bool:
        is_failing = self.chance.random() < self.sim.luck.fails
        self.sim.census.faults["order failed"] += is_failing
        return is_failing

    def moment(self) -> str:
        return self.sim.clock.now().isoformat()

    def change(self, kind: str, name: str, digest: str, version: str, variant: str = "") -> None:
        if kind == "delete":
            self.disk.remove(name)
        else:
            self.disk.put(name, digest, version, self.moment(), variant)
        for process in self.disk.processes.values():
            if process.order.backend == name and process.is_live and name not in self.disk.installed:
                self.sim.failed(f"{self.name} runs {process.process_id} of {name}, whose files were removed")
        self.sim.changed(self, name)
        self.on_change()


class CorralWorker(Worker):
    process_host: ProcessHost

    def forget(self) -> None:
        self.publisher = EventPublisher()
        outcomes = DiskOutcomes(self)
        outcomes.load()
        self.runner = OrderRunner(outcomes, self.publisher.publish_outcome, metrics=METRICS)
        self.process_host = ProcessHost(self, self.runner, self.publisher)
        self.running: dict[tuple[str, int], tuple[str, str]] = {}  # → kind, backend
        self.stopping: dict[tuple[str, int], asyncio.Event] = {}

    def orders_under_way(self) -> set[str]:
        return {op_id for op_id, _ in self.running}

    async def serve(self, bus: LocalBus) -> None:
        serve: Any = bus.serve
        await serve(wire.INSTALL_BACKEND, self._takes("install", wire.InstallReply), concurrency=64, node=self.node_id)
        await serve(wire.UPGRADE_BACKEND, self._takes("upgrade", wire.StoppedReply), concurrency=64, node=self.node_id)
        await serve(wire.DELETE_BACKEND, self._takes("delete", wire.StoppedReply), concurrency=64, node=self.node_id)
        await bus.serve(wire.LIST_BACKENDS, self.list_backends, node=self.node_id)
        await bus.serve(wire.CANCEL_BACKEND, self._cancel, node=self.node_id)
        await self.process_host.serve(bus)

    @contextlib.asynccontextmanager
    async def alive(self, bus: LocalBus) -> AsyncIterator[None]:
        with self.publisher.connected_to(bus, self.node_id):
            async with self.process_host.alive(bus), self.runner:
                yield

    async def beat(self) -> None:
        assert self.bus is not None
        now = self.sim.clock.monotonic()
        orders = [
            wire.OrderReport(op, attempt, kind, name) for (op, attempt), (kind, name) in sorted(self.running.items())
        ]
        orders += [
            wire.OrderReport(op, attempt, kind, result.backend, result)
            for (op, attempt), (kind, result, at) in self.disk.outcomes.items()
            if now - at < _TOLD_FOR_S
        ]
        beat = BusHeartbeat(
            boot_id=self.boot_id,
            inventory=self.disk.rows(),
            inventory_seq=self.disk.seq,
            orders=tuple(orders),
            processes=self.process_host.list_processes(),
            available_ram=self.available_ram,
        )
        try:
            await self.bus.publish(NODE_HEARTBEAT, beat, node=self.node_id)
        except CorralError:
            self.sim.http_beat(self, HttpHeartbeat(bus="down", boot_id=self.boot_id))

    def _takes(self, kind: str, reply: Any) -> Callable[[Any, object], Any]:
        async def take(order: Any, _tokens: object) -> Any:
            assert order.accept, "a Corral controller always lets us accept first"
            assert order.attempt > 0, "orders are numbered"
            await self.step()
            key = (order.op_id, order.attempt)
            if key in self.disk.outcomes:
                self.start(self._tell(*self.disk.outcomes[key][:2]))
            elif key not in self.running:
                self.sim.note(self.name, "takes", kind, order.backend, key)
                self.running[key] = (kind, order.backend)
                self.stopping[key] = asyncio.Event()
                self.start(self._carry_out(kind, order, key))
            return reply(success=True, accepted=True)

        return take

    async def _cancel(self, asked: wire.CancelBackend, _tokens: object) -> wire.CancelReply:
        keys = [key for key, (_, name) in self.running.items() if key[0] == asked.op_id and name == asked.backend]
        for key in keys:
            self.stopping[key].set()
        return wire.CancelReply(success=True, running=bool(keys))

    async def _carry_out(self, kind: str, order: Any, key: tuple[str, int]) -> None:
        async with self.lock(order.backend):
            known = await self._work(kind, order, key)
        result = wire.BackendResult(op_id=key[0], attempt=key[1], node_id=self.node_id, backend=order.backend, **known)
        await self.step()
        self.disk.outcomes[key] = (kind, result, self.sim.clock.monotonic())
        while len(self.disk.outcomes) > _REMEMBERED:
            self.disk.outcomes.popitem(last=False)
        self.running.pop(key)
        self.sim.note(self.name, "ended", kind, order.backend, key, "done" if result.success else result.error)
        await self.step()
        await self._tell(kind, result)
        if self.chance.random() < 0.5:
            await self.beat()

    async def _work(self, kind: str, order: Any, key: tuple[str, int]) -> dict[str, Any]:
        """The fields of its result."""
        digest = getattr(order, "digest", "")
        there = self.disk.installed.get(order.backend)
        quick = kind == "delete" or (
            there is not None and not getattr(order, "force", False) and digest == there["digest"]
        )
        if there is not None and digest and digest in (*there["previous"], *there["fetched"]):
            quick = True
        if kind != "delete" and not digest:
            return {"success": False, "error": "no build was named", "permanent": True, "phase": "resolving"}
        failing = _PHASES[self.chance.randrange(len(_PHASES))] if self.fails() else ""
        total_s = self.chance.uniform(0.05, 0.5) if quick else self.takes_s()
        for seq, phase in enumerate(_PHASES, 1):
            await self._progress(order, key, phase, seq)
            try:
                async with asyncio.timeout(total_s / len(_PHASES)):
                    await self.stopping[key].wait()
            except TimeoutError:
                pass
            if self.stopping[key].is_set():
                return {"success": False, "cancelled": True, "error": "cancelled", "phase": phase}
            await self.step()
            if phase == failing:
                permanent = self.chance.random() < self.sim.luck.permanently
                return {"success": False, "error": f"{phase} failed", "permanent": permanent, "phase": phase}
        if getattr(order, "fetch_only", False) and there is not None:
            if digest != there["digest"]:
                self.disk.fetch(order.backend, digest)
            return {"success": True, "fetched": True, "digest": digest}
        if kind == "delete":
            await self.process_host.stop_all_of(order.backend)
            if self.process_host.is_in_use(order.backend):  # by one that was started meanwhile
                return {"success": False, "error": f"{order.backend} is in use"}
        if kind == "delete" or not quick or there is None or there["digest"] != digest:
            self.change(kind, order.backend, digest, getattr(order, "version", ""), getattr(order, "variant", ""))
        return {"success": True, "digest": digest}

    async def _progress(self, order: Any, key: tuple[str, int], phase: str, seq: int) -> None:
        event = wire.InstallProgress(
            op_id=key[0],
            node_id=self.node_id,
            backend=order.backend,
            percentage=100.0 * seq / len(_PHASES),
            phase=phase,
            attempt=key[1],
            seq=seq,
        )
        await self._publish(wire.INSTALL_PROGRESS, event, key[0])

    async def _tell(self, kind: str, result: wire.BackendResult) -> None:
        await self._publish(_RESULTS[kind], result, result.op_id)

    async def _publish(self, event: Any, message: Any, op: str) -> None:
        assert self.bus is not None
        try:
            await self.bus.publish(event, message, node=self.node_id, op=op)
        except CorralError:
            return  # the heartbeat will tell


class LocalAIWorker(Worker):
    """No `accept`, no cancel, no numbers; finds the build itself; the digest it reports is empty on old ones."""

    protocol = 0
    digests = True

    async def serve(self, bus: LocalBus) -> None:
        serve: Any = bus.serve
        await serve(wire.INSTALL_BACKEND, self._does("install", wire.InstallReply), concurrency=64, node=self.node_id)
        await serve(wire.UPGRADE_BACKEND, self._does("upgrade", wire.StoppedReply), concurrency=64, node=self.node_id)
        await serve(wire.DELETE_BACKEND, self._does("delete", wire.StoppedReply), node=self.node_id)
        await bus.serve(wire.LIST_BACKENDS, self.list_backends, node=self.node_id)

    async def beat(self) -> None:
        self.sim.http_beat(self, HttpHeartbeat())

    def _does(self, kind: str, reply: Any) -> Callable[[Any, object], Any]:
        async def do(order: Any, _tokens: object) -> Any:
            self.sim.note(self.name, "is asked to", kind, order.backend)
            async with self.lock(order.backend):
                return await self._do(kind, order, reply)

        return do

    async def _do(self, kind: str, order: Any, reply: Any) -> Any:
        name, there = order.backend, self.disk.installed.get(order.backend)
        if kind == "install" and there is not None and not order.force:
            return reply(success=True)
        await asyncio.sleep(0.1 if kind == "delete" else self.takes_s())
        await self.step()
        if self.fails():
            return reply(success=False, error=f"{kind} failed")
        digest = f"sha256:{name}-by-itself-{self.sim.clock.monotonic():.0f}" if self.digests else ""
        self.change(kind, name, digest, "")
        self.sim.note(self.name, "has done", kind, name)
        await self.step()
        return reply(success=True)
