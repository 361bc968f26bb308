"""A call that no process subscribes to is made once more."""

from __future__ import annotations

import pytest

from corral.bus.api import retry_unreachable
from corral.kit.clock import SystemClock
from corral.kit.errors import OutcomeUnknown, Unreachable


@pytest.mark.parametrize(("failures", "calls"), [(0, 1), (1, 2), (2, 2)])
async def test_a_call_is_repeated_once_when_no_process_subscribes(failures: int, calls: int) -> None:
    made = 0

    async def call() -> str:
        nonlocal made
        made += 1
        if made <= failures:
            raise Unreachable("no process subscribes")
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
