"""What runs on a simulated machine: processes that outlive their worker, and what the worker's own code makes of them:
its handling of orders, its counts of requests, its reports. Only the supervisor is made up here, and how long it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from corral.bus.local import LocalBus
from corral.contract.messages.replicas import (
    START_REPLICA,
    STOP_REPLICA,
    ReplicaProcess,
    ReplicaState,
    StartReplica,
    StopReplica,
)
from corral.kit.errors import Conflict, Failed, NotFound
from corral.worker.agent.orders.replica_spec import RESTARTS
from corral.worker.agent.orders.replicas import ReplicaOrders
from corral.worker.agent.orders.runner import EventPublisher, OrderKey, OrderRunner, Outcome, Outcomes, Result
from corral.worker.files.model_files import WorkerFiles
from corral.worker.ingress.bridges import Bridges
from corral.worker.ingress.in_flight import InFlight
from corral.worker.ingress.load_reports import LoadReports
from corral.worker.ingress.replicas import ReplicaRelay
from corral.worker.installer.installer import Installer
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.supervisor.states import GiveUp, RestartIn, decide_restart
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.supervisor.table import Stopped

if TYPE_CHECKING:
    from tests.simulation.workers import Worker

LOAD_AGAIN_S = 10.0  # as long as there are requests under way, that is told so often
BUSY_IS_KNOWN_S = 60.0  # whoever listens has heard by now that a process has requests
_DRAIN_S = 60.0
_LIVE = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.RESTARTING)


@dataclass(eq=False)
class Process:
    order: StartReplica
    process_id: str
    digest: str  # of its backend
    state: ReplicaState = ReplicaState.STARTING
    ready_since: float = 0.0
    restarts: int = 0
    failures: int = 0
    error: str = ""
    answer: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    crashed: asyncio.Event = field(default_factory=asyncio.Event)
    keeper: asyncio.Task[None] | None = None

    @property
    def is_live(self) -> bool:
        return self.state in _LIVE

    @property
    def key(self) -> tuple[str, int]:
        return (self.order.model, self.order.replica)

    @property
    def listed(self) -> ReplicaProcess:
        order = self.order
        return ReplicaProcess(
            process_id=self.process_id,
            model=order.model,
            replica=order.replica,
            backend=order.backend,
            state=self.state.value,
            protocol="openai",
            revision=order.revision,
            digest=self.digest,
            slots=2,
            devices=order.devices,
            memory_bytes=order.memory_bytes,
            restarts=self.restarts,
            error=self.error,
        )

    def came_to(self, error: str = "") -> None:
        self.error = error
        if not self.answer.done():
            if error:
                self.answer.set_exception(Failed(error))
                self.answer.exception()
            else:
                self.answer.set_result(None)


class DiskOutcomes(Outcomes):
    """On the simulated disk; the worker may die before and after it is written."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(cast(Path, worker.disk), worker.sim.clock)
        self._worker = worker

    async def add(self, key: OrderKey, result: Result) -> Outcome:
        await self._worker.step()
        outcome = await super().add(key, result)
        ended = "done" if result.success else result.error
        self._worker.sim.note(self._worker.name, "ended", key.kind, key.about, key.op_id, key.attempt, ended)
        await self._worker.step()
        return outcome


async def _have_libraries(_build: InstalledBackend) -> None:
    """The simulated machines lack nothing."""


