"""Orders that were accepted and are being carried out: each once, listed while they run, told when they have ended.

They outlive the connection they came over, and end with the worker: whoever ordered sees by the worker's new boot id
that an order is gone, and sends it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from corral.contract.messages.backends import BackendResult
from corral.contract.messages.replicas import ReplicaResult
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.worker.agent.outcomes import OrderKey, Outcome, Outcomes
from corral.worker.metrics import WorkerMetrics

log = get_log(__name__)
T = TypeVar("T")

Result = BackendResult | ReplicaResult
Tell = Callable[[Outcome], Awaitable[None]]


@dataclass(eq=False)
class Run:
    """Handed to the work. `hold_on` marks the point from which it goes through, whoever cancels."""

    key: OrderKey
    cancelled: bool = False
    held: bool = False
    begun: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def hold_on(self) -> None:
        self.held = True


class OrderRuns:
    """`async with`: leaving it ends what runs, without an outcome."""

    def __init__(
        self, outcomes: Outcomes, *, metrics: WorkerMetrics | None = None, changed: Callable[[], None] = lambda: None
    ) -> None:
        """`changed` is called when an order begins and when it ends."""
        self._outcomes = outcomes
        self._metrics = metrics or WorkerMetrics()
        self._changed = changed
        self._runs: dict[OrderKey, Run] = {}
        # No task group: one order's failure must not end the others.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> OrderRuns:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.end()

    async def end(self) -> None:
        """Give up what runs. It has ended when this returns."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            # Asked again after a while: somewhere below, a library may swallow a cancellation.
            await asyncio.wait(self._tasks, timeout=5.0)

    def running(self) -> tuple[OrderKey, ...]:
        return tuple(self._runs)

    def accept(
        self, key: OrderKey, work: Callable[[Run], Awaitable[Result]], tell: Tell, *, given_up: Callable[[], Result]
    ) -> None:
        """Carry it out, unless that is under way or over. `work` answers its own errors; `given_up` is the result of
        one that was cancelled."""
        if (outcome := self._outcomes.find(key)) is not None:
            log.info("order was carried out before", kind=key.kind, about=key.about, op=key.op_id, attempt=key.attempt)
            self._begin(_told(tell, outcome))
        elif key not in self._runs:
            run = self._runs[key] = Run(key)
            run.task = self._begin(self._carry_out(run, work, tell, given_up))
            log.info("order accepted", kind=key.kind, about=key.about, op=key.op_id, attempt=key.attempt)
            self._count()

    def cancel(self, op_id: str, about: str, *, kind: str = "") -> bool:
        """Whether there is such an order under way, of this kind if one is given; its outcome comes as that of any
        other."""
        found = [
            run
            for run in self._runs.values()
            if (run.key.op_id, run.key.about) == (op_id, about) and kind in ("", run.key.kind)
        ]
        for run in found:
            if not run.held and run.task is not None:
                run.cancelled = True
                if run.begun:  # else it finds out as soon as it begins: a task cancelled before that never runs at all
                    run.task.cancel()
        return bool(found)

    async def see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """Work somebody waits for, which goes on when they are gone: the connection they asked over may break."""
        return await asyncio.shield(self._begin(work))

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, CorralError):
            log.error("carrying out an order failed", exc_info=error)

    async def _carry_out(
        self, run: Run, work: Callable[[Run], Awaitable[Result]], tell: Tell, given_up: Callable[[], Result]
    ) -> None:
        key = run.key
        run.begun = True
        try:
            try:
                result = given_up() if run.cancelled else await work(run)
            except asyncio.CancelledError:
                if not run.cancelled:
                    raise  # the worker ends: the order is sent again, to whoever is here then
                result = given_up()
            run.hold_on()
            outcome = await self._outcomes.add(key, result)
        finally:
            del self._runs[key]
            self._count()
        ending = "cancelled" if run.cancelled else "success" if result.success else "failed"
        self._metrics.orders.labels(kind=key.kind, outcome=ending).inc()
        log.info("order ended", kind=key.kind, about=key.about, op=key.op_id, how=ending)
        await tell(outcome)

    def _count(self) -> None:
        self._metrics.orders_under_way.set(len(self._runs))
        self._changed()


async def _told(tell: Tell, outcome: Outcome) -> None:
    # Called in here: a coroutine made outside would be left over if the task is cancelled before it begins.
    await tell(outcome)
