from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.kit.clock import SystemClock
from corral.kit.errors import OutcomeUnknown, Unreachable
from corral.kit.retry import Backoff, retry_unreachable


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


def test_backoff_doubles_to_its_cap_and_starts_over_after_a_success() -> None:
    backoff = Backoff(first_s=2, cap_s=30, roll=lambda: 0.5)
    assert [backoff.next_s() for _ in range(6)] == [2, 4, 8, 16, 30, 30]
    backoff.reset()
    assert backoff.next_s() == 2


def test_backoff_survives_a_month_of_failures() -> None:
    backoff = Backoff(first_s=2, cap_s=30, jitter=0, failures=100_000)
    assert backoff.next_s() == 30


@given(st.floats(min_value=0, max_value=1))
def test_jitter_stays_within_its_share(roll: float) -> None:
    assert 8 <= Backoff(first_s=10, cap_s=10, jitter=0.2, roll=lambda: roll).next_s() <= 12
