"""How many bytes the kernel collects before the process is woken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.blobs.transfer.low_water import MAX_BYTES, MIN_BYTES, SLACK_BYTES, choose_mark

MB = 1_000_000


@pytest.mark.parametrize(
    ("left", "received", "elapsed_s", "mark"),
    [
        pytest.param(4 * MB, 0, 0.0, 1, id="nothing came yet"),
        pytest.param(4 * MB, 1 * MB, 0.01, MAX_BYTES, id="a fast link"),
        pytest.param(4 * MB, 400_000, 1.0, 100_000, id="a quarter of a second of a slow one"),
        pytest.param(4 * MB, 20_000, 1.0, 1, id="a very slow one: each byte counts"),
        pytest.param(100_000, 4 * MB, 1.0, 100_000 - SLACK_BYTES, id="never what does not come any more"),
        pytest.param(SLACK_BYTES + MIN_BYTES - 1, 4 * MB, 1.0, 1, id="the end"),
        pytest.param(0, 4 * MB, 1.0, 1, id="all is there"),
    ],
)
def test_the_mark(left: int, received: int, elapsed_s: float, mark: int) -> None:
    assert choose_mark(left, received, elapsed_s) == mark


@given(st.integers(-10, 1 << 33), st.integers(0, 1 << 33), st.floats(0, 1e6))
def test_it_is_always_reached(left: int, received: int, elapsed_s: float) -> None:
    """What is left, but for the record that the process may hold a part of, is enough."""
    mark = choose_mark(left, received, elapsed_s)
    assert mark == 1 or MIN_BYTES <= mark <= min(MAX_BYTES, left - SLACK_BYTES)
