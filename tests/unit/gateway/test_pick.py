"""Which replica is picked, how its requests are counted, and how long what could not be reached is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.messages.replicas import NodeLoad
from corral.gateway.routing.in_flight import Ejection, InFlight, SlotCounter
from corral.gateway.routing.pick import (
    BUSY,
    EJECTED,
    LAST_RESORT,
    Picked,
    Policy,
    PrefixMatch,
    pick,
    pick_by_prefix,
    rank,
)

RANKS = st.builds(
    rank,
    st.integers(0, 70),
    st.sampled_from([1, 4, 64]),
    base=st.sampled_from([0, LAST_RESORT, EJECTED, LAST_RESORT + EJECTED]),
)


@pytest.mark.parametrize(
    ("ranks", "turn", "place"),
    [
        ([], 0, None),
        ([0], 0, 0),
        ([0], 1, 0),
        ([2, 1, 3], 0, 1),
        ([1, 1, 1], 1, 1),
        ([1, 1, 1], 3, 0),
        ([1, 0, 1], 2, 1),
        ([rank(1, 1), rank(5, 64)], 0, 1),  # more to do, and more hands
        ([rank(1, 1), rank(2, 2)], 0, None),
        ([rank(1, 1), rank(0, 1, base=LAST_RESORT)], 0, None),  # one that answers is worth waiting for
        ([rank(0, 1, base=EJECTED), rank(0, 1, base=LAST_RESORT)], 0, 1),
        ([rank(0, 1, base=EJECTED)], 0, None),
        ([rank(0, 1, base=EJECTED + LAST_RESORT), rank(1, 1, base=LAST_RESORT)], 0, None),
    ],
)
def test_the_one_with_the_least_to_do_in_turn(ranks: list[int], turn: int, place: int | None) -> None:
    assert pick(ranks, turn) == place


@given(st.lists(RANKS, max_size=20), st.integers(0, 25))
def test_nobody_with_less_to_do_is_passed_over(ranks: list[int], turn: int) -> None:
    place = pick(ranks, turn)
    usable = [each for each in ranks if each < EJECTED]
    best = min((each for each in usable if each < LAST_RESORT), default=min(usable, default=None))
    if place is None:
        assert best is None or best % LAST_RESORT >= BUSY
    else:
        assert ranks[place] == best == min(ranks)
        later = [other for other in range(min(turn, len(ranks)), len(ranks)) if ranks[other] == best]
        assert place == (later[0] if later else ranks.index(best))


def weights(*numbers: float) -> Callable[[int], float]:
    return lambda place: numbers[place]


@pytest.mark.parametrize(
    ("ranks", "warm", "weighs", "picked"),
    [
        ([0, 0, 0], PrefixMatch(2, 0.5), (0, 0, 9), Picked(2)),  # it has the prompt, and time
        ([0, 0, 0], PrefixMatch(2, 0.29), (0, 1, 9), Picked(0)),  # it has too little of it
        ([0, 0, 3], PrefixMatch(2, 1.0), (5, 1, 9), Picked(1, True)),  # it has too much to do
        ([1, 1, 2], PrefixMatch(2, 1.0), (0, 0, 9), Picked(2)),  # two more than the least is not too much; 1 x 1.5 + 1
        ([4, 4, 7], PrefixMatch(2, 1.0), (1, 0, 9), Picked(1, True)),  # but three more is, whatever the factor says
        ([0, rank(1, 1), 0], PrefixMatch(1, 1.0), (3, 0, 1), Picked(2, True)),  # nobody waits for a cache
        (
            [0, rank(0, 1, base=EJECTED)],
            PrefixMatch(1, 1.0),
            (0, 9),
            Picked(0),
        ),  # it is away, which is no lack of replicas
        ([0, 1, 0], None, (3, 0, 3), Picked(1)),  # new prompts go where little is cached
        ([rank(1, 1), rank(1, 1)], PrefixMatch(0, 1.0), (0, 0), None),
        ([rank(0, 1, base=LAST_RESORT)], PrefixMatch(0, 1.0), (0,), Picked(0)),
    ],
)
def test_a_prompt_goes_where_its_beginning_is_known(
    ranks: list[int], warm: PrefixMatch | None, weighs: tuple[float, ...], picked: Picked | None
) -> None:
    assert pick_by_prefix(ranks, 0, Policy(), warm, weights(*weighs)) == picked


@given(st.lists(RANKS, min_size=1, max_size=60), st.integers(0, 70), st.integers(0, 59), st.floats(0, 1))
def test_whoever_is_picked_for_its_cache_has_a_free_slot(ranks: list[int], turn: int, hot: int, ratio: float) -> None:
    picked = pick_by_prefix(ranks, turn, Policy(), PrefixMatch(hot % len(ranks), ratio), lambda index: float(-index))
    plain = pick(ranks, turn)
    assert (picked is None) == (plain is None)
    if picked is not None and plain is not None:
        assert ranks[picked.replica_index] % LAST_RESORT < BUSY
        assert ranks[picked.replica_index] <= ranks[plain] + Policy().abs_slack


class Queue:
    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        self.notified = 0

    def on_slot_free(self) -> None:
        self.notified += 1


def attached(
    counter: SlotCounter, slots: int = 1, *, queue: Queue | None = None, last_resort: bool = False
) -> list[int]:
    ranks = [7]
    counter.attach(ranks, 0, slots=slots, last_resort=last_resort, queue=queue or Queue(waiting=0))
    return ranks


def test_a_load_keeps_its_rank_and_tells_who_waits() -> None:
    counter, queue = SlotCounter("n"), Queue(waiting=1)
    ranks = attached(counter, 2, queue=queue)
    assert ranks == [0]
    counter.begin()
    assert ranks == [1]
    counter.begin()
    assert ranks == [2 + BUSY]
    counter.end()
    assert (ranks, queue.notified) == ([1], 1)
    counter.eject()
    assert ranks == [1 + EJECTED]
    counter.readmit()
    assert (ranks, queue.notified) == ([1], 2)


def test_requests_of_an_old_view_end_under_the_new_one() -> None:
    counter = SlotCounter("n")
    old = attached(counter)
    counter.begin()
    new = attached(counter, last_resort=True)
    assert new == [rank(1, 1, base=LAST_RESORT)]
    counter.end()
    assert (old, new) == ([1 + BUSY], [LAST_RESORT])


def test_what_a_node_tells_is_counted_less_what_is_ours() -> None:
    in_flight = InFlight()
    counter = in_flight.counter("p1", "n1")
    ranks = attached(counter, 4)
    counter.begin()
    in_flight.on_report("n1", NodeLoad("boot", 1, {"p1": 3}))
    assert (counter.in_flight, ranks) == (3, [3])
    counter.end()
    assert counter.in_flight == 2
    in_flight.on_report("n1", NodeLoad("boot", 2, {}))
    assert counter.in_flight == 0


def test_a_count_taken_before_our_request_ended_does_not_keep_its_slot() -> None:
    in_flight = InFlight()
    counter = in_flight.counter("p1", "n1")
    ranks = attached(counter)
    counter.begin()
    counter.end()
    in_flight.on_report("n1", NodeLoad("boot", 1, {"p1": 1}))  # it was on its way
    assert ranks == [0]


def test_reports_that_were_overtaken_and_other_nodes_do_not_count() -> None:
    in_flight = InFlight()
    counter = in_flight.counter("p1", "n1")
    attached(counter, 9)
    in_flight.on_report("n1", NodeLoad("boot", 5, {"p1": 2}))
    in_flight.on_report("n1", NodeLoad("boot", 4, {"p1": 7}))
    in_flight.on_report("n2", NodeLoad("boot", 9, {"p1": 8}))
    assert counter.in_flight == 2
    in_flight.on_report("n1", NodeLoad("another boot", 1, {"p1": 1}))
    assert counter.in_flight == 1
    in_flight.on_disconnect()
    assert counter.in_flight == 0


def test_what_cannot_be_reached_is_left_alone_for_longer_each_time() -> None:
    later: list[tuple[float, Callable[[], None]]] = []
    in_flight = InFlight()
    first, second, elsewhere = (in_flight.counter(f"p{n}", node) for n, node in ((1, "n1"), (2, "n1"), (3, "n2")))
    ejection = Ejection(in_flight, lambda s, call: later.append((s, call)), first_s=1.0, cap_s=3.0)
    ejection.eject_node("n1")
    ejection.eject_node("n1")  # another request found out at the same time
    assert (first.is_ejected, second.is_ejected, elsewhere.is_ejected) == (True, True, False)
    assert [s for s, _ in later] == [1.0, 1.0]
    for expected in (2.0, 3.0, 3.0):
        later[-2][1]()
        later[-1][1]()
        ejection.eject_process("p1")
        assert later[-1][0] == expected
        later.append(later[-1])
    later[-1][1]()
    ejection.on_reached(first)
    ejection.eject_process("p1")
    assert later[-1][0] == 1.0