class ProcessHost:
    """One worker's life with its processes."""

    def __init__(self, worker: Worker, runner: OrderRunner, publisher: EventPublisher) -> None:
        self._worker = worker
        self._runner = runner
        self._publisher = publisher
        self._rows = worker.disk.processes
        self.in_flight = InFlight()
        self.ingress = ReplicaRelay(cast(Any, self.find), self.in_flight, cast(Bridges, None))
        self._tasks: set[asyncio.Task[None]] = set()
        self._may_break: set[str] = set()  # processes that somebody said are to end whatever they do
        self._told_to_stop: set[str] = set()
        self._busy_since: dict[str, float] = {}
        self.changed: Callable[[], None] = lambda: None  # who wants to hear of it
        self._orders = ReplicaOrders(
            cast(Installer, SimpleNamespace(find=self._find_build, ensure_libraries=_have_libraries)),
            cast(Supervisor, self),
            runner,
            publisher,
            Path(),
            cast(WorkerFiles, SimpleNamespace(ensure=self._ensure_files, protect=contextlib.nullcontext)),
            worker.sim.clock,
            self.ingress,
            drain_s=_DRAIN_S,
        )

    async def serve(self, bus: LocalBus) -> None:
        node_id = self._worker.node_id
        await bus.serve(START_REPLICA, self._told(self._orders.start), concurrency=64, node=node_id)
        await bus.serve(STOP_REPLICA, self._told(self._orders.stop), concurrency=64, node=node_id)

    @contextlib.asynccontextmanager
    async def alive(self, bus: LocalBus) -> AsyncIterator[None]:
        """With what an earlier worker left running; what was not ready then is ended."""
        for process in list(self._rows.values()):
            if process.state is not ReplicaState.READY:
                del self._rows[process.process_id]
        reports = LoadReports(self.in_flight, boot_id=self._worker.boot_id, interval_s=1.0, repeat_s=LOAD_AGAIN_S)
        telling = asyncio.ensure_future(reports.run(bus, self._worker.node_id))
        for process in list(self._rows.values()):
            self._keep(process, runs=True)
        try:
            yield
        finally:
            ending = [telling, *self._tasks]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    def die(self) -> None:
        """Its worker was killed: from here on nothing it does reaches the machine."""
        self._rows = {}
        for task in self._tasks:
            task.cancel()

    def _told(self, handle: Any) -> Any:
        async def handler(order: Any, tokens: Any) -> Any:
            worker = self._worker
            worker.sim.note(worker.name, "is told", type(order).__name__, order.process_id, order.attempt)
            if isinstance(order, StopReplica):
                self._is_stopped_by_order(order)
            await worker.step()
            answer = await handle(order, tokens)
            await worker.step()
            return answer

        return handler

    def _is_stopped_by_order(self, order: StopReplica) -> None:
        """5: whoever orders it has listened. What comes after the first order to stop is no surprise any more."""
        first = order.process_id not in self._told_to_stop
        self._told_to_stop.add(order.process_id)
        if order.force:
            self._may_break.add(order.process_id)
        elif first and self._worker.sim.is_load_known() and self.busy_for_s(order.process_id) > BUSY_IS_KNOWN_S:
            self._worker.sim.failed(f"{order.process_id} is told to end, and has had requests for long")

    # A client's request, as the ingress sees it.

    def busy_for_s(self, process_id: str) -> float:
        since = self._busy_since.get(process_id) if self.find(process_id) is not None else None
        return self._worker.sim.clock.monotonic() - since if since is not None else 0.0

    @property
    def used_bytes(self) -> int:
        """What its processes take: one that starts has not touched its memory yet."""
        return sum(each.order.memory_bytes for each in self._rows.values() if each.state is not ReplicaState.STARTING)

    def leave_behind(self, order: StartReplica) -> Process:
        """A process that serves and that nobody has ordered: of another fleet, or from before a database was lost."""
        process = Process(order, uuid.uuid4().hex, self._worker.disk.installed.get(order.backend, {}).get("digest", ""))
        process.state, process.ready_since = ReplicaState.READY, self._worker.sim.clock.monotonic()
        process.came_to()
        self._add(process)
        self._keep(process, runs=True)
        return process

    async def serve_alone(self, process_id: str, takes_s: float) -> None:
        """A request that came by another way than our gateway."""
        self._begin(process_id)
        try:
            await asyncio.sleep(takes_s)
        finally:
            self._end(process_id)

    def _begin(self, process_id: str) -> None:
        self.in_flight.begin(process_id)
        self._busy_since.setdefault(process_id, self._worker.sim.clock.monotonic())

    def _end(self, process_id: str) -> None:
        self.in_flight.end(process_id)
        if not self.in_flight.of(process_id):
            del self._busy_since[process_id]

    async def ask(self, process_id: str, model: str, revision: str, takes_s: float) -> bool:
        """False: no such process serves here."""
        process = cast("Process | None", self.ingress.serving(process_id))
        if process is None:
            return False
        if (process.order.model, process.order.revision) != (model, revision):
            self._worker.sim.failed(f"a request for {model} {revision} reached {process.listed}")
        await self.serve_alone(process_id, takes_s)
        return True

    # As the installer and the files, for an order.

    async def _find_build(self, backend: str, _digest: str) -> dict[str, Any] | None:
        return self._worker.disk.installed.get(backend)

    async def _ensure_files(self, _files: object, _sources: object, _token: str, _tell: object) -> None:
        worker = self._worker
        await asyncio.sleep(worker.chance.choice((0.0, 0.1, 2.0)))
        await worker.step()
        if worker.chance.random() < worker.sim.luck.fails / 4:
            raise Failed("its files did not come")

    # As the supervisor.

    def list_processes(self) -> tuple[ReplicaProcess, ...]:
        return tuple(process.listed for process in self._rows.values())

    def find(self, process_id: str) -> Process | None:
        """One that serves."""
        process = self._rows.get(process_id)
        return process if process is not None and process.state is ReplicaState.READY else None

    async def start(self, order: StartReplica, *, beside: bool = False) -> Any:
        process = self._claim(order, beside)
        if process.state is not ReplicaState.READY:
            answer = process.answer
            await asyncio.wait([answer])
            answer.result()
        if self._rows.get(process.process_id) is not process or process.state is not ReplicaState.READY:
            raise Conflict("it was stopped while it started")
        return SimpleNamespace(process_id=process.process_id)

    def _claim(self, order: StartReplica, beside: bool) -> Process:
        named = self._rows.get(order.process_id)
        key = (order.model, order.replica)
        same_key = [] if beside else [process for process in self._rows.values() if process.key == key]
        digest = self._worker.disk.installed.get(order.backend, {}).get("digest", "")
        for rival in [named] if named is not None else same_key:
            match rival.state:
                case ReplicaState.FAILED:
                    del self._rows[rival.process_id]
                case ReplicaState.STOPPING:
                    raise Conflict("it is still stopping")
                case _ if (rival.order.revision, rival.digest) == (order.revision, digest):
                    return rival
                case _:
                    raise Conflict(f"one of {rival.order.revision} runs already, not of {order.revision}")
        if order.backend not in self._worker.disk.installed:
            raise Failed("the folder of its backend is gone")  # since the order found it there
        process_id = order.process_id
        if not process_id or process_id in self._worker.disk.process_ids:
            process_id = uuid.uuid4().hex
        process = Process(order, process_id, digest)
        self._add(process)
        self._keep(process)
        return process

    def _add(self, process: Process) -> None:
        self._rows[process.process_id] = process
        self._worker.disk.process_ids.add(process.process_id)
        self.changed()

    def _keep(self, process: Process, *, runs: bool = False) -> None:
        task = process.keeper = asyncio.ensure_future(self._live(process, runs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, process: Process, runs: bool) -> None:
        worker = self._worker
        while True:
            if not runs:
                await asyncio.sleep(worker.takes_s())
                if worker.fails():
                    if not process.ready_since and not process.restarts:
                        del self._rows[process.process_id]
                        process.came_to("it ended before it was ready")
                        self.changed()
                        return
                    if not await self._comes_back(process, "it ended at once"):
                        return
                    continue
                process.state, process.ready_since = ReplicaState.READY, worker.sim.clock.monotonic()
                process.came_to()
                self.changed()
            runs = False
            process.crashed.clear()
            await process.crashed.wait()
            if not await self._comes_back(process, "it crashed"):
                return

    async def _comes_back(self, process: Process, error: str) -> bool:
        ran_s = self._worker.sim.clock.monotonic() - process.ready_since if process.ready_since else 0.0
        process.ready_since = 0.0
        following = decide_restart(RESTARTS, failures=process.failures, ran_s=ran_s)
        process.failures = following.failures
        process.came_to(error)
        match following:
            case GiveUp():
                process.state = ReplicaState.FAILED
                self.changed()
                return False
            case RestartIn(seconds=seconds):
                process.state, process.answer = ReplicaState.RESTARTING, asyncio.get_running_loop().create_future()
                self.changed()
                await asyncio.sleep(seconds)
        del self._rows[process.process_id]
        process.process_id, process.state = uuid.uuid4().hex, ReplicaState.STARTING
        process.restarts += 1
        self._add(process)
        return True

    def crash(self, process_id: str) -> None:
        process = self._rows[process_id]
        if process.state is ReplicaState.READY:
            process.crashed.set()

    async def stop(self, process_id: str, *, grace_s: float | None = None, force: bool = False) -> Stopped:
        process = self._rows.get(process_id)
        if process is None:
            raise NotFound(f"there is no process {process_id}")
        busy = process.state is ReplicaState.READY and self.in_flight.of(process_id) > 0
        if busy and not force and process_id not in self._may_break:
            self._worker.sim.failed(f"{process_id} of {process.key} is stopped with requests under way")
        process.state = ReplicaState.STOPPING
        if process.keeper is not None:
            process.keeper.cancel()
        process.came_to("it was stopped while it started")
        self.changed()
        await asyncio.sleep(self._worker.chance.uniform(0.0, 1.0))
        self._rows.pop(process_id, None)
        self.changed()
        return Stopped(process_id, str(process.key), "")

    # When a backend changes.

    def is_in_use(self, backend: str) -> bool:
        """Whether something runs from its files. The installer looks before it removes them, and refuses then:
        between the end of what ran and the delete, an order may have started another."""
        return any(
            each.order.backend == backend and each.state is not ReplicaState.FAILED for each in self._rows.values()
        )

    async def stop_all_of(self, backend: str) -> None:
        for process in [each for each in self._rows.values() if each.order.backend == backend]:
            with contextlib.suppress(NotFound):
                await self.stop(process.process_id, force=True)

    async def replace_all_of(self, backend: str) -> None:
        """By processes of what is installed now, each beside the old one until it serves."""
        digest = self._worker.disk.installed.get(backend, {}).get("digest", "")
        for old in [each for each in self._rows.values() if each.order.backend == backend and each.state in _LIVE]:
            if old.digest == digest or old.process_id not in self._rows:
                continue
            new = Process(old.order, uuid.uuid4().hex, digest)
            self._add(new)
            self._keep(new)
            await asyncio.wait([new.answer])
            if new.answer.exception() is not None:
                continue  # the old one stays
            await self.ingress.retire(old.process_id, _DRAIN_S)
            with contextlib.suppress(NotFound):
                await self.stop(old.process_id, force=True)
