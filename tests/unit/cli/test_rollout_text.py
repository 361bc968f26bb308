"""What `corral rollouts show` prints of one rollout."""

from __future__ import annotations

from corral.cli.operations import rollouts
from corral.contract.rollouts import RolloutClassView, RolloutView

VIEW = RolloutView(
    "3f2a91c0-0000-4000-8000-000000000001",
    "mock",
    "soak",
    "2026-11-19T10:00:00Z",
    soak="5m",
    max_errors=0.02,
    max_slowdown=1.5,
    min_requests=20,
)


def test_the_limits_are_a_sentence() -> None:
    limits = dict(rollouts._details(VIEW))["limits"]
    assert limits == (
        "at most 2 % of the requests more that fail, and at most 1.5 times as slow; judged from 20 requests of each on"
    )


def test_a_class_is_counted_in_words_and_its_dead_processes_are_named_beside_the_rest() -> None:
    waiting = RolloutClassView("cpu", ("a", "b"), "", "waiting", waiting="b is away")
    assert rollouts._class_row(waiting) == ("cpu", "2", "-", "waiting", "0 requests", "0 requests", "b is away")
    soaking = RolloutClassView("cpu", ("a",), "a", "soaking", new_requests=1, old_requests=2, deaths=1)
    row = rollouts._class_row(soaking)
    assert row[4:] == ("1 request", "2 requests", "1 process of the new build ended")
    passed = RolloutClassView("cpu", ("a",), "a", "passed", passed="promoted by ann", deaths=2)
    assert rollouts._class_row(passed)[-1] == "promoted by ann; 2 processes of the new build ended"
