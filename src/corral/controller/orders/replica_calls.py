"""Orders about replicas on their way to one worker, and what the answers mean (docs/reference/wire/replicas.md). Corral
workers only; for others `controller/peers` fits the same `Orders`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from corral.bus.api import Bus
from corral.contract.codec import encode
from corral.contract.messages.replicas import START_REPLICA, STOP_REPLICA, ReplicaReply, StartReplica, StopReplica
from corral.controller.orders.observations import (
    OrderAccepted,
    OrderEnded,
    OrderId,
    OrderNotSent,
    OrderUnconfirmed,
    ReplicaObservation,
    WorkerUnreachable,
)
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, Invalid, OutcomeUnknown, Unreachable
from corral.kit.log import get_log

log = get_log(__name__)

_MOST_FILES = 500  # named in an order itself: some 100 KB of the 512 the bus takes


class Orders(Protocol):
    async def start(self, node_id: str, order: StartReplica) -> ReplicaObservation:
        """Never raises for what the other side or the bus does."""

    async def stop(self, node_id: str, order: StopReplica) -> None:
        """Whether it worked, the node's list tells; it is told again until it has."""


KeepList = Callable[[bytes], Awaitable[str]]  # as a blob workers can fetch; its digest


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
        """Never raises for what the other side or the bus does."""
        named = OrderId(node_id, order.op_id, order.attempt)
        try:
            order = await self._shortened(order)
            reply = await self._twice(
                lambda: self._bus.call(START_REPLICA, order, timeout_s=self._accept_s, node=node_id)
            )
        except Unreachable:
            return WorkerUnreachable(named)
        except OutcomeUnknown:
            return OrderUnconfirmed(named)
        except (Failed, Invalid) as error:  # it did answer, and it is not what we know
            return OrderEnded(named, success=False, error=error.message)
        except CorralError as error:
            log.warning("order not sent", node_id=node_id, model=order.model, error=error.message)
            return OrderNotSent(named)
        return OrderAccepted(named) if reply.accepted else OrderEnded(named, reply.success, reply.error)

    async def stop(self, node_id: str, order: StopReplica) -> None:
        """Whether it worked, the node's list tells; it is told again until it has."""
        try:
            await self._twice(lambda: self._bus.call(STOP_REPLICA, order, timeout_s=self._accept_s, node=node_id))
        except CorralError as error:
            log.warning("stop not accepted", node_id=node_id, process=order.process_id, error=error.message)

    async def _shortened(self, order: StartReplica) -> StartReplica:
        """A repository of the hub may have thousands of files."""
        if self._keep_list is None or len(order.files) <= _MOST_FILES:
            return order
        return msgspec.structs.replace(order, files=(), file_list=await self._keep_list(encode(order.files)))

    async def _twice(self, ask: Callable[[], Awaitable[ReplicaReply]]) -> ReplicaReply:
        """ "Nobody listens" counts only when it is so twice."""
        try:
            return await ask()
        except Unreachable:
            await self._clock.sleep(self._second_try_s)
            return await ask()
