"""The rules that every call with an order follows, whether the order is about a backend or a replica.

`backend_calls` and `replica_calls` build the requests and read the replies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from corral.contract.messages.backends import Phase
from corral.controller.orders.observations import (
    OrderEnded,
    OrderNotSent,
    OrderUnconfirmed,
    ReplicaObservation,
    WorkerUnreachable,
)
from corral.controller.orders.order import OrderId
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, Invalid, OutcomeUnknown, Unreachable
from corral.kit.log import get_log

log = get_log(__name__)
T = TypeVar("T")


async def retry_unreachable(call: Callable[[], Awaitable[T]], *, clock: Clock, after_s: float) -> T:
    """Call again once if no worker listened: a worker that just reconnects to the bus has no subscription for a
    moment. Raises Unreachable if no worker listens the second time either."""
    try:
        return await call()
    except Unreachable:
        await clock.sleep(after_s)
        return await call()


def observe_error(order: OrderId, error: CorralError) -> ReplicaObservation:
    """Translate the error of the call that carried the order (docs/reference/wire/subjects.md#call-errors)."""
    match error:
        case Unreachable():
            return WorkerUnreachable(order)
        case OutcomeUnknown():
            return OrderUnconfirmed(order)
        case Failed() | Invalid():  # the worker could not read the order, or the controller not the reply
            return refused(order, error.message, permanent=isinstance(error, Invalid))
        case _:
            log.warning("order not sent", node_id=order.node_id, operation=order.operation, error=error.message)
            return OrderNotSent(order, error.message)


def refused(order: OrderId, reason: str, *, permanent: bool = False) -> OrderEnded:
    """The worker did not begin with the order, so it has switched nothing."""
    return OrderEnded(order, success=False, error=reason, permanent=permanent, phase=Phase.RESOLVING)
