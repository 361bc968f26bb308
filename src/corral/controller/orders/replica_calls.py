"""Sends orders about replicas to Corral workers, and translates the replies into observations
(docs/reference/wire/replicas.md). `controller/localai` implements the same `ReplicaOrders` for LocalAI workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from corral.bus.api import Bus
from corral.contract.codec import encode
from corral.contract.messages.replicas import START_REPLICA, STOP_REPLICA, ReplicaReply, StartReplica, StopReplica
from corral.controller.orders.observations import OrderAccepted, OrderEnded, ReplicaObservation, observe_error
from corral.controller.orders.order import OrderId
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.retry import retry_unreachable

log = get_log(__name__)

MAX_FILES = 500  # listed in the order itself: some 100 KB, and a message of the bus holds 512


class ReplicaOrders(Protocol):
    async def start(self, node_id: str, order: StartReplica) -> ReplicaObservation:
        """Send it. An error of the worker or of the bus becomes an observation."""

    async def stop(self, node_id: str, order: StopReplica) -> None:
        """Send it. The node's process list shows whether it worked; until then the reconciler sends it again."""


KeepList = Callable[[bytes], Awaitable[str]]  # stores a file list as a blob for workers to fetch; returns its digest


class ReplicaCalls:
    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        *,
        accept_s: float = 10.0,
        second_try_s: float = 0.25,
        keep_list: KeepList | None = None,
    ) -> None:
        """`keep_list`: for orders with more files than a message holds."""
        self._bus = bus
        self._clock = clock
        self._accept_s = accept_s
        self._second_try_s = second_try_s
        self._keep_list = keep_list

    async def start(self, node_id: str, order: StartReplica) -> ReplicaObservation:
        """Send it. An error of the worker or of the bus becomes an observation."""
        order_id = OrderId(node_id, order.op_id, order.attempt)
        try:
            order = await self._with_file_list(order)
            reply = await self._retried(
                lambda: self._bus.call(START_REPLICA, order, timeout_s=self._accept_s, node=node_id)
            )
        except CorralError as error:
            return observe_error(order_id, error)
        return OrderAccepted(order_id) if reply.accepted else OrderEnded(order_id, reply.success, reply.error)

    async def stop(self, node_id: str, order: StopReplica) -> None:
        """Send it. The node's process list shows whether it worked; until then the reconciler sends it again."""
        try:
            await self._retried(lambda: self._bus.call(STOP_REPLICA, order, timeout_s=self._accept_s, node=node_id))
        except CorralError as error:
            log.warning("stop not accepted", node_id=node_id, process=order.process_id, error=error.message)

    async def _with_file_list(self, order: StartReplica) -> StartReplica:
        """A hub repository may have thousands of files; the order then names a blob that lists them."""
        if self._keep_list is None or len(order.files) <= MAX_FILES:
            return order
        return msgspec.structs.replace(order, files=(), file_list=await self._keep_list(encode(order.files)))

    async def _retried(self, call: Callable[[], Awaitable[ReplicaReply]]) -> ReplicaReply:
        return await retry_unreachable(call, clock=self._clock, after_s=self._second_try_s)
