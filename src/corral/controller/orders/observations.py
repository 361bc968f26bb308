"""What the controller observes of an order that it sent to a worker: a record, also of a call that failed.

`backend_calls` and `replica_calls` make them from replies and result events, the reconcilers from result events. The
reconcilers apply them to their rows, all that arrived together in one transaction; an observation about an order that
is no longer the last one of its row changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.contract.messages.backends import BackendResult, NodeBackend, Phase
from corral.controller.orders.order import OrderId
from corral.kit.errors import CorralError, Failed, Invalid, OutcomeUnknown, Unreachable
from corral.kit.log import get_log

log = get_log(__name__)


@dataclass(frozen=True)
class OrderAccepted:
    order: OrderId
    boot_id: str = ""


@dataclass(frozen=True)
class OrderUnconfirmed:
    """No answer came: the worker may or may not have accepted it."""

    order: OrderId


@dataclass(frozen=True)
class OrderStillRunning:
    """A worker that answers only when it has finished did not answer in time."""

    order: OrderId
    timeout_s: float


@dataclass(frozen=True)
class OrderEnded:
    """The worker has finished. A success counts only once the node's inventory was read after it."""

    order: OrderId
    success: bool
    error: str = ""
    permanent: bool = False
    cancelled: bool = False
    phase: str = ""  # how far a backend order got

    @classmethod
    def from_result(cls, order: OrderId, result: BackendResult) -> OrderEnded:
        return cls(order, result.success, result.error, result.permanent, result.cancelled, result.phase)


@dataclass(frozen=True)
class WorkerUnreachable:
    """No worker listens on the node."""

    order: OrderId
    reason: str = "no worker listens on the node"


@dataclass(frozen=True)
class OrderNotSent:
    """The controller could not send it; the node had no part in that."""

    order: OrderId
    reason: str = ""


@dataclass(frozen=True)
class OrderNotRunning:
    """Asked to cancel it, the worker answered that it does not run such an order."""

    order: OrderId


Observation = (
    OrderAccepted
    | OrderUnconfirmed
    | OrderStillRunning
    | OrderEnded
    | WorkerUnreachable
    | OrderNotSent
    | OrderNotRunning
)
ReplicaObservation = OrderAccepted | OrderUnconfirmed | OrderEnded | WorkerUnreachable | OrderNotSent


@dataclass(frozen=True)
class InventoryRead:
    """A node's inventory, as the node answered when it was asked."""

    node_id: str
    backends: tuple[NodeBackend, ...]
    seq: int = 0


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
