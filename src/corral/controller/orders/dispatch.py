"""Orders on their way: as many at once as is good for everybody, each heard of in the end.

Orders to Corral workers are answered at once, so few lines serve many nodes; LocalAI workers hold theirs for as long as
they work. A success is confirmed here by asking the node for its inventory, so that nobody believes a mere answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from corral.bus.api import Tokens
from corral.contract.messages.backends import BackendResult
from corral.controller.orders.backend_calls import Order, WorkerCalls
from corral.controller.orders.observations import (
    InventoryRead,
    Observation,
    OrderAccepted,
    OrderEnded,
    OrderId,
    OrderNotRunning,
    OrderNotSent,
    OrderStillRunning,
    WorkerUnreachable,
)
from corral.kit.errors import CorralError, Unreachable
from corral.kit.log import get_log

log = get_log(__name__)


@dataclass(frozen=True)
class Lines:
    quick: int = 64  # unanswered calls to workers that answer at once
    slow: int = 256  # to workers that answer when they are done


class Dispatch:
    """`async with` it: what is still on its way when the block ends is left to whoever reconciles next."""

    def __init__(
        self,
        calls: WorkerCalls,
        *,
        heard: Callable[[Observation, InventoryRead | None], None],
        not_reached: Callable[[str], Awaitable[None]],
        lines: Lines | None = None,
    ) -> None:
        """`not_reached` is told of a node on which nobody listens."""
        self._calls = calls
        self._heard = heard
        self._not_reached = not_reached
        self._lines = lines or Lines()
        self._quick = asyncio.Semaphore(self._lines.quick)
        self._asking = asyncio.Semaphore(self._lines.quick)
        self._slow_open = 0
        self._stopping: set[OrderId] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Dispatch:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks, self._tasks = self._tasks, None
        for task in self._running:
            task.cancel()
        if tasks is not None:
            await tasks.__aexit__(kind, error, trace)

    @property
    def free_lines(self) -> int:
        """How many more calls may be open to workers that answer when they are done."""
        return max(0, self._lines.slow - self._slow_open)

    @property
    def on_their_way(self) -> int:
        return len(self._running)

    def send(self, order: Order) -> None:
        if not order.accepts:
            self._slow_open += 1
        self._start(self._carry(order), f"order {order.send.kind} {order.send.backend}")

    def stop(self, order: OrderId, *, keep: bool = False) -> None:
        """Asked for as often as anybody notices; the worker hears it once at a time."""
        if order not in self._stopping:
            self._stopping.add(order)
            self._start(self._stop(order, keep), f"stop {order.backend}")

    async def result(self, result: BackendResult, tokens: Tokens) -> None:
        """The event in which a worker tells how an accepted order ended."""
        # Whose subject it came on is certain; what it says of itself is not.
        order = OrderId(tokens["node"], result.op_id, result.attempt, result.backend)
        if result.success:
            self._start(self._confirm(OrderEnded.from_result(order, result)), f"confirm {order.backend}")
        else:
            self._heard(OrderEnded.from_result(order, result), None)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._tasks is None:
            work.close()
            return
        task = self._tasks.create_task(self._whatever_happens(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before its first step, it was never begun

    async def _whatever_happens(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except CorralError as error:
            log.warning("order failed on the way", what=name, error=error.message, code=error.code)
        except Exception:
            log.exception("order failed on the way", what=name)

    async def _carry(self, order: Order) -> None:
        heard: Observation = OrderNotSent(order.id, "something went wrong here; the log has the details")
        try:
            if order.accepts:
                async with self._quick:
                    heard = await self._calls.order(order)
            else:
                heard = await self._calls.order(order)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("order failed on the way", node_id=order.node_id, backend=order.send.backend)
        finally:
            if not order.accepts:
                self._slow_open -= 1
        tell = (
            log.debug if isinstance(heard, OrderAccepted) else log.info
        )  # what goes as it should is told once for all
        tell("order", node=order.node_id, kind=order.send.kind, backend=order.send.backend, answer=type(heard).__name__)
        if isinstance(heard, WorkerUnreachable):
            await self._not_reached(order.node_id)
        if isinstance(heard, OrderEnded) and heard.success:
            late = None if order.accepts else OrderStillRunning(order.id, self._calls.answer_within_s(order.send.kind))
            await self._confirm(heard, late, accepts=order.accepts)
        else:
            self._heard(heard, None)

    async def _confirm(
        self, ended: OrderEnded | OrderNotRunning, otherwise: Observation | None = None, *, accepts: bool = True
    ) -> None:
        """If the node cannot be asked now, its next heartbeat or the next round of questions tells; `otherwise` is
        then what is known."""
        node_id = ended.order.node_id
        try:
            async with self._asking:
                listed = await self._calls.list_backends(node_id, accepts=accepts)
        except CorralError as error:
            log.warning("inventory could not be read after an order", node_id=node_id, error=error.message)
            if isinstance(error, Unreachable):
                await self._not_reached(node_id)
            if otherwise is not None:
                self._heard(otherwise, None)
            return
        self._heard(ended, InventoryRead(node_id, listed.backends, listed.seq))

    async def _stop(self, order: OrderId, keep: bool) -> None:
        try:
            async with self._quick:
                heard = await self._calls.cancel(order, keep=keep)
        finally:
            self._stopping.discard(order)
        log.info("told to stop", node_id=order.node_id, backend=order.backend, operation=order.operation)
        if heard is not None:  # it may have done its work before: what is on file is no proof any more
            await self._confirm(heard)
