"""Carries out accepted orders: each once, listed while it runs, its outcome stored on the disk and then published.

Orders outlive the connection they came over, and end with the worker: the controller sees by the worker's new boot id
that an order is lost, and sends it again. So the code that carries out an order keeps an `EventPublisher`, not a bus.

The same order (kind, operation, attempt, target) finds its stored outcome, also after a kill -9, and is not carried out
again. An event that cannot be published is not kept: the next heartbeats list the outcomes of the last minutes, and
progress is followed by more progress.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from corral.bus.api import Bus
from corral.contract.codec import Message, Undecodable, always, decode, encode
from corral.contract.messages.backends import DELETE_RESULT, INSTALL_RESULT, UPGRADE_RESULT, BackendResult
from corral.contract.messages.replicas import START_REPLICA_RESULT, STOP_REPLICA_RESULT, ReplicaResult
from corral.contract.messages.staging import STAGE_RESULT, StageResult
from corral.contract.subjects import Event
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Unavailable
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.threads import in_daemon_thread
from corral.worker.metrics import WorkerMetrics

log = get_log(__name__)
M = TypeVar("M", bound=Message)
T = TypeVar("T")

MAX_OUTCOMES = 256
FRESH_S = 600.0
MAX_ERROR_LENGTH = 4000

Result = BackendResult | ReplicaResult | StageResult


class OrderKind(StrEnum):
    INSTALL = "install"
    UPGRADE = "upgrade"
    DELETE = "delete"
    START_REPLICA = "replica.start"
    STOP_REPLICA = "replica.stop"
    STAGE_MODEL = "model.stage"


BACKEND_ORDERS = frozenset({OrderKind.INSTALL, OrderKind.UPGRADE, OrderKind.DELETE})


@dataclass(frozen=True)
class OrderKey:
    """Names an order. One operation may concern several backends, and may fetch first and switch later."""

    kind: str  # an `OrderKind`
    op_id: str
    attempt: int
    about: str  # the backend's name, the process id, or the model


class Outcome(Message, frozen=True):
    """One of the results is set."""

    kind: str = always(str)
    about: str = always(str)
    ended_at: float = always(float)  # seconds since the epoch
    backend: BackendResult | None = None
    replica: ReplicaResult | None = None
    staged: StageResult | None = None

    @property
    def found(self) -> Result | None:
        """None: a later version of the worker wrote it."""
        return self.backend or self.replica or self.staged

    @property
    def result(self) -> Result:
        assert self.found is not None
        return self.found

    @property
    def key(self) -> OrderKey:
        return OrderKey(self.kind, self.result.op_id, self.result.attempt, self.about)


class _OutcomeFile(Message, frozen=True):
    outcomes: tuple[Outcome, ...] = always(tuple)


class Outcomes:
    def __init__(self, path: Path, clock: Clock, *, keep: int = MAX_OUTCOMES, fresh_s: float = FRESH_S) -> None:
        self._path = path
        self._clock = clock
        self._keep = keep
        self._fresh_s = fresh_s
        self._known: dict[OrderKey, Outcome] = {}
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Read the file, once, before any order. With an unreadable file a repeated order is carried out again."""
        try:
            written = decode(_OutcomeFile, self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, Undecodable) as error:
            log.warning("outcomes of earlier orders cannot be read", file=str(self._path), reason=str(error))
            return
        usable = [outcome for outcome in written.outcomes if outcome.found is not None]
        self._known = {outcome.key: outcome for outcome in usable[-self._keep :]}

    def find(self, key: OrderKey) -> Outcome | None:
        return self._known.get(key)

    def recent(self) -> tuple[Outcome, ...]:
        """Outcomes of the last minutes, oldest first. A clock that was set back makes them younger, not older."""
        since = self._clock.now().timestamp() - self._fresh_s
        return tuple(outcome for outcome in self._known.values() if outcome.ended_at >= since)

    def refused_for_libraries(self) -> tuple[Outcome, ...]:
        """Orders that failed because the machine lacks a library, where no later order concerned the same backend."""
        last = {outcome.about: outcome for outcome in self._known.values() if outcome.backend is not None}
        return tuple(outcome for outcome in last.values() if outcome.backend is not None and outcome.backend.missing)

    async def add(self, key: OrderKey, result: Result) -> Outcome:
        """Store an outcome. It is on the disk when this returns; if writing fails, the worker knows it until it
        ends."""
        if len(result.error) > MAX_ERROR_LENGTH:
            # The beginning says what failed, the end has the last lines of the process that failed.
            half = MAX_ERROR_LENGTH // 2
            result = msgspec.structs.replace(result, error=f"{result.error[:half]} … {result.error[-half:]}")
        outcome = Outcome(
            kind=key.kind,
            about=key.about,
            ended_at=self._clock.now().timestamp(),
            backend=result if isinstance(result, BackendResult) else None,
            replica=result if isinstance(result, ReplicaResult) else None,
            staged=result if isinstance(result, StageResult) else None,
        )
        self._known.pop(key, None)
        self._known[key] = outcome
        while len(self._known) > self._keep:
            del self._known[next(iter(self._known))]
        async with self._writing:
            try:
                written = encode(_OutcomeFile(tuple(self._known.values())))
                # Not a thread of the pool: unpacking may occupy all of those for minutes.
                await in_daemon_thread(lambda: write_atomically(self._path, written, mode=0o600))
            except OSError as error:
                log.error("outcome could not be written", op=key.op_id, reason=str(error))
        return outcome


