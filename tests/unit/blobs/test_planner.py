"""Which chunk is requested from which source: tables of situations, and random runs that must always end complete."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from corral.blobs.swarm.chunk_set import ChunkSet
from corral.blobs.swarm.planner import ChunkPlanner, ChunkRequest, PlanLimits, SourceKind

CONTROLLER, STORAGE, PEER = SourceKind.CONTROLLER, SourceKind.STORAGE, SourceKind.PEER


def planner(count: int, *, have: tuple[int, ...] = (), seed: int = 0, **limits: float) -> ChunkPlanner:
    return ChunkPlanner(ChunkSet.of(count, have), PlanLimits(**limits), seed=seed)  # type: ignore[arg-type]


def requests(plan: ChunkPlanner, now_s: float = 0.0) -> list[ChunkRequest]:
    found = []
    while (request := plan.next_request(now_s)) is not None:
        found.append(request)
    return found


def some(count: int, *indexes: int) -> ChunkSet:
    return ChunkSet.of(count, indexes)


def test_a_controller_alone_sends_the_missing_chunks_in_order() -> None:
    plan = planner(6, have=(1,), per_controller=3)
    plan.offer("controller", CONTROLLER, ChunkSet.complete(6))
    assert requests(plan) == [("controller", 0), ("controller", 2), ("controller", 3)]


def test_peers_come_first_and_the_controller_sends_only_what_it_assigned() -> None:
    plan = planner(6)
    plan.offer("controller", CONTROLLER, ChunkSet.complete(6))
    plan.offer("a", PEER, some(6, 0, 1))
    plan.assign([5], is_unrestricted=False)
    asked = requests(plan)
    assert ("controller", 5) in asked
    assert {request for request in asked if request.source == "a"} == {("a", 0), ("a", 1)}
    assert len(asked) == 3
    assert plan.needs_assignment


def test_an_object_storage_sends_what_the_controller_would() -> None:
    plan = planner(6)
    plan.offer("controller", CONTROLLER, ChunkSet.complete(6))
    plan.offer("storage", STORAGE, ChunkSet.complete(6))
    plan.assign([5], is_unrestricted=False)
    assert requests(plan) == [("storage", 5)]
    plan.on_failure(ChunkRequest("storage", 5), 0.0, is_final=True)
    assert requests(plan) == [("controller", 5)]


def test_a_node_alone_reads_from_the_storage_and_the_controller_helps() -> None:
    plan = planner(6, per_controller=2)
    plan.offer("controller", CONTROLLER, ChunkSet.complete(6))
    plan.offer("storage", STORAGE, ChunkSet.complete(6))
    assert requests(plan) == [("storage", 0), ("storage", 1), ("controller", 2), ("controller", 3)]


def test_the_rarest_chunk_comes_first() -> None:
    for seed in range(20):
        plan = planner(4, seed=seed, per_peer=1)
        plan.offer("a", PEER, ChunkSet.complete(4))
        plan.offer("b", PEER, some(4, 0, 1, 3))
        plan.offer("c", PEER, some(4, 0, 1, 3))
        first = {request.source: request.chunk for request in requests(plan)}
        assert first["a"] == 2 or 2 not in first.values()
        assert len(set(first.values())) == 3


def test_nodes_that_start_together_choose_different_chunks() -> None:
    chosen = set()
    for seed in range(16):
        plan = planner(200, seed=seed)
        plan.offer("a", PEER, ChunkSet.complete(200))
        request = plan.next_request(0.0)
        assert request is not None
        chosen.add(request.chunk)
    assert len(chosen) >= 12


def test_connections_are_bounded() -> None:
    plan = planner(100, connections=8, per_peer=2)
    for name in "abcdefgh":
        plan.offer(name, PEER, ChunkSet.complete(100))
    asked = requests(plan)
    assert len(asked) == 8
    assert set(Counter(request.source for request in asked).values()) == {1}
    assert len({request.chunk for request in asked}) == 8


def test_without_an_assignment_the_controller_is_used_when_nothing_arrives() -> None:
    plan = planner(4, fallback_s=3.0, idle_fallback_s=15.0, per_peer=1, min_overtake_s=60.0)
    plan.offer("controller", CONTROLLER, ChunkSet.complete(4))
    plan.assign([], is_unrestricted=False)
    plan.offer("peer", PEER, ChunkSet.complete(4))
    (request,) = requests(plan, 0.0)
    assert request.source == "peer"
    plan.on_bytes(request, 1.0)
    assert requests(plan, 3.9) == []
    assert [each.source for each in requests(plan, 4.0)] == ["controller"]
    assert requests(plan, 30.0) == [], "one at a time"


def test_a_node_that_nobody_feeds_uses_the_controller_after_a_while() -> None:
    plan = planner(4, fallback_s=3.0, idle_fallback_s=15.0)
    plan.offer("controller", CONTROLLER, ChunkSet.complete(4))
    plan.assign([], is_unrestricted=False)
    assert requests(plan, 14.9) == []
    for moment_s in (15.0, 15.1, 15.2, 15.3):  # from then on it goes on helping
        (request,) = requests(plan, moment_s)
        assert request.source == "controller"
        plan.on_chunk(request, moment_s)
    assert plan.is_complete


def test_when_the_only_peers_are_bad_the_controller_is_used_soon() -> None:
    plan = planner(4, fallback_s=3.0, idle_fallback_s=15.0, per_peer=1, min_overtake_s=60.0)
    plan.offer("controller", CONTROLLER, ChunkSet.complete(4))
    plan.offer("liar", PEER, ChunkSet.complete(4))
    plan.assign([], is_unrestricted=False)
    (request,) = requests(plan)
    plan.on_wrong_chunk(request)
    assert requests(plan, 2.9) == []
    assert [each.source for each in requests(plan, 3.0)] == ["controller"]


def test_bytes_that_still_arrive_and_busy_peers_leave_the_controller_alone() -> None:
    plan = planner(9, fallback_s=3.0, idle_fallback_s=15.0, min_overtake_s=60.0)
    plan.offer("controller", CONTROLLER, ChunkSet.complete(9))
    plan.offer("peer", PEER, some(9, 0, 1))
    plan.assign([], is_unrestricted=False)
    slow, busy = requests(plan)
    plan.on_bytes(slow, 2.0)
    assert requests(plan, 4.9) == []
    plan.on_busy(busy, 4.9, wait_s=60.0)
    assert requests(plan, 7.8) == []
    plan.on_busy(slow, 7.8, wait_s=60.0)
    assert requests(plan, 10.7) == []
    assert {request.source for request in requests(plan, 10.8)} == {"controller"}
    again = planner(9, fallback_s=3.0, idle_fallback_s=15.0, min_overtake_s=60.0)
    again.offer("controller", CONTROLLER, ChunkSet.complete(9))
    again.offer("peer", PEER, some(9, 0))
    again.assign([], is_unrestricted=False)
    for now_s in range(0, 15, 2):
        (request,) = requests(again, float(now_s))
        again.on_busy(request, float(now_s), wait_s=1.0)
    assert "controller" not in {request.source for request in requests(again, 14.9)}
    assert "controller" in {request.source for request in requests(again, 15.0)}, "not for ever"


def test_a_slow_request_is_repeated_at_the_controller_only_at_the_end_and_later() -> None:
    plan = planner(3, min_overtake_s=1.0, overtake_factor=3.0, end_factor=1.5, per_peer=1)
    plan.offer("controller", CONTROLLER, ChunkSet.complete(3))
    plan.offer("peer", PEER, ChunkSet.complete(3))
    plan.assign([], is_unrestricted=False)
    (first,) = requests(plan)
    plan.on_chunk(first, 2.0)  # two seconds are usual
    (second,) = requests(plan, 2.0)
    assert requests(plan, 4.9) == [], "a third chunk is missing"
    plan.on_chunk(second, 4.9)
    (third,) = requests(plan, 4.9)
    assert requests(plan, 7.8) == []
    plan.on_bytes(third, 10.0)
    assert requests(plan, 11.9) == [("controller", third.chunk)]


def test_of_several_peers_each_gets_one_request_at_a_time() -> None:
    plan = planner(20, per_peer=2, many_peers=2)
    plan.offer("a", PEER, ChunkSet.complete(20))
    assert len(requests(plan)) == 2
    plan.offer("b", PEER, ChunkSet.complete(20))
    assert [request.source for request in requests(plan)] == ["b"]


def test_a_slow_request_is_repeated_elsewhere_and_the_first_answer_wins() -> None:
    plan = planner(2, have=(0,), min_overtake_s=1.0)
    plan.offer("slow", PEER, some(2, 1))
    assert requests(plan) == [("slow", 1)]
    plan.offer("fast", PEER, some(2, 1))
    assert requests(plan, 0.9) == []
    assert requests(plan, 1.0) == [("fast", 1)]
    assert requests(plan, 9.0) == []  # two requests for a chunk are enough
    assert plan.on_chunk(ChunkRequest("fast", 1), 1.2) == (("slow", 1),)
    plan.on_cancelled(ChunkRequest("slow", 1))
    assert plan.is_complete
    assert plan.open_requests == 0


def test_a_request_is_not_repeated_early_while_other_chunks_are_missing() -> None:
    plan = planner(4, overtake_factor=3.0, end_factor=1.5, min_overtake_s=1.0, per_peer=1)
    plan.offer("a", PEER, some(4, 0, 1))
    first = requests(plan, 0.0)
    plan.on_chunk(first[0], 2.0)  # two seconds are usual
    requests(plan, 2.0)
    plan.offer("b", PEER, some(4, 0, 1))
    assert requests(plan, 7.9) == []
    assert len(requests(plan, 8.0)) == 1


def test_a_wrong_chunk_bans_its_source_for_good() -> None:
    plan = planner(3)
    plan.offer("liar", PEER, ChunkSet.complete(3))
    first = plan.next_request(0.0)
    assert first is not None
    plan.on_wrong_chunk(first)
    plan.offer("liar", PEER, ChunkSet.complete(3))  # offered again by the controller
    assert requests(plan, 100.0) == []
    assert plan.banned == ("liar",)
    assert plan.is_lost()


def test_a_busy_source_is_left_alone_and_the_planner_goes_elsewhere() -> None:
    plan = planner(1)
    plan.offer("busy", PEER, some(1, 0))
    (request,) = requests(plan)
    plan.offer("free", PEER, some(1, 0))
    plan.on_busy(request, 0.0, wait_s=2.0)
    assert requests(plan, 0.5) == [("free", 0)]
    assert not plan.is_lost()


def test_a_failing_source_is_paused_longer_each_time_and_lost_in_the_end() -> None:
    plan = planner(1, max_failures=3, first_pause_s=1.0)
    plan.offer("controller", CONTROLLER, some(1, 0))
    now_s = 0.0
    for tried in range(3):
        assert not plan.is_lost(), tried
        (request,) = requests(plan, now_s)
        plan.on_failure(request, now_s)
        assert requests(plan, now_s + 0.4) == []
        now_s += 10.0
    assert plan.is_lost()


def test_a_source_without_the_chunk_is_not_asked_for_it_again() -> None:
    plan = planner(2)
    plan.offer("a", PEER, some(2, 0))
    (request,) = requests(plan)
    plan.on_missing(request)
    assert requests(plan, 100.0) == []


def test_a_withdrawn_source_gets_no_more_requests() -> None:
    plan = planner(5, per_peer=1)
    plan.offer("a", PEER, ChunkSet.complete(5))
    (request,) = requests(plan)
    plan.withdraw("a")
    plan.on_chunk(request, 1.0)
    assert requests(plan, 1.0) == []


def test_large_blobs_are_planned_by_sample() -> None:
    plan = planner(30_000, connections=50, per_peer=50)
    plan.offer("a", PEER, ChunkSet.complete(30_000))
    asked = requests(plan)
    assert len({request.chunk for request in asked}) == 50


OUTCOMES = st.lists(st.sampled_from(["good", "good", "good", "fail", "busy", "missing", "wrong"]), max_size=60)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32), OUTCOMES)
def test_every_run_with_an_honest_controller_ends_complete(count: int, seed: int, outcomes: list[str]) -> None:
    """Peers fail, lie and leave in any order; each chunk is counted once, and never from a banned source."""
    rng = random.Random(seed)
    plan = planner(count, seed=seed, connections=4, fallback_s=1.0)
    plan.offer("controller", CONTROLLER, ChunkSet.complete(count))
    plan.assign([], is_unrestricted=False)
    for name in ("a", "b", "c"):
        plan.offer(name, PEER, ChunkSet(count, rng.getrandbits(count)))
    now_s, opened, pending = 0.0, list[ChunkRequest](), list(outcomes)
    for _ in range(5000):
        if plan.is_complete:
            break
        now_s += 0.3
        for request in requests(plan, now_s):
            assert request.source not in plan.banned
            assert request.chunk not in plan.have
            assert opened.count(request) == 0
            opened.append(request)
        assert len(opened) <= 4
        if not opened:
            continue
        request = opened.pop(rng.randrange(len(opened)))
        outcome = pending.pop() if pending and request.source != "controller" else "good"
        match outcome:
            case "good":
                for loser in plan.on_chunk(request, now_s):
                    opened.remove(loser)
                    plan.on_cancelled(loser)
            case "fail":
                plan.on_failure(request, now_s)
            case "busy":
                plan.on_busy(request, now_s, wait_s=1.0)
            case "missing":
                plan.on_missing(request)
            case "wrong":
                plan.on_wrong_chunk(request)
    assert plan.is_complete
