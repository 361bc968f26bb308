"""Publishes the worker's events on the bus, over the connection there is at the moment.

Work outlives the connection its order came over, so the code that works keeps an `EventPublisher`, not a bus. An event
that cannot be published is not kept: the next heartbeat reports outcomes, and progress is followed by more progress.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

from corral.bus.api import Bus
from corral.contract.codec import Message
from corral.contract.messages.backends import DELETE_RESULT, INSTALL_RESULT, UPGRADE_RESULT
from corral.contract.messages.replicas import START_REPLICA_RESULT, STOP_REPLICA_RESULT
from corral.contract.subjects import Event
from corral.kit.errors import CorralError, Unavailable
from corral.kit.log import get_log
from corral.worker.agent.orders.outcomes import OrderKind, Outcome

log = get_log(__name__)
M = TypeVar("M", bound=Message)

_RESULT_EVENTS: dict[str, Event[Any]] = {
    OrderKind.INSTALL: INSTALL_RESULT,
    OrderKind.UPGRADE: UPGRADE_RESULT,
    OrderKind.DELETE: DELETE_RESULT,
    OrderKind.START_REPLICA: START_REPLICA_RESULT,
    OrderKind.STOP_REPLICA: STOP_REPLICA_RESULT,
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
