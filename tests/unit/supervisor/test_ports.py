"""Ports: quarantine, affinity, and the order in which they are given out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from corral.worker.settings.processes import PortRange
from corral.worker.supervisor.ports import NoFreePort, PortAllocator, Taken


def free(_port: int) -> bool:
    return True


def book(first: int = 100, last: int = 104, begin: int = 0) -> PortAllocator:
    return PortAllocator(PortRange(first, last, begin), quarantine_s=15, affinity_s=300)


def test_ports_grow_from_the_beginning() -> None:
    ports = book()
    assert [ports.take(key, 0, free).port for key in "abc"] == [100, 101, 102]


def test_growing_goes_round_from_where_this_worker_begins() -> None:
    ports = book(begin=103)
    assert [ports.take(key, 0, free).port for key in "abcde"] == [103, 104, 100, 101, 102]


def test_a_released_port_rests_even_for_its_own_key() -> None:
    ports = book()
    assert ports.take("a", 0, free).port == 100
    ports.release(100, now=10)
    assert ports.take("a", 24.9, free).port == 101
    ports.release(101, now=24.9)
    assert ports.take("a", 25, free).port == 100


def test_the_own_port_comes_back_while_others_pass_it_by() -> None:
    ports = book()
    ports.take("a", 0, free)
    ports.release(100, now=0)
    assert ports.take("b", 20, free).port == 101
    assert ports.take("a", 20, free).port == 100


def test_a_claim_does_not_age_while_the_port_is_in_use() -> None:
    ports = book()
    ports.take("a", 0, free)
    ports.release(100, now=10_000)
    assert ports.take("b", 10_100, free).port == 101
    assert ports.take("a", 10_200, free).port == 100


def test_a_claim_that_has_aged_is_for_everybody_before_growing_last_released_first() -> None:
    ports = book()
    for key in "ab":
        ports.take(key, 0, free)
    ports.release(100, now=0)
    ports.release(101, now=1)
    assert ports.take("c", 400, free).port == 101
    assert ports.take("d", 400, free).port == 100
    assert ports.take("e", 400, free).port == 102


def test_the_oldest_claim_of_another_is_taken_only_when_nothing_else_is_left() -> None:
    ports = book(100, 101)
    for key in "ab":
        ports.take(key, 0, free)
    ports.release(101, now=1)
    ports.release(100, now=2)
    assert ports.take("c", 20, free) == Taken(101, stolen_from="b")


def test_no_port_at_all_is_an_error_that_says_so() -> None:
    ports = book(100, 101)
    for key in "ab":
        ports.take(key, 0, free)
    with pytest.raises(NoFreePort, match=r"^no free gRPC port in range: 100-101, 2 in use, 0 resting$"):
        ports.take("c", 0, free)
    ports.release(100, now=0)
    with pytest.raises(NoFreePort, match="1 in use, 1 resting"):
        ports.take("c", 14.9, free)
    assert ports.take("c", 15, free).port == 100


def test_what_another_program_holds_is_tried_again_later() -> None:
    ports = book(100, 101)
    assert ports.take("a", 0, lambda port: port != 100).port == 101
    with pytest.raises(NoFreePort):
        ports.take("b", 1, free)
    assert ports.take("b", 15, free).port == 100


def test_adopted_ports_are_not_given_away() -> None:
    ports = book(100, 101)
    ports.hold(100, "adopted")
    assert ports.take("a", 0, free).port == 101
    ports.release(100, now=0)
    assert ports.take("adopted", 20, free).port == 100


def test_releasing_twice_changes_nothing() -> None:
    ports = book(100, 100)
    ports.take("a", 0, free)
    ports.release(100, now=0)
    ports.release(100, now=14)
    assert ports.take("a", 15, free).port == 100


@pytest.mark.parametrize(("first", "last"), [(0, 5), (10, 9), (60000, 70000)])
def test_a_range_that_is_none_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="is no range of ports"):
        PortRange(first, last)


def test_the_usual_range_lies_below_the_ephemeral_ones() -> None:
    assert (PortRange().first, PortRange().last) == (20000, 29999)


class Ports(RuleBasedStateMachine):
    """Whatever happens: no port is held twice, none is given out while it rests, a claim is only taken in need."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ports = PortAllocator(PortRange(100, 105), quarantine_s=15, affinity_s=300)
        self.held: dict[int, str] = {}
        self.released: dict[int, tuple[str, float]] = {}

    @rule(key=st.sampled_from("abcd"))
    def take(self, key: str) -> None:
        try:
            taken = self.ports.take(key, self.now, free)
        except NoFreePort:
            resting = {port for port, (_, at) in self.released.items() if self.now < at + 15}
            assert set(self.held) | resting == set(range(100, 106))
            return
        assert taken.port not in self.held
        if taken.port in self.released:
            owner, at = self.released.pop(taken.port)
            assert self.now >= at + 15
            if owner != key and self.now < at + 300:
                assert taken.stolen_from == owner
        self.held[taken.port] = key

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        port = data.draw(st.sampled_from(sorted(self.held)))
        self.released[port] = (self.held.pop(port), self.now)
        self.ports.release(port, self.now)

    @rule(seconds=st.sampled_from([1.0, 14.9, 15.0, 100.0, 301.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nobody_is_lost(self) -> None:
        assert len(self.held) <= 6


TestPorts = Ports.TestCase


@given(st.lists(st.sampled_from("abc"), max_size=5))
def test_distinct_takers_have_distinct_ports(keys: list[str]) -> None:
    ports = book()
    taken = [ports.take(key, 0, free).port for key in keys]
    assert len(set(taken)) == len(taken)
