"""Whether a new build is worse is decided by ranks and by bounds of shares, never by one request."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.controller.rollouts.comparison import Judgement, Sample, compare_builds, lower_bound, rank_certainty
from corral.store.records import RolloutSettings

SOAK = RolloutSettings(soak_s=300)


def requests(
    count: int, *, seed: int, slow: float = 1.0, failing: float = 0.0, model: str = "smol", streamed: bool = True
) -> list[Sample]:
    """Times spread as real ones are: most near the median, some several times as long."""
    dice = random.Random(seed)
    found = []
    for number in range(count):
        first, rest = (0.2 * slow * dice.lognormvariate(0, 0.5) for _ in range(2))
        failed = dice.random() < failing
        total = first + 5 * rest
        found.append(Sample(1e9 + number, model, streamed, failed, first if streamed else 0.0, total, 64))
    return found


def verdict(new: Sequence[Sample], old: Sequence[Sample], settings: RolloutSettings = SOAK) -> str:
    return compare_builds(new, old, settings, window_s=10).verdict


@pytest.mark.parametrize("seed", range(20))
def test_an_equal_build_passes_at_every_look(seed: int) -> None:
    new, old = requests(300, seed=seed), requests(300, seed=1000 + seed)
    assert [verdict(new[:count], old) for count in range(20, 301, 10)] == [""] * 29


@pytest.mark.parametrize("seed", range(5))
def test_an_equal_build_passes_also_where_some_requests_always_fail(seed: int) -> None:
    new, old = requests(400, seed=seed, failing=0.05), requests(400, seed=900 + seed, failing=0.05)
    assert [verdict(new[:count], old) for count in range(20, 401, 20)] == [""] * 20


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("streamed", [True, False])
def test_a_build_that_is_three_times_slower_is_found_with_the_smallest_number_of_requests(
    seed: int, streamed: bool
) -> None:
    new = requests(20, seed=seed, slow=3, streamed=streamed)
    found = verdict(new, requests(20, seed=50 + seed, streamed=streamed))
    assert found.startswith("time to first token of smol" if streamed else "time to answer of smol"), found


@pytest.mark.parametrize("seed", range(5))
def test_a_build_that_fails_one_request_in_ten_is_found(seed: int) -> None:
    found = verdict(requests(150, seed=seed, failing=0.1), requests(150, seed=70 + seed))
    assert found.startswith("failed requests of smol: "), found
    assert found.endswith("in 150 requests, 0.0 % in 150 of the old one (at most 2.0 % more)")


def test_one_slow_request_and_one_failed_one_decide_nothing() -> None:
    old = requests(20, seed=1)
    slow = Sample(1e9, "smol", True, False, 60.0, 90.0, 64)
    failed = Sample(1e9, "smol", True, True, 0.0, 0.1, 0)
    assert verdict([slow, failed, *requests(20, seed=2)], old) == ""


def test_a_little_slower_is_within_the_limit_however_sure_it_is() -> None:
    new, old = requests(2000, seed=3, slow=1.2), requests(2000, seed=4)
    found = compare_builds(new, old, SOAK, window_s=10)
    assert found.verdict == ""
    first = next(figure for figure in found.figures if figure.name == "first_token")
    assert first.certainty > 5
    assert compare_builds(new, old, RolloutSettings(soak_s=300, max_slowdown=1.1), window_s=10).verdict


@pytest.mark.parametrize(
    ("old_s", "new_s", "is_worse"), [(0.014, 0.023, False), (0.014, 0.033, False), (0.014, 0.035, True)]
)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_few_milliseconds_are_the_load_of_a_machine_however_sure_and_however_many_times(
    streamed: bool, old_s: float, new_s: float, is_worse: bool
) -> None:
    old, new = ([Sample(1e9, "smol", streamed, False, each * streamed, each, 0)] * 200 for each in (old_s, new_s))
    assert bool(verdict(new, old)) is is_worse


@pytest.mark.parametrize(("speed", "is_worse"), [(2000, False), (1001, False), (900, True)])
def test_half_a_millisecond_per_token_is_the_load_of_a_machine(speed: float, is_worse: bool) -> None:
    old, new = ([Sample(1e9, "smol", True, False, 0.1, 0.1 + 64 / each, 64)] * 200 for each in (2001, speed))
    found = verdict(new, old)
    assert found.startswith("tokens/s of smol") is is_worse, found


def test_too_few_requests_of_either_build_are_not_judged() -> None:
    few, many = requests(19, seed=5, slow=10, failing=1.0), requests(100, seed=6)
    assert compare_builds(few, many, SOAK, window_s=10).figures == ()
    assert compare_builds(many, few, SOAK, window_s=10).figures == ()
    assert compare_builds([], [], SOAK, window_s=10) == Judgement()


def test_models_are_compared_with_themselves_only() -> None:
    small, large = requests(50, seed=7), requests(50, seed=8, slow=20, model="large")
    assert verdict(large, small) == "", "the canary serves another model than the others"
    assert verdict([*small, *large], [*requests(50, seed=9), *requests(50, seed=10, slow=20, model="large")]) == ""
    worse = [*small, *requests(50, seed=11, slow=60, model="large")]
    assert "of large" in verdict(worse, [*small, *large])


def test_curves_have_one_point_per_window_and_know_their_failures() -> None:
    samples = [Sample(1000 + second, "smol", True, second == 3, 0.1, 1.1, 11) for second in range(25)]
    found = compare_builds(samples, [], SOAK, window_s=10).new_windows
    assert [(each.at, each.requests, each.errors) for each in found] == [(1000, 10, 1), (1010, 10, 0), (1020, 5, 0)]
    assert {(each.first_token_ms, each.tokens_per_s) for each in found} == {(100.0, 11.0)}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_ranks_are_symmetric_and_equal_values_say_nothing(new: list[int], old: list[int]) -> None:
    there, back = rank_certainty(new, old), rank_certainty(old, new)
    assert there == pytest.approx(-back)
    assert rank_certainty(new, new) == pytest.approx(0)


def test_the_rank_statistic_of_a_worked_example() -> None:
    """U = 25 of 25 possible pairs, mean 12.5, variance 5 * 5 * 11 / 12."""
    assert rank_certainty([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]) == pytest.approx(12.5 / (275 / 12) ** 0.5)


@given(st.integers(1, 1000), st.floats(0, 1))
def test_a_bound_is_below_the_share_and_rises_with_the_requests(count: int, share: float) -> None:
    assert 0 <= lower_bound(share, count) <= share + 1e-9
    assert lower_bound(share, count) <= lower_bound(share, count * 2) + 1e-9
