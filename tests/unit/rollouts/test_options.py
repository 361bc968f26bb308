"""What a request says about its rollout."""

from __future__ import annotations

from typing import Any

import pytest

from corral.controller.rollouts.options import allowed_at_once, describe_soak, parse_max_parallel, parse_rollout
from corral.kit.errors import Invalid
from corral.store.records import RolloutSettings


@pytest.mark.parametrize(("text", "stored"), [("25%", "25%"), (" 3 ", "3"), ("100%", "100%"), ("007", "7")])
def test_a_share_or_a_number(text: str, stored: str) -> None:
    assert parse_max_parallel(text) == stored


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "-1", "many", "2.5", "%", "٣"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="is not a number of nodes"):
        parse_max_parallel(text)


@pytest.mark.parametrize(("text", "nodes", "count"), [("25%", 8, 2), ("25%", 3, 1), ("100%", 3, 3), ("5", 3, 5)])
def test_at_least_one_moves(text: str, nodes: int, count: int) -> None:
    assert allowed_at_once(text, nodes) == count


@pytest.mark.parametrize(
    ("soak", "words", "soak_s", "requests"),
    [("5m", "5m", 300, 0), ("90s", "1m30s", 90, 0), ("1h30m", "1h30m", 5400, 0), ("200", "200 requests", 0, 200)],
)
def test_a_soak_is_a_time_or_a_number_of_requests(soak: str, words: str, soak_s: float, requests: int) -> None:
    found = parse_rollout(soak=soak)
    assert (found.soak_s, found.soak_requests, describe_soak(found)) == (soak_s, requests, words)


def test_limits_have_defaults_and_can_be_set() -> None:
    assert parse_rollout() == RolloutSettings()
    assert not parse_rollout().has_soak
    found = parse_rollout(soak="1m", max_errors="0.5%", max_slowdown=3, min_requests=50)
    assert found == RolloutSettings(soak_s=60, max_errors=0.005, max_slowdown=3, min_requests=50)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"soak": "soon"}, "is no soak"),
        ({"soak": "0"}, "is no soak"),
        ({"soak": "8d"}, "is no soak"),
        ({"soak": "-5m"}, "is no soak"),
        ({"soak": "5m", "max_errors": "many"}, "is no share"),
        ({"soak": "5m", "max_errors": "101%"}, "is no share"),
        ({"soak": "5m", "max_slowdown": 0.5}, "max_slowdown"),
        ({"soak": "5m", "min_requests": 1}, "fewer say nothing"),
        ({"soak": "2001"}, "up to 2000"),
        ({"max_errors": "1%"}, "limits are for a soak"),
    ],
)
def test_what_makes_no_sense_is_refused_with_an_example(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        parse_rollout(**wrong)