_RESULT_EVENTS: dict[str, Event[Any]] = {
    OrderKind.INSTALL: INSTALL_RESULT,
    OrderKind.UPGRADE: UPGRADE_RESULT,
    OrderKind.DELETE: DELETE_RESULT,
    OrderKind.START_REPLICA: START_REPLICA_RESULT,
    OrderKind.STOP_REPLICA: STOP_REPLICA_RESULT,
    OrderKind.STAGE_MODEL: STAGE_RESULT,
}


class EventPublisher:
    def __init__(self) -> None:
        self.node_id = ""  # the last one: an outcome belongs to the node that got the order
        self._bus: Bus | None = None

    @contextlib.contextmanager
    def connected_to(self, bus: Bus, node_id: str) -> Iterator[None]:
        """Publish over this connection while the block runs."""
        self._bus, self.node_id = bus, node_id
        try:
            yield
        finally:
            self._bus = None

    async def publish(self, event: Event[M], message: M, *, op: str) -> None:
        """Raises `Unavailable` and the errors of `Bus.publish`."""
        if self._bus is None:
            raise Unavailable("there is no connection to the bus")
        await self._bus.publish(event, message, node=self.node_id, op=op)

    async def publish_outcome(self, outcome: Outcome) -> None:
        """Publish the result of an order; a failure is only logged."""
        event, result = _RESULT_EVENTS[outcome.kind], outcome.result
        try:
            await self.publish(event, result, op=result.op_id)
        except CorralError as error:
            log.warning("outcome not published", what=event.subject.template, op=result.op_id, reason=error.message)


OnOutcome = Callable[[Outcome], Awaitable[None]]


@dataclass(eq=False)
class OrderRun:
    """One order that runs. Its work calls `commit` at the point from which the order can no longer be cancelled."""

    key: OrderKey
    is_cancelled: bool = False
    is_committed: bool = False
    has_begun: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def commit(self) -> None:
        self.is_committed = True


class OrderRunner:
    """`async with`: leaving the block ends all running orders, without an outcome."""

    def __init__(
        self,
        outcomes: Outcomes,
        on_outcome: OnOutcome,
        *,
        metrics: WorkerMetrics | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_outcome` is awaited after an outcome is stored, and again for an order that is repeated. `on_change` is
        called when an order begins and when it ends."""
        self._outcomes = outcomes
        self._on_outcome = on_outcome
        self._metrics = metrics or WorkerMetrics()
        self._on_change = on_change
        self._runs: dict[OrderKey, OrderRun] = {}
        # No task group: one order's failure must not end the others.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> OrderRunner:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.cancel_all()

    async def cancel_all(self) -> None:
        """Cancel all orders; they have ended when this returns."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            # Cancelled again after a while: a library may swallow a cancellation.
            await asyncio.wait(self._tasks, timeout=5.0)

    def running(self) -> tuple[OrderKey, ...]:
        return tuple(self._runs)

    def accept(
        self, key: OrderKey, work: Callable[[OrderRun], Awaitable[Result]], *, cancelled: Callable[[], Result]
    ) -> None:
        """Begin to carry out an order, unless it runs already or has ended. `work` turns its errors into a result;
        `cancelled` makes the result of a cancelled order."""
        if (outcome := self._outcomes.find(key)) is not None:
            log.info("order was carried out before", kind=key.kind, about=key.about, op=key.op_id, attempt=key.attempt)
            self._begin(self._report(outcome))
        elif key not in self._runs:
            run = self._runs[key] = OrderRun(key)
            run.task = self._begin(self._carry_out(run, work, cancelled))
            log.info("order accepted", kind=key.kind, about=key.about, op=key.op_id, attempt=key.attempt)
            self._count()

    def cancel(self, op_id: str, about: str, *, kind: str = "") -> bool:
        """Cancel an order, of this kind if one is given. Returns whether such an order runs; its outcome is reported
        like any other."""
        found = [
            run
            for run in self._runs.values()
            if (run.key.op_id, run.key.about) == (op_id, about) and kind in ("", run.key.kind)
        ]
        for run in found:
            if not run.is_committed and run.task is not None:
                run.is_cancelled = True
                if run.has_begun:  # else `_carry_out` sees the flag: a task cancelled before it begins never runs
                    run.task.cancel()
        return bool(found)

    async def run_detached(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that continues when the caller is cancelled: the connection of the request may break."""
        return await asyncio.shield(self._begin(work))

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, CorralError):
            log.error("order failed unexpectedly", exc_info=error)

    async def _carry_out(
        self, run: OrderRun, work: Callable[[OrderRun], Awaitable[Result]], cancelled: Callable[[], Result]
    ) -> None:
        key = run.key
        run.has_begun = True
        try:
            try:
                result = cancelled() if run.is_cancelled else await work(run)
            except asyncio.CancelledError:
                if not run.is_cancelled:
                    raise  # the worker ends: the controller sends the order again, to the next worker
                result = cancelled()
            run.commit()
            outcome = await self._outcomes.add(key, result)
        finally:
            del self._runs[key]
            self._count()
        ending = "cancelled" if run.is_cancelled else "success" if result.success else "failed"
        self._metrics.orders.labels(kind=key.kind, outcome=ending).inc()
        log.info("order ended", kind=key.kind, about=key.about, op=key.op_id, how=ending)
        await self._on_outcome(outcome)

    async def _report(self, outcome: Outcome) -> None:
        # A coroutine of its own: one made by the caller would never be awaited if the task is cancelled before it
        # begins.
        await self._on_outcome(outcome)

    def _count(self) -> None:
        self._metrics.running_orders.set(len(self._runs))
        self._on_change()
