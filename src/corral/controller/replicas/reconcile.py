"""Brings about that the models that should answer do: reads the world, asks `plan`, writes, and sends.

One controller does it at a time, under a lease; every write is fenced by it. Nothing is held while we think: what only
we write is read again before it is changed, and if somebody asked for something meanwhile, we look again. Orders go out
after the commit; if we die in between, whoever holds the lease next finds them claimed under an older epoch and sends
them again, as the same attempt. Safe to call at any time, any number of times, for any reason.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from msgspec.structs import replace as changed

from corral.bus.api import Bus, Tokens
from corral.contract.messages.backends import Phase
from corral.contract.messages.replicas import (
    START_REPLICA_PROGRESS,
    START_REPLICA_RESULT,
    ReplicaProgress,
    ReplicaResult,
    StartReplica,
    StopReplica,
)
from corral.controller.backends.rules import Wanted
from corral.controller.inventory.activity import ActivityTracker
from corral.controller.orders.observations import OrderEnded, ReplicaObservation, WorkerUnreachable
from corral.controller.orders.order import OrderId
from corral.controller.orders.replica_calls import ReplicaOrders
from corral.controller.registry.changes import NodeChanges
from corral.controller.replicas.backend_provisioner import Bringing
from corral.controller.replicas.builds import Builds
from corral.controller.replicas.facts import Decided, Facts, Files, Key
from corral.controller.replicas.file_provisioner import Fetching, FilesOfModels
from corral.controller.replicas.lifecycle import Ready, Start, Times
from corral.controller.replicas.load_jobs import Cooldown, Moved
from corral.controller.replicas.plan import decide
from corral.controller.replicas.world import (
    FindMemory,
    Read,
    anything_to_do,
    read_all,
    read_own,
    storable_job,
    storable_replica,
)
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.counters import LOADS, REPLICAS
from corral.controller.runtime.leadership import Leadership
from corral.controller.scheduler.world import Policy, World
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.tasks import BackgroundTasks, Wake, run_every
from corral.store.engine.transactions import Store
from corral.store.records import DesiredReplica, ReplicaStage
from corral.store.tables import load_jobs, model_schedules, models, replicas, revisions

log = get_log(__name__)

LEASE = "replicas"
WAKES = ("inventory", "nodes", "models", "schedules", LOADS)
_USED_COUNTS = timedelta(seconds=5)  # when it was last used is written down no finer than this


@dataclass(frozen=True)
class Pace:
    every_s: float = 5.0  # while nothing is heard
    busy_s: float = 0.5  # the same while something is under way
    rest_s: float = 0.1  # between two looks, so that what comes together is handled together
    strays_every_s: float = 30.0  # a look at everything, though nothing is wanted


@dataclass(frozen=True)
class ReplicaOptions:
    pace: Pace = field(default_factory=Pace)
    times: Times = field(default_factory=Times)
    cooldown: Cooldown = field(default_factory=Cooldown)
    policy: Policy = field(default_factory=Policy)
    idle_unload_s: float = 0.0
    localai: bool = False  # LocalAI workers are served from here
    stop_grace_s: float = 0.0  # 0: the worker's own


def no_pressure(_model: str, _within_s: float) -> int:
    return 0


class ReplicaLoop:
    name = "replicas"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        calls: ReplicaOrders,
        leadership: Leadership,
        changes: NodeChanges,
        feed: ChangeFeed,
        clock: Clock,
        *,
        builds: Builds,
        bringing: Bringing,
        fetching: Fetching,
        files: FilesOfModels,
        quiet: ActivityTracker,
        memory: FindMemory,
        waiting: Callable[[], Mapping[str, int]] = dict,
        pressure: Callable[[str, float], int] = no_pressure,
        options: ReplicaOptions | None = None,
    ) -> None:
        """`waiting`: requests that wait at gateways, by model, as far as this controller is told; `pressure`: how often
        within so many seconds a prompt of a model could not go to the replica that knows its beginning."""
        self._store = store
        self._bus = bus
        self._calls = calls
        self._leadership = leadership
        self._changes = changes
        self._feed = feed
        self._clock = clock
        self._builds = builds
        self._bringing = bringing
        self._fetching = fetching
        self._files = files
        self._quiet = quiet
        self._memory = memory
        self._waiting = waiting
        self._pressure = pressure
        self._options = options or ReplicaOptions()
        self._wake = Wake()
        self._heard: list[ReplicaObservation] = []
        self._progress: dict[OrderId, ReplicaProgress] = {}
        self._strays: dict[str, datetime] = {}
        self._cleared: frozenset[str] = frozenset()  # processes nobody wanted, that were told to end
        self._busy_since: dict[str, float] = {}  # by model: since when all that can answer are busy
        self._looked_at = float("-inf")
        self._room_may_have_come = False
        self._at_work = False
        self._orders = BackgroundTasks()

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        for counter in WAKES:
            self._feed.on(counter, self.wake)
        for counter in ("nodes", "schedules"):
            self._feed.on(counter, self._look_for_room_again)
        forget = self._bus.on_change(lambda _: self.wake())
        try:
            async with AsyncExitStack() as stack:
                for part in (self._builds, self._bringing, self._fetching):
                    await stack.enter_async_context(part)
                await self._quiet.listen()
                await self._bus.subscribe(START_REPLICA_RESULT, self._result)
                await self._bus.subscribe(START_REPLICA_PROGRESS, self._progressed)
                async with asyncio.TaskGroup() as tasks, self._orders:
                    tasks.create_task(self._tick())
                    await run_every(
                        self.name, self._options.pace.every_s, self._paced, clock=self._clock, wake=self._wake
                    )
        finally:
            forget()

    def _look_for_room_again(self) -> None:
        """A node joined, has other labels or another budget: what found no place before may find one."""
        self._room_may_have_come = True

    async def _tick(self) -> None:
        """What waits for a moment, and not for news, is looked at soon."""
        while True:
            await self._clock.sleep(self._options.pace.busy_s)
            if self._at_work:
                self.wake()

    async def _paced(self) -> None:
        began = self._clock.monotonic()
        await self.look()
        took_s = self._clock.monotonic() - began
        # In a large fleet a look takes a while, and there is always news: the rest of the house wants to live, too.
        await self._clock.sleep(max(self._options.pace.rest_s, min(2 * took_s, self._options.pace.every_s)))

    async def _result(self, result: ReplicaResult, tokens: Tokens) -> None:
        # Whose subject it came on is certain; what it says of itself is not.
        order = OrderId(tokens["node"], result.op_id, result.attempt)
        self._hear(OrderEnded(order, result.success, result.error))

    async def _progressed(self, told: ReplicaProgress, tokens: Tokens) -> None:
        order = OrderId(tokens["node"], told.op_id, told.attempt)
        before = self._progress.get(order)
        if before is None or before.seq < told.seq:
            self._progress[order] = told

    def _moved(self, read: Read) -> dict[Key, Moved]:
        """What nodes tell of the backends and files they fetch."""
        found = dict(read.installing)
        orders = {OrderId(row.node_id, row.op_id, row.attempt): row for row in read.rows}
        self._progress = {order: told for order, told in self._progress.items() if order in orders}
        for order, told in self._progress.items():
            staging = told.phase != Phase.STARTING
            text = f"{told.phase} {told.file}".strip() if staging else ""
            found[orders[order].key] = Moved(
                told.current_bytes, told.total_bytes, told.file_index, told.total_files, text, staging
            )
        return found

    def _hear(self, heard: ReplicaObservation) -> None:
        self._heard.append(heard)
        self.wake()

    async def look(self) -> None:
        if not await self._leadership.lead(LEASE, every_s=self._options.pace.every_s):
            self._heard.clear()  # whoever leads finds it out from the heartbeats, or asks again
            self._progress.clear()
            self._at_work = False
            self._fetching.want({})
            return
        if self._bus.connected and await self._is_due():
            await self._pass()

    async def _is_due(self) -> bool:
        async with self._store.read() as tx:
            if await anything_to_do(tx):
                return True
        self._at_work = False
        return self._clock.monotonic() - self._looked_at >= self._options.pace.strays_every_s

    async def _pass(self) -> None:
        self._looked_at = self._clock.monotonic()
        heard, self._heard = self._heard, []
        room_may_have_come = self._room_may_have_come
        fetched = self._fetching.known()  # before the store is read: what is known here is on file there
        try:
            async with self._store.read() as tx:
                read = await read_all(
                    tx,
                    idle_unload_s=self._options.idle_unload_s,
                    build=self._builds.of,
                    installed=self._builds.installed,
                    quiet=self._quiet.find,
                    memory=self._memory,
                    localai=self._builds.for_localai if self._options.localai else None,
                )
            decided = decide(self._facts(read, heard, fetched))
            with self._leadership.resign_if_unknown(LEASE):
                written = await self._write(read, decided)
            if not written:
                self._again(heard, room_may_have_come)
                self.wake()
                return
        except BaseException:
            self._again(heard, room_may_have_come)
            raise
        self._strays = decided.strays
        self._cleared = (self._cleared & read.process_ids) | {process_id for _, process_id in decided.clear}
        self._send(read, decided)
        self._want(read, decided)
        active = any(job.active for job in decided.jobs.values())
        self._at_work = active or any(row.stage is not ReplicaStage.RUNNING for row in decided.rows.values())
        self._quiet.forget_all_but(read.process_ids)

    def _again(self, heard: list[ReplicaObservation], room_may_have_come: bool) -> None:
        """Nothing came of this look: what was known only here is for the next."""
        self._heard = heard + self._heard
        self._room_may_have_come = self._room_may_have_come or room_may_have_come

    def _facts(self, read: Read, heard: list[ReplicaObservation], fetched: dict[tuple[str, str], Files]) -> Facts:
        backends = dict(read.backends)
        for key, why in self._bringing.refused.items():
            backends[key] = Ready(trouble=f"{key[1]} cannot be installed there: {why}")
        rows = [self._used(row, read) for row in read.rows]
        waiting = self._waiting()
        known = {
            name: replace(
                model,
                busy_for_s=self._busy_for_s(name, rows, read),
                waiting=max(model.waiting, waiting.get(name, 0)),
                only_load_waits=model.only_load_waits and not waiting.get(name, 0),
                pressure=self._pressure(name, _since_newest_s(name, rows, read)),
            )
            for name, model in read.models.items()
        }
        return Facts(
            read.now,
            self._leadership.epoch(LEASE),
            World(read.now, read.nodes, known, policy=self._options.policy),
            read.places,
            rows,
            read.jobs,
            heard,
            backends,
            fetched,
            self._moved(read),
            read.previous_revisions,
            self._strays,
            self._cleared,
            frozenset(model.backend for model in known.values() if self._builds.is_looking(model.backend)),
            self._options.times,
            self._options.cooldown,
        )

    def _used(self, row: DesiredReplica, read: Read) -> DesiredReplica:
        where = read.places.get(row.node_id)
        process = where.process_of(row) if where is not None else None
        ago_s = self._quiet.used_s_ago(process.process_id) if process is not None else None
        if ago_s is None:
            return row
        at = read.now - timedelta(seconds=ago_s)
        return changed(row, last_used_at=at) if row.last_used_at is None or row.last_used_at < at else row

    def _busy_for_s(self, model: str, rows: list[DesiredReplica], read: Read) -> float:
        ready = [row for row in rows if row.model == model and row.stage is ReplicaStage.RUNNING]
        busy = False
        for row in ready:
            where = read.places.get(row.node_id)
            process = where.process_of(row) if where is not None else None
            if where is None or process is None:
                continue
            busy = where.quiet[process.process_id].in_flight >= max(1, process.slots)
            if not busy:
                break
        if not busy:
            self._busy_since.pop(model, None)
            return 0.0
        now = self._clock.monotonic()
        return now - self._busy_since.setdefault(model, now)

    async def _write(self, read: Read, decided: Decided) -> bool:
        """False: somebody else wrote meanwhile."""
        before = {row.key: row for row in read.rows}
        put = [row for key, row in decided.rows.items() if not _is_same(before.get(key), row)]
        gone = [row for key, row in before.items() if key not in decided.rows]
        jobs = [job for name, job in decided.jobs.items() if read.jobs.get(name) != job]
        done = sorted(read.jobs.keys() - decided.jobs.keys())
        settled = {name: revision for name, revision in decided.ready.items() if read.previous_revisions.get(name)}
        scheduled = {name: found for name, found in decided.unsatisfied.items() if read.models[name].schedule.scales}
        clear, self._room_may_have_come = self._room_may_have_come, False
        if not (put or gone or jobs or done or settled or scheduled or clear):
            return True
        routing = bool(gone or settled) or any(_changes_routing(before.get(row.key), row) for row in put)
        async with self._store.write() as tx:
            await self._leadership.require(tx, LEASE)
            rows, known = await read_own(tx)
            if rows != read.rows or known != read.jobs:
                return False
            await replicas.delete(tx, gone)
            await replicas.put(tx, [storable_replica(row) for row in put])
            await load_jobs.put(tx, [storable_job(job) for job in jobs])
            await load_jobs.delete(tx, done)
            for name, revision in sorted(settled.items()):
                await models.forget_previous_revisions(tx, name, revision)
            if clear:
                self.wake()
                await model_schedules.clear_unsatisfiable(tx)
            for name, (ticks, until) in sorted(scheduled.items()):
                await model_schedules.mark_unsatisfiable(tx, name, ticks, until)
            if jobs or done:
                await revisions.bump(tx, LOADS)
            if routing:
                await revisions.bump(tx, REPLICAS)
        if jobs or done:
            self._feed.notify(LOADS)
        if routing:
            self._feed.notify(REPLICAS)
        return True

    def _send(self, read: Read, decided: Decided) -> None:
        for words, row in decided.events:
            where = read.places.get(row.node_id)
            log.info(
                words.splitlines()[0][:200],
                model=row.model,
                node=where.name if where is not None else "",
                node_id=row.node_id,
                replica=row.replica,
                why=row.reason,
            )
        for start in decided.starts:
            definition = read.definitions.get(start.row.model)
            if definition is not None:
                self._orders.start(self._order_start(start, definition.whole), name=f"start {start.row.model}")
        for row, process_id in decided.stops:
            self._orders.start(
                self._order_stop(row.node_id, process_id, row.op_id, row.stop_attempt, row.force),
                name=f"stop {process_id}",
            )
        for node_id, process_id in decided.clear:
            # Without force: what is seen as idle from here may have got a request a moment ago.
            self._orders.start(
                self._order_stop(node_id, process_id, f"clear-{process_id}", 0, False), name=f"stop {process_id}"
            )

    def _want(self, read: Read, decided: Decided) -> None:
        placed = [row for row in decided.rows.values() if row.stage is ReplicaStage.PLACED]
        lacking = {
            (row.node_id, row.backend)
            for row in placed
            if not read.backends.get((row.node_id, row.backend), Ready()).backend
            and not isinstance(read.wanted.get((row.node_id, row.backend)), Wanted)
        }
        self._bringing.want(lacking)
        self._fetching.want(
            {
                (row.model, row.revision): read.definitions[row.model]
                for row in placed
                if row.files is None and row.model in read.definitions
            }
        )

    async def _order_start(self, start: Start, definition: dict[str, Any]) -> None:
        row = start.row
        urls, token = self._files.sources_for(row.node_id, row.files or ())
        heard = await self._calls.start(
            row.node_id,
            StartReplica(
                op_id=row.op_id,
                attempt=row.attempt,
                process_id=row.process_id,
                model=row.model,
                replica=row.replica,
                backend=row.backend,
                revision=row.revision,
                definition=definition,
                files=row.files or (),
                devices=row.devices,
                memory_bytes=row.memory_bytes,
                sources=urls,
                source_token=token,
                accept=True,
            ),
        )
        log.info("replica ordered", model=row.model, node_id=row.node_id, answer=type(heard).__name__)
        if isinstance(heard, WorkerUnreachable):
            await self._changes.mark_unreachable(row.node_id)
        self._hear(heard)

    async def _order_stop(self, node_id: str, process_id: str, op_id: str, attempt: int, force: bool) -> None:
        order = StopReplica(
            process_id=process_id,
            grace_s=self._options.stop_grace_s,
            op_id=op_id,
            attempt=attempt,
            accept=attempt > 0,
            force=force,
        )
        await self._calls.stop(node_id, order)
        self.wake()


def _is_same(before: DesiredReplica | None, after: DesiredReplica) -> bool:
    """Apart from when it was last used, if that has hardly moved."""
    if before is None or before == after:
        return before is not None
    if changed(before, last_used_at=after.last_used_at) != after or after.last_used_at is None:
        return False
    return before.last_used_at is not None and after.last_used_at - before.last_used_at < _USED_COUNTS


def _changes_routing(before: DesiredReplica | None, after: DesiredReplica) -> bool:
    return (before is not None and before.stage is ReplicaStage.LEAVING) != (after.stage is ReplicaStage.LEAVING)


def _since_newest_s(model: str, rows: list[DesiredReplica], read: Read) -> float:
    """Whatever led to the newest replica is mended by it: it must not lead to another
    (docs/reference/wire/routing.md#scaling)."""
    newest = max((row.created_at for row in rows if row.model == model), default=None)
    return math.inf if newest is None else max(0.0, (read.now - newest).total_seconds())
