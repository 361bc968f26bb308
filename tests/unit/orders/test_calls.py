"""The rules of every call with an order: one retry when no worker listens, and errors that become observations."""

from __future__ import annotations

import pytest

from corral.controller.orders.calls import observe_error, retry_unreachable
from corral.controller.orders.observations import (
    OrderEnded,
    OrderNotSent,
    OrderUnconfirmed,
    ReplicaObservation,
    WorkerUnreachable,
)
from corral.controller.orders.order import OrderId
from corral.kit.clock import SystemClock
from corral.kit.errors import CorralError, Denied, Failed, Invalid, OutcomeUnknown, Unavailable, Unreachable

ORDER = OrderId("node-1", "7", 2, "llama-cpp")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Unreachable("x"), WorkerUnreachable(ORDER)),
        (OutcomeUnknown("x"), OrderUnconfirmed(ORDER)),
        (Failed("x"), OrderEnded(ORDER, success=False, error="x", phase="resolving")),
        (Invalid("x"), OrderEnded(ORDER, success=False, error="x", permanent=True, phase="resolving")),
        (Unavailable("x"), OrderNotSent(ORDER, "x")),
        (Denied("x"), OrderNotSent(ORDER, "x")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_of_a_call_is_an_observation(error: CorralError, expected: ReplicaObservation) -> None:
    assert observe_error(ORDER, error) == expected


@pytest.mark.parametrize(("failures", "calls"), [(0, 1), (1, 2), (2, 2)])
async def test_a_call_is_repeated_once_when_no_worker_listens(failures: int, calls: int) -> None:
    made = 0

    async def call() -> str:
        nonlocal made
        made += 1
        if made <= failures:
            raise Unreachable("no worker listens")
        return "reply"

    if failures < 2:
        assert await retry_unreachable(call, clock=SystemClock(), after_s=0.0) == "reply"
    else:
        with pytest.raises(Unreachable):
            await retry_unreachable(call, clock=SystemClock(), after_s=0.0)
    assert made == calls


async def test_no_other_error_is_retried() -> None:
    made = 0

    async def call() -> None:
        nonlocal made
        made += 1
        raise OutcomeUnknown("no reply")

    with pytest.raises(OutcomeUnknown):
        await retry_unreachable(call, clock=SystemClock(), after_s=0.0)
    assert made == 1
