from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.kit.durations import format_duration, parse_duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10s", 10.0),
        ("15m", 900.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        ("0.3", 0.3),
        ("2", 2.0),
        ("1d", 86400.0),
        ("0", 0.0),
    ],
)
def test_spans_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ten", "10x", "5 m", "-3s", "-1", "nan", "inf", "1h-5m", "s"])
def test_what_is_no_span_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="10s, 15m or 1h30m"):
        parse_duration_s(text)


@given(st.integers(min_value=0, max_value=10**9))
def test_what_is_shown_can_be_read_back(ms: int) -> None:
    assert parse_duration_s(format_duration(ms / 1000)) == pytest.approx(ms / 1000, abs=0.0005)
