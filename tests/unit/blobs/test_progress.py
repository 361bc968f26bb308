"""Rates, and sums over several files."""

from __future__ import annotations

import pytest

from corral.blobs.progress import PartsProgress, Progress, RateMeter
from corral.contract.messages.backends import Phase


def test_the_rate_is_what_the_line_does_now() -> None:
    meter = RateMeter(window_s=5.0)
    assert meter.rate(0, 100.0) == 0.0
    assert meter.rate(1000, 101.0) == 1000.0
    for second in range(2, 12):  # it has become slow
        rate = meter.rate(1000 + second, 100.0 + second)
    assert rate == pytest.approx(1.0)


def test_a_part_that_starts_over_is_no_negative_rate() -> None:
    meter = RateMeter()
    meter.rate(1000, 0.0)
    assert meter.rate(0, 1.0) == 0.0


def test_several_parts_are_told_as_one() -> None:
    told: list[Progress] = []
    time = iter(range(100))
    tally = PartsProgress(Phase.DOWNLOADING, told.append, lambda: float(next(time)), total_bytes=300)
    tally.resume("a", 100)  # from an earlier try: done, but not fast
    tally.at("b", 50)
    tally.at("a", 150)
    tally.at("b", 150)
    assert [(each.file, each.current_bytes, each.total_bytes) for each in told] == [
        ("a", 100, 300),
        ("b", 150, 300),
        ("a", 200, 300),
        ("b", 300, 300),
    ]
    assert [each.rate for each in told] == [0.0, 50.0, 50.0, pytest.approx(200 / 3)]


def test_the_total_is_never_less_than_what_is_there() -> None:
    told: list[Progress] = []
    tally = PartsProgress(Phase.EXTRACTING, told.append, lambda: 0.0, total_bytes=10)
    tally.at("a", 12)
    assert told[-1].total_bytes == 12


def test_an_unknown_total_stays_unknown_until_it_is_told() -> None:
    told: list[Progress] = []
    tally = PartsProgress(Phase.DOWNLOADING, told.append, lambda: 0.0)
    tally.at("a", 5)
    tally.set_total(10)
    tally.at("a", 6)
    assert [each.total_bytes for each in told] == [0, 10]
