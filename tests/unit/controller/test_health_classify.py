"""Who is judged silent, who is back, and when the guard holds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from corral.contract.messages.nodes import NodeId, NodeStatus
from corral.controller.health.classify import Guard, Pulse, Verdict, classify, is_still_true
from corral.controller.registry.transitions import NodeEvent

STALE_S = 60.0


def pulse(
    name: str, status: str = "healthy", heard: float | None = 1.0, *, since: float = 1000.0, left: bool = False
) -> Pulse:
    return Pulse(NodeId(name), NodeStatus(status), since, heard, left)


def judged(pulses: Iterable[Pulse], observed_s: float = 1000.0, outage_ago_s: float | None = None) -> Verdict:
    guard = Guard(share_percent=40, floor=3)
    return classify(list(pulses), observed_s=observed_s, stale_after_s=STALE_S, guard=guard, outage_ago_s=outage_ago_s)


@pytest.mark.parametrize("status", ["healthy", "unhealthy", "draining"])
def test_a_silent_node_goes_offline(status: str) -> None:
    assert judged([pulse("a", status, 60.0)]).events == (("a", "went_silent"),)
    assert judged([pulse("a", status, None)]).events == (("a", "went_silent"),)


@pytest.mark.parametrize("status", ["pending", "offline"])
def test_a_node_that_is_not_in_service_cannot_fall_silent(status: str) -> None:
    assert judged([pulse("a", status, 4000.0)]).events == ()


def test_our_own_outage_is_not_theirs() -> None:
    silent = [pulse("a", heard=500.0)]
    assert judged(silent, observed_s=59.9).events == ()
    assert judged(silent, observed_s=60.0).events == (("a", "went_silent"),)


@pytest.mark.parametrize("status", ["offline", "unhealthy"])
def test_a_heartbeat_younger_than_the_verdict_brings_a_node_back(status: str) -> None:
    assert judged([pulse("a", status, 2.0, since=10.0)]).events == (("a", "came_back"),)
    assert judged([pulse("a", status, 2.0, since=10.0)], observed_s=0.0).events == (("a", "came_back"),)


def test_an_older_heartbeat_does_not_overturn_the_verdict() -> None:
    assert judged([pulse("a", "unhealthy", 11.0, since=10.0)]).events == ()


def test_a_node_that_said_goodbye_is_not_brought_back_by_a_late_heartbeat() -> None:
    assert judged([pulse("a", "offline", 2.0, since=3.0, left=True)]).events == ()


def test_a_clock_set_back_keeps_nobody_out_and_nobody_in() -> None:
    day = 86400.0
    assert judged([pulse("a", "offline", 2.0, since=-day)]).events == (("a", "came_back"),)
    assert judged([pulse("a", "offline", -day + 60, since=-day)]).events == (), "its last word was before the verdict"
    assert judged([pulse("a", "healthy", -day)]).events == (("a", "went_silent"),)
    assert judged([pulse("a", "healthy", -0.01)]).events == (), "written between two reads"


def test_the_guard_holds_when_most_of_the_fleet_falls_silent_at_once() -> None:
    fleet = [pulse(f"s{n}", heard=70.0) for n in range(3)] + [pulse(f"h{n}") for n in range(4)]
    verdict = judged(fleet)
    assert verdict.held == 3
    assert verdict.events == tuple((f"s{n}", "silent_but_held") for n in range(3))


def test_forty_percent_is_still_believed() -> None:
    fleet = [pulse(f"s{n}", heard=70.0) for n in range(4)] + [pulse(f"h{n}") for n in range(6)]
    assert judged(fleet).held == 0


def test_two_silent_nodes_of_two_are_no_mass_outage() -> None:
    assert judged([pulse("a", heard=70.0), pulse("b", heard=70.0)]).held == 0


def test_a_rolling_outage_does_not_slip_through_one_by_one() -> None:
    fleet = [
        *(pulse(f"gone{n}", "offline", 90.0, since=5.0) for n in range(3)),
        pulse("next", heard=61.0),
        *(pulse(f"h{n}") for n in range(4)),
    ]
    assert judged(fleet).held == 1  # 4 of 8 within one window


def test_nodes_that_are_about_to_fall_count_too() -> None:
    fleet = [pulse("first", heard=60.1), *(pulse(f"late{n}", heard=52.0) for n in range(2)), pulse("h")]
    assert judged(fleet).events == (("first", "silent_but_held"),)
    fleet = [pulse("first", heard=60.1), *(pulse(f"early{n}", heard=20.0) for n in range(2)), pulse("h")]
    assert judged(fleet).events == (("first", "went_silent"),)


def test_nodes_of_one_outage_count_though_their_last_heartbeats_lie_far_apart() -> None:
    fleet = [pulse("first", heard=60.1), *(pulse(f"late{n}", heard=35.0) for n in range(2)), pulse("h")]
    assert judged(fleet).events == (("first", "silent_but_held"),)


@pytest.mark.parametrize(("ago_s", "event"), [(5.0, "silent_but_held"), (60.0, "went_silent"), (None, "went_silent")])
def test_the_rest_of_an_outage_gets_time_to_return(ago_s: float | None, event: str) -> None:
    """Most are back: those that are still silent are too few for a mass outage."""
    fleet = [pulse("slow", "unhealthy", 90.0), *(pulse(f"back{n}", since=3.0) for n in range(5))]
    verdict = judged(fleet, outage_ago_s=ago_s)
    assert verdict.events == (("slow", event),)
    assert not verdict.is_mass_outage


def test_nodes_offline_since_long_do_not_count_against_the_rest() -> None:
    fleet = [*(pulse(f"old{n}", "offline", 9e5, since=8e5) for n in range(50)), pulse("a", heard=70.0), pulse("b")]
    assert judged(fleet).events == (("a", "went_silent"),)


@pytest.mark.parametrize(
    ("event", "seen", "observed_s", "expected"),
    [
        (NodeEvent.WENT_SILENT, pulse("a", heard=60.0), 60.0, True),
        (NodeEvent.WENT_SILENT, pulse("a", heard=1.0), 1000.0, False),  # it was heard meanwhile
        (NodeEvent.WENT_SILENT, pulse("a", heard=60.0), 0.0, False),  # it was us who slept
        (NodeEvent.WENT_SILENT, pulse("a", "pending", 4000.0), 1000.0, False),
        (NodeEvent.SILENT_BUT_HELD, pulse("a", heard=60.0), 60.0, True),
        (NodeEvent.SILENT_BUT_HELD, pulse("a", heard=60.0), 1.0, False),
        (NodeEvent.CAME_BACK, pulse("a", "offline", 2.0, since=10.0), 0.0, True),
        (NodeEvent.CAME_BACK, pulse("a", "offline", 2.0, since=10.0, left=True), 0.0, False),
        (NodeEvent.CAME_BACK, pulse("a", "healthy", 2.0), 0.0, False),
    ],
)
def test_a_verdict_is_looked_at_again_before_it_is_written(
    event: NodeEvent, seen: Pulse, observed_s: float, expected: bool
) -> None:
    assert is_still_true(seen, event, observed_s=observed_s, stale_after_s=STALE_S) is expected
