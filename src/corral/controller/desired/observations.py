"""What is heard of orders, and what it makes of an intent. Pure.

Answers and events are only collected where they arrive; the reconciler applies them, all that came together in one
transaction. An observation about an order that is no longer the last one says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import assert_never

from corral.contract.messages.backends import BackendResult, NodeBackend
from corral.controller.desired import outcomes
from corral.controller.desired.outcomes import USUAL, Retry
from corral.controller.desired.plan import Intent, Stage

OUR_FAULT_WAIT = timedelta(seconds=2)


@dataclass(frozen=True)
class OrderId:
    node_id: str
    backend: str
    operation: str
    attempt: int


@dataclass(frozen=True)
class Accepted:
    order: OrderId
    boot_id: str


@dataclass(frozen=True)
class Unsure:
    """Nobody said whether it was accepted."""

    order: OrderId


@dataclass(frozen=True)
class StillRunning:
    """A worker that answers when it is done has not yet."""

    order: OrderId
    timeout_s: float


@dataclass(frozen=True)
class Ended:
    """It is over; a success counts only once the inventory was read after it."""

    order: OrderId
    result: BackendResult


@dataclass(frozen=True)
class NotReached:
    """Nobody listens on the node."""

    order: OrderId
    reason: str


@dataclass(frozen=True)
class NotSent:
    """Something of ours was in the way."""

    order: OrderId
    reason: str


@dataclass(frozen=True)
class NotRunning:
    """Told to stop it, the worker says that there is no such order."""

    order: OrderId


Observation = Accepted | Unsure | StillRunning | Ended | NotReached | NotSent | NotRunning


@dataclass(frozen=True)
class Looked:
    """A node's inventory, asked for."""

    node_id: str
    backends: tuple[NodeBackend, ...]
    seq: int = 0


def apply(intent: Intent, heard: Observation, now: datetime, retry: Retry = USUAL) -> Intent:
    order = heard.order
    if intent.stage is not Stage.SENT or (intent.operation, intent.attempt) != (order.operation, order.attempt):
        return intent
    match heard:
        case Accepted(boot_id=boot_id):
            return outcomes.accepted(intent, boot_id, now)
        case Unsure():
            return outcomes.unsure(intent, now)
        case StillRunning(timeout_s=timeout_s):
            return outcomes.still_running(intent, now, timedelta(seconds=timeout_s))
        case Ended(result=result):
            return outcomes.ended(intent, result, now, retry)
        case NotReached(reason=reason):
            return outcomes.failed(intent, reason, now, retry=retry)
        case NotSent(reason=reason):
            return outcomes.not_sent(intent, reason, now, OUR_FAULT_WAIT)
        case NotRunning():
            return outcomes.over(intent, now)
        case _:
            assert_never(heard)
