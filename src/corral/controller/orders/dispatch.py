"""Sends orders about backends concurrently, and hands an observation of each to the reconciler.

A Corral worker replies at once, so few open calls serve many nodes; a call to a LocalAI worker stays open while the
worker works. A success counts only with the inventory that the node lists after it; the dispatcher reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from corral.bus.api import Tokens
from corral.contract.messages.backends import BackendResult
from corral.controller.orders.backend_calls import BackendCalls
from corral.controller.orders.observations import (
    InventoryRead,
    Observation,
    OrderAccepted,
    OrderEnded,
    OrderNotRunning,
    OrderNotSent,
    OrderStillRunning,
    WorkerUnreachable,
)
from corral.controller.orders.order import BackendOrder, OrderId
from corral.kit.errors import CorralError, Unreachable
from corral.kit.log import get_log
from corral.kit.tasks import BackgroundTasks

log = get_log(__name__)


@dataclass(frozen=True)
class CallLimits:
    """How many calls may be open at the same time."""

    quick: int = 64  # to workers that reply at once
    slow: int = 256  # to workers that reply when they have finished


class Dispatch:
    """`async with` it: leaving the block abandons the open calls. The next leader sends those orders again."""

    def __init__(
        self,
        calls: BackendCalls,
        *,
        on_observation: Callable[[Observation, InventoryRead | None], None],
        on_unreachable: Callable[[str], Awaitable[None]],
        limits: CallLimits | None = None,
    ) -> None:
        """`on_unreachable` is called with the id of a node on which no worker listens."""
        self._calls = calls
        self._on_observation = on_observation
        self._on_unreachable = on_unreachable
        self._limits = limits or CallLimits()
        self._quick = asyncio.Semaphore(self._limits.quick)
        self._listing = asyncio.Semaphore(self._limits.quick)
        self._slow_open = 0
        self._stopping: set[OrderId] = set()
        self._tasks = BackgroundTasks()

    async def __aenter__(self) -> Dispatch:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    @property
    def free_slow_calls(self) -> int:
        """How many more calls may be opened to workers that reply when they have finished."""
        return max(0, self._limits.slow - self._slow_open)

    @property
    def open_calls(self) -> int:
        return len(self._tasks)

    def send(self, order: BackendOrder) -> None:
        if not order.accepts:
            self._slow_open += 1
        self._tasks.start(self._send(order), name=f"order {order.send.kind} {order.send.backend}")

    def stop(self, order: OrderId, *, keep: bool = False) -> None:
        """Has no effect while the worker is being asked already."""
        if order not in self._stopping:
            self._stopping.add(order)
            self._tasks.start(self._stop(order, keep), name=f"stop {order.backend}")

    async def on_result(self, result: BackendResult, tokens: Tokens) -> None:
        """Handles the event with which a worker reports how an accepted order ended."""
        # Only this node may publish on the subject; a node id inside the message would prove nothing.
        order = OrderId(tokens["node"], result.op_id, result.attempt, result.backend)
        ended = OrderEnded.from_result(order, result)
        if result.success:
            self._tasks.start(self._confirm(ended), name=f"confirm {order.backend}")
        else:
            self._on_observation(ended, None)

    async def _send(self, order: BackendOrder) -> None:
        observed = await self._call(order)
        # The reconciler logs one line for all orders of a pass: an accepted order is not worth another.
        write = log.debug if isinstance(observed, OrderAccepted) else log.info
        write(
            "order",
            node=order.node_id,
            kind=order.send.kind,
            backend=order.send.backend,
            answer=type(observed).__name__,
        )
        if isinstance(observed, WorkerUnreachable):
            await self._on_unreachable(order.node_id)
        if isinstance(observed, OrderEnded) and observed.success:
            late = None if order.accepts else OrderStillRunning(order.id, self._calls.answer_within_s(order.send.kind))
            await self._confirm(observed, late, accepts=order.accepts)
        else:
            self._on_observation(observed, None)

    async def _call(self, order: BackendOrder) -> Observation:
        try:
            if not order.accepts:
                return await self._calls.order(order)
            async with self._quick:
                return await self._calls.order(order)
        except Exception:
            log.exception("order not sent", node_id=order.node_id, backend=order.send.backend)
            return OrderNotSent(order.id, "the controller failed; its log has the details")
        finally:
            if not order.accepts:
                self._slow_open -= 1

    async def _confirm(
        self, ended: OrderEnded | OrderNotRunning, otherwise: Observation | None = None, *, accepts: bool = True
    ) -> None:
        """Hand the observation on, together with the node's inventory. If the node cannot list its backends now, hand
        `otherwise` on; a later heartbeat or listing shows the result."""
        node_id = ended.order.node_id
        try:
            async with self._listing:
                listed = await self._calls.list_backends(node_id, accepts=accepts)
        except CorralError as error:
            log.warning("inventory could not be read after an order", node_id=node_id, error=error.message)
            if isinstance(error, Unreachable):
                await self._on_unreachable(node_id)
            if otherwise is not None:
                self._on_observation(otherwise, None)
            return
        self._on_observation(ended, InventoryRead(node_id, listed.backends, listed.seq))

    async def _stop(self, order: OrderId, keep: bool) -> None:
        try:
            async with self._quick:
                observed = await self._calls.cancel(order, keep=keep)
        finally:
            self._stopping.discard(order)
        log.info("order cancelled", node_id=order.node_id, backend=order.backend, operation=order.operation)
        if observed is not None:  # the order may have ended before: the stored inventory is out of date
            await self._confirm(observed)
