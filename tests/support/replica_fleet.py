"""Controllers that load models, in this process, with scripted workers that start and stop processes.

async with open_replica_fleet(sqlite_url(tmp_path)) as fleet:
    barn = await fleet.worker("barn")
    await fleet.define("m")
    await fleet.ask("m")
    await fleet.until_ready("m")
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from corral.blobs.progress import OnProgress
from corral.bus.api import Bus
from corral.contract.loads import LoadStatus
from corral.contract.messages import backends as wire
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat
from corral.contract.messages.replicas import (
    NODE_LOAD,
    START_REPLICA,
    START_REPLICA_RESULT,
    STOP_REPLICA,
    NodeLoad,
    ReplicaFile,
    ReplicaProcess,
    ReplicaReply,
    ReplicaResult,
    StartReplica,
    StopReplica,
)
from corral.contract.models import Definition, read_definition
from corral.contract.view import ViewReplica
from corral.controller.inventory.routing import read_routing
from corral.controller.metrics.replicas import ReplicaMetrics
from corral.controller.models.edits import ModelOrigin, next_row
from corral.controller.replicas.lifecycle import LifecycleTimes
from corral.controller.replicas.load_jobs import Cooldown
from corral.controller.replicas.reconcile import ReplicaPace
from corral.controller.scheduler.world import Policy
from corral.controller.settings.models import ReplicaSettings
from corral.controller.wiring.replicas import ReplicaDependencies, Replicas
from corral.kit.errors import CorralError
from corral.kit.settings import Seconds
from corral.store.records import DesiredReplica
from corral.store.tables import load_jobs, model_schedules, models, replicas, revisions
from corral.store.tables.model_schedules import Schedule
from tests.support.backend_fleet import Controller, Fleet, open_fleet
from tests.support.buses import Yard
from tests.support.model_catalogue import models_of
from tests.support.scripted_worker import CorralWorker
from tests.support.waiting import until

GIB = 1024**3
SETTINGS = ReplicaSettings(replica_interval_s=Seconds(0.2))
QUICK = ReplicaPace(
    busy_interval_s=0.05,
    rest_s=0.002,
    orphan_interval_s=0.2,
    trial_interval_s=0.05,
    times=LifecycleTimes(
        resend_after=timedelta(seconds=0.3),
        send_retry=timedelta(seconds=0.1),
        listing_grace=timedelta(seconds=0.5),
        drain_grace=timedelta(seconds=0.05),
        stop_retry=timedelta(seconds=0.5),
        orphan_after=timedelta(seconds=0.3),
    ),
    cooldown=Cooldown(first=timedelta(seconds=0.5), longest=timedelta(seconds=2)),
    policy=Policy(evict_after_idle_s=0.1, evict_after_ready_s=0.1, up_after_s=0.2, down_after_s=60.0),
    accept_s=5.0,
    second_try_s=0.02,
    fresh_s=0.2,
)


@dataclass
class StartScript:
    """How the next starts go. Changed by the test while the worker runs."""

    takes_s: float = 0.0
    hold: asyncio.Event | None = None  # a start ends only when it is set
    failures: list[str] = field(default_factory=list)  # one per start, first first
    lose_results: bool = False


class ReplicaWorker(CorralWorker):
    """Starts processes as it is told, lists them in heartbeats as they change, remembers what it did."""

    def __init__(self, bus: Bus, node_id: str, *, boot_id: str = "boot-1") -> None:
        super().__init__(bus, node_id, boot_id=boot_id)
        self.starts = StartScript()
        self.processes: dict[str, ReplicaProcess] = {}
        self.started: list[dict[str, Any]] = []
        self.models_at_start: list[set[str]] = []  # what ran here whenever a process was added
        self.replica_orders: list[dict[str, Any]] = []  # every order for a replica, as received
        self._ended: dict[tuple[str, int], ReplicaResult] = {}
        self._at: set[tuple[str, int]] = set()
        self._loads = 0
        self.silent = False  # sends no heartbeats by itself

    async def start(self) -> ReplicaWorker:
        await super().start()
        for call, serve in ((START_REPLICA, self._start_replica), (STOP_REPLICA, self._stop_replica)):
            serve_call: Any = self.bus.serve
            self._subscriptions.append(await serve_call(call, serve, concurrency=16, node=self.node_id))
        self._start(self._keep_beating())
        return self

    async def _keep_beating(self) -> None:
        """Whoever was not there to hear the last one hears the next."""
        while True:
            await asyncio.sleep(0.2)
            with contextlib.suppress(CorralError):
                if not self.silent:
                    await self.beat()

    async def restart(self, *, forget: bool = True) -> None:
        self._at.clear()
        kept = {} if forget else self.processes
        # One that was not ready yet is ended: nobody knows how far it came.
        self.processes = {id: process for id, process in kept.items() if process.state == "ready"}
        await super().restart(forget=forget)
        await self.beat()

    async def beat(self) -> None:
        rows, seq = self.inventory()
        orders = [
            wire.OrderReport(op, attempt, "install", result.backend, result)
            for (op, attempt), result in self.outcomes.items()
        ]
        beat = BusHeartbeat(
            boot_id=self.boot_id,
            inventory=rows,
            inventory_seq=seq,
            orders=tuple(orders),
            processes=tuple(self.processes.values()),
        )
        await self.bus.publish(NODE_HEARTBEAT, beat, node=self.node_id)

    async def in_flight(self, **by_process: int) -> None:
        self._loads += 1
        load = NodeLoad(boot_id=self.boot_id, seq=self._loads, in_flight={k: v for k, v in by_process.items() if v})
        await self.bus.publish(NODE_LOAD, load, node=self.node_id)

    def serving(self, model: str) -> list[ReplicaProcess]:
        return [each for each in self.processes.values() if each.model == model and each.state == "ready"]

    async def set_process(self, process_id: str, **changes: Any) -> None:
        """It changed by itself."""
        self.processes[process_id] = msgspec.structs.replace(self.processes[process_id], **changes)
        await self.beat()

    async def lose(self, process_id: str) -> None:
        del self.processes[process_id]
        await self.beat()

    async def _start_replica(self, order: StartReplica, _tokens: object) -> ReplicaReply:
        body = self._note("replica.start", order)
        self.replica_orders.append(body)
        assert body["accept"] is True
        key = (order.op_id, order.attempt)
        if key in self._ended:
            self._start(self._tell_replica(self._ended[key]))
        elif key not in self._at:
            self._at.add(key)
            self._start(self._carry_out_start(order, body))
        return ReplicaReply(success=True, accepted=True, process_id=order.process_id)

    async def _carry_out_start(self, order: StartReplica, body: dict[str, Any]) -> None:
        process = ReplicaProcess(
            process_id=order.process_id,
            model=order.model,
            replica=order.replica,
            backend=order.backend,
            state="starting",
            protocol="openai",
            revision=order.revision,
            memory_bytes=order.memory_bytes,
            devices=order.devices,
        )
        self.processes[order.process_id] = process
        self.models_at_start.append({each.model for each in self.processes.values()})
        await self.beat()
        if self.starts.hold is not None:
            await self.starts.hold.wait()
        await asyncio.sleep(self.starts.takes_s)
        error = self.starts.failures.pop(0) if self.starts.failures else ""
        self._at.discard((order.op_id, order.attempt))
        if order.process_id in self.processes:
            if error:
                await self.set_process(order.process_id, state="failed", error=error)
            else:
                self.started.append(body)
                await self.set_process(order.process_id, state="ready")
        result = ReplicaResult(
            op_id=order.op_id, attempt=order.attempt, success=not error, process_id=order.process_id, error=error
        )
        self._ended[(order.op_id, order.attempt)] = result
        if not self.starts.lose_results:
            await self._tell_replica(result)

    async def _tell_replica(self, result: ReplicaResult) -> None:
        await self.bus.publish(START_REPLICA_RESULT, result, node=self.node_id, op=result.op_id)

    async def _stop_replica(self, order: StopReplica, _tokens: object) -> ReplicaReply:
        self.replica_orders.append(self._note("replica.stop", order))
        if order.process_id in self.processes:
            await self.lose(order.process_id)
        return ReplicaReply(success=True, accepted=order.accept, process_id=order.process_id)


class ScriptedFiles:
    """Files of models that are simply there, or come when the test says so."""

    def __init__(self) -> None:
        self.hold: asyncio.Event | None = None
        self.failures: list[CorralError] = []
        self.asked: list[str] = []

    async def ensure(self, definition: Definition, tell: OnProgress) -> tuple[ReplicaFile, ...]:
        self.asked.append(definition.name)
        if self.hold is not None:
            await self.hold.wait()
        if self.failures:
            raise self.failures.pop(0)
        return tuple(ReplicaFile(file.path, f"sha256:{file.sha256}", file.size_bytes) for file in definition.files)

    def find(self, digest: str) -> Path | None:
        return None

    def sources_for(self, node_id: str, files: Sequence[ReplicaFile] = ()) -> tuple[tuple[str, ...], str]:
        return ("https://blobs.test",), f"token-of-{node_id}"


class ReplicaFleet:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.files = ScriptedFiles()
        self.replicas: dict[str, Replicas] = {}
        self.metrics = ReplicaMetrics()
        fleet.worker_kind = ReplicaWorker

    @property
    def loads(self) -> Any:
        return next(iter(self.replicas.values())).loads

    def add(self, controller: Controller, pace: ReplicaPace = QUICK, *, start: bool = True) -> Replicas:
        made = Replicas(
            controller.store,
            controller.bus,
            controller.leadership,
            controller.feed,
            self.fleet.clock,
            ReplicaDependencies(
                models_of(controller.store, controller.feed),
                self.files,
                self.fleet.catalogue,
                controller.backends.acceptor,
                controller.changes,
                counter=self.metrics,
            ),
            SETTINGS,
            pace,
        )
        self.replicas[controller.name] = made
        if start:
            for part in made.parts:
                controller.tasks.append(asyncio.create_task(part.run(), name=f"{controller.name} {part.name}"))
        return made

    async def worker(self, name: str, *, has: str = "", joins_later: bool = False, **known: Any) -> ReplicaWorker:
        """`joins_later`: it is known, and nobody has heard of it yet."""
        free = {"total_ram": 64 * GIB, "available_ram": 60 * GIB, "ingress_url": f"http://{name}.test:50050"}
        made = await self.fleet.machine(name)
        assert isinstance(made, ReplicaWorker)
        if has:
            made.put(has, digest=f"sha256:cpu-{has}-1")
        if joins_later:
            await self.fleet.node(name, **({"status": "offline"} | free | known))
            return made
        await made.start()  # before anybody knows of it, or it would be found silent
        await self.fleet.node(name, **(free | known))
        await made.beat()
        await self.fleet.until_heard(name)
        return made

    async def set_node(self, name: str, **columns: Any) -> None:
        """As the registry would have done it."""
        await self.fleet.set_node(name, **columns)
        async with self.fleet.store.write() as tx:
            await revisions.bump(tx, "nodes")
        self._touched("nodes")

    async def define(self, name: str, *, recreate: bool = False, **more: Any) -> Definition:
        definition = read_definition({"name": name, "backend": "llama-cpp", **more})
        async with self.fleet.store.write() as tx:
            before = await models.find(tx, name)
            row = next_row(before, definition, origin=ModelOrigin.PERSON, source="", recreate=recreate)
            assert row is not None
            await models.put(tx, row)
            await revisions.bump(tx, "models")
        self._touched("models")
        return definition

    async def schedule(self, model: str, **known: Any) -> None:
        async with self.fleet.store.write() as tx:
            now = await tx.now()
            await model_schedules.put(
                tx, Schedule(model=model, id=f"schedule-of-{model}", created_at=now, updated_at=now, **known)
            )
            await revisions.bump(tx, "schedules")
        self._touched("schedules")

    async def forget(self, model: str) -> None:
        async with self.fleet.store.write() as tx:
            await models.delete(tx, model)
            await revisions.bump(tx, "models")
        self._touched("models")

    async def ask(self, model: str) -> LoadStatus:
        found: LoadStatus = await self.loads.request(model)
        return found

    async def status(self, model: str) -> LoadStatus | None:
        found: LoadStatus | None = await self.loads.find(model)
        return found

    async def rows(self, model: str = "") -> list[DesiredReplica]:
        async with self.fleet.store.read() as tx:
            return [row for row in await replicas.list_(tx) if model in ("", row.model)]

    async def jobs(self) -> list[str]:
        async with self.fleet.store.read() as tx:
            return [job.model for job in await load_jobs.list_(tx)]

    async def shown(self, model: str = "") -> list[ViewReplica]:
        """What gateways are told."""
        async with self.fleet.store.read() as tx:
            found, _ = await read_routing(tx)
        return [each for each in found if model in ("", each.model)]

    async def until_ready(self, model: str, count: int = 1) -> list[ViewReplica]:
        async def ready() -> bool:
            return len(await self.shown(model)) == count

        try:
            await until(ready, f"{count} of {model}")
        except AssertionError:
            raise AssertionError(f"{await self.shown()}; {await self.rows()}; {await self.status(model)}") from None
        return await self.shown(model)

    async def until_failed(self, model: str) -> LoadStatus:
        async def failed() -> bool:
            status = await self.status(model)
            return status is not None and status.state == "failed"

        await until(failed, f"failed load of {model}")
        status = await self.status(model)
        assert status is not None
        return status

    async def until_settled(self) -> None:
        """No load is under way."""

        async def settled() -> bool:
            return not await self.jobs()

        await until(settled, "end of the loads")

    async def until_gone(self, model: str) -> None:
        async def gone() -> bool:
            return not await self.rows(model)

        await until(gone, f"end of {model}")

    def _touched(self, counter: str) -> None:
        for controller in self.fleet.controllers:
            controller.feed.notify(counter)


@contextlib.asynccontextmanager
async def open_replica_fleet(
    url: str, *, pace: ReplicaPace = QUICK, yard: Yard | None = None
) -> AsyncIterator[ReplicaFleet]:
    async with open_fleet(url, yard=yard) as fleet:
        made = ReplicaFleet(fleet)
        made.add(fleet.first, pace)
        yield made
