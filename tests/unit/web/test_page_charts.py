"""Series as lines: the scale, gaps, single points, titles and the sentence for screen readers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from corral.contract.samples import SamplePoint, SampleSeries
from corral.controller.web.charts import (
    ERRORS,
    FIRST_TOKEN,
    HEIGHT,
    MAX_SLICES,
    OF_FLEET,
    OF_NODE,
    REQUESTS,
    TOKENS,
    chart_of,
    charts_of,
    measured,
    milliseconds,
    nice_ceiling,
    number,
)

NOON = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)


def series(*points: SamplePoint, minutes: int = 60) -> SampleSeries:
    since = NOON - timedelta(minutes=minutes)
    return SampleSeries("fleet", "", since.isoformat(), NOON.isoformat(), 60, points)


def point(minutes_ago: int, **counts: float) -> SamplePoint:
    return SamplePoint(at=(NOON - timedelta(minutes=minutes_ago)).isoformat(), seconds=60, **counts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "floor", "top"),
    [(0, 1, 1), (0.3, 0.1, 0.5), (1, 1, 1), (1.01, 1, 2), (37, 1, 50), (99, 5, 100), (0, 100, 100), (1234, 1, 2000)],
)
def test_the_scale_ends_at_a_round_number(value: float, floor: float, top: float) -> None:
    assert nice_ceiling(value, floor) == pytest.approx(top)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.254, "0.25"), (3.41, "3.41"), (9.96, "10"), (12.34, "12.3"), (120.4, "120"), (999.4, "999"),
     (1000, "1k"), (1250, "1.25k"), (3_000_000, "3M"), (2.5e9, "2.5G")],
)  # fmt: skip
def test_numbers_have_three_digits(value: float, words: str) -> None:
    assert number(value) == words


def test_durations_have_the_unit_that_is_read_best() -> None:
    assert [milliseconds(value) for value in (3.2, 250, 999, 1000, 12_300)] == [
        "3.2 ms",
        "250 ms",
        "999 ms",
        "1 s",
        "12.3 s",
    ]


def test_a_line_goes_from_left_to_right_and_high_values_are_at_the_top() -> None:
    chart = chart_of(
        REQUESTS, series(point(60, requests=0), point(59, requests=60), point(58, requests=120)), "1 h ago"
    )
    assert chart.lines[0].path == f"M5.0 {HEIGHT:.1f}L10.0 38.0L15.0 4.0"
    assert chart.lines[0].area.startswith("M5.0 72L5.0 72.0L10.0")
    assert chart.lines[0].area.endswith("L15.0 72Z")
    assert (chart.value, chart.top) == ("2", "2")
    assert chart.described == "Requests per second: now 2; between 0 and 2 since 1 h ago"
    assert [each.title for each in chart.slices] == [
        "11:00 UTC: requests 0",
        "11:01 UTC: requests 1",
        "11:02 UTC: requests 2",
    ]


def test_a_gap_is_left_open_and_a_single_point_is_as_long_as_its_interval() -> None:
    chart = chart_of(REQUESTS, series(point(60, requests=60), point(30, requests=60)), "1 h ago")
    assert chart.lines[0].path == "M0.0 4.0L5.0 4.0M150.0 4.0L155.0 4.0"


def test_a_second_line_and_its_latest_value() -> None:
    chart = chart_of(TOKENS, series(point(2, completion_tokens=1200, prompt_tokens=6000)), "1 h ago")
    assert (chart.value, chart.note) == ("20", "answers, 100 prompts")
    assert [line.name for line in chart.lines] == ["answers", "prompts"]


def test_nothing_measured_is_said_and_no_requests_are_no_errors() -> None:
    assert chart_of(FIRST_TOKEN, series(point(1)), "1 h ago").described == "Time to first token: nothing measured"
    assert chart_of(ERRORS, series(point(1)), "1 h ago").value == "0 %"
    assert chart_of(ERRORS, series(point(1, requests=4, errors=1)), "1 h ago").value == "25 %"
    assert chart_of(REQUESTS, series(), "1 h ago").value == "–"


def test_of_many_points_each_slice_covers_several() -> None:
    many = series(*(point(minutes, requests=minutes) for minutes in range(239, -1, -1)), minutes=240)
    chart = chart_of(REQUESTS, many, "4 h ago")
    assert len(chart.slices) == MAX_SLICES
    assert chart.slices[-1].title.startswith("12:00")


def test_a_node_without_sensors_has_no_charts_of_them() -> None:
    told = series(point(1, ram_used_bytes=2.0**31, in_flight=0.0))
    assert [chart.key for chart in measured(charts_of(OF_NODE, told, "1h"))] == ["ram", "in-flight"]
    assert len(charts_of(OF_FLEET, told, "1h")) == 6
