"""Options of a trial: a value that was given is never taken for one that was not."""

from __future__ import annotations

import pytest

from corral.cli.common.declare import BadParameter
from corral.cli.common.options import soak_fields


def test_only_what_was_given_is_sent() -> None:
    assert soak_fields(soak="5m", max_errors="", max_slowdown=None, min_requests=None) == {"soak": "5m"}
    assert soak_fields(soak="5m", max_errors="1%", max_slowdown=1.2, min_requests=3) == {
        "soak": "5m",
        "max_errors": "1%",
        "max_slowdown": 1.2,
        "min_requests": 3,
    }


@pytest.mark.parametrize(("slowdown", "requests"), [(0.0, None), (-1.0, None), (None, 0), (None, -5)])
def test_nothing_below_zero_is_a_limit(slowdown: float | None, requests: int | None) -> None:
    with pytest.raises(BadParameter, match="must be more than 0"):
        soak_fields(soak="5m", max_errors="", max_slowdown=slowdown, min_requests=requests)
