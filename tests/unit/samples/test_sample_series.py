"""Counts, times in buckets and gauges over time: merged into longer intervals, with percentiles and rates."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.controller.samples.series import Tally, begin_of, bucket_of, covered_until, percentile, points_of
from corral.store.tables.samples import Sample, SampleBody

NOON = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)


def sample(minute: int, source: str = "a", until_s: float = 60, requests: int = 0) -> Sample:
    at = NOON + timedelta(minutes=minute)
    return Sample("fleet", "", 60, at=at, source=source, body=SampleBody(until_s=until_s, requests=requests))


def points(*samples: Sample, minutes: float, step_s: int = 60, gaps: bool = True) -> list[tuple[str, float, int]]:
    until = NOON + timedelta(minutes=minutes)
    since = NOON - timedelta(seconds=step_s)
    found = points_of(samples, since=since, until=until, step_s=step_s, gaps=gaps)
    return [(point.at[11:16], point.seconds, point.requests) for point in found]


def test_samples_of_several_controllers_are_added_up() -> None:
    rows = sample(0, requests=3), sample(0, "b", requests=4), sample(1, requests=1)
    assert points(*rows, minutes=2) == [("12:00", 60, 7), ("12:01", 60, 1)]


def test_short_intervals_become_longer_ones() -> None:
    rows = [sample(minute, requests=minute) for minute in range(10)]
    assert points(*rows, minutes=10, step_s=300) == [
        ("12:00", 300, 0 + 1 + 2 + 3 + 4),
        ("12:05", 300, 5 + 6 + 7 + 8 + 9),
    ]


def test_the_last_interval_is_as_long_as_it_was_counted() -> None:
    assert points(sample(0, requests=5), sample(1, requests=2), minutes=1.5) == [("12:00", 60, 5), ("12:01", 30, 2)]
    assert points(sample(0, requests=5), sample(1, requests=2), minutes=1.1) == [("12:00", 60, 5)], (
        "6 s say nothing yet"
    )


def test_where_nobody_counted_is_a_gap_and_a_model_without_requests_has_none() -> None:
    rows = sample(0, requests=1), sample(2, requests=1)
    assert points(*rows, minutes=3) == [("12:00", 60, 1), ("12:02", 60, 1)]
    assert points(*rows, minutes=3, gaps=False) == [("12:00", 60, 1), ("12:01", 60, 0), ("12:02", 60, 1)]


def test_gauges_are_averaged_over_all_readings() -> None:
    first, second = Tally(), Tally()
    for value in (1.0, 3.0):
        first.measure("waiting", value)
    second.measure("waiting", 8.0)
    rows = [
        Sample("fleet", "", 60, at=NOON + timedelta(minutes=minute), source="a", body=tally.body(60))
        for minute, tally in enumerate((first, second))
    ]
    since, until = NOON - timedelta(minutes=5), NOON + timedelta(minutes=5)
    (point,) = points_of(rows, since=since, until=until, step_s=300, gaps=True)
    assert (point.waiting, point.waiting_most, point.in_flight) == (4.0, 8.0, None)


@given(st.lists(st.floats(1, 200_000), min_size=1, max_size=300))
def test_a_percentile_is_off_by_less_than_a_tenth(times: list[float]) -> None:
    tally = Tally()
    for ms in times:
        tally.first_token[bucket_of(ms)] += 1
    ranked = sorted(times)
    for share in (0.5, 0.95):
        found = percentile(tally.first_token, share)
        rank = next(index for index in range(len(ranked)) if index + 1 >= share * len(ranked))
        assert found == pytest.approx(ranked[rank], rel=0.08)


def test_percentiles_of_merged_tallies_are_those_of_all_times() -> None:
    times = [random.Random(7).expovariate(1 / 400) for _ in range(500)]
    parts, whole = [Tally(), Tally()], Tally()
    for index, ms in enumerate(times):
        parts[index % 2].first_token[bucket_of(ms)] += 1
        whole.first_token[bucket_of(ms)] += 1
    merged = Tally()
    for part in parts:
        merged.add(part.body(60))
    assert merged.body(60).first_token == whole.body(60).first_token
    assert percentile({}, 0.5) is None


def test_intervals_begin_at_whole_multiples() -> None:
    moment = NOON + timedelta(minutes=7, seconds=3)
    assert [begin_of(moment, step) for step in (60, 300, 3600)] == [
        NOON + timedelta(minutes=7),
        NOON + timedelta(minutes=5),
        NOON,
    ]


def test_nobody_counts_further_than_now() -> None:
    assert covered_until([None], NOON) == NOON
    assert covered_until([sample(-1, until_s=20)], NOON) == NOON - timedelta(seconds=40)
    assert covered_until([sample(5)], NOON) == NOON
