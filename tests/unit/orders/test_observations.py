"""Errors of the call that carried an order become observations."""

from __future__ import annotations

import pytest

from corral.controller.orders.observations import (
    OrderEnded,
    OrderNotSent,
    OrderUnconfirmed,
    ReplicaObservation,
    WorkerUnreachable,
    observe_error,
)
from corral.controller.orders.order import OrderId
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
