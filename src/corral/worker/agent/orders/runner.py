"""Carries out accepted orders: each once, listed while it runs, its outcome stored and then reported.

Orders outlive the connection they came over, and end with the worker: the controller sees by the worker's new boot id
that an order is lost, and sends it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.worker.agent.orders.outcomes import OrderKey, Outcome, Outcomes, Result
from corral.worker.metrics import WorkerMetrics

log = get_log(__name__)
T = TypeVar("T")

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
