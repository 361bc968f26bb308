from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from corral.controller.web.attempts import Attempts, network_of


def test_a_few_tries_at_once_then_one_at_a_time() -> None:
    tries = Attempts(burst=3, every_s=10)
    assert [tries.spend("192.0.2.1", 100) for _ in range(5)] == [0, 0, 0, 10, 10]
    assert tries.spend("192.0.2.2", 100) == 0, "another address is another matter"
    assert tries.spend("192.0.2.1", 109) == 1
    assert tries.spend("192.0.2.1", 110) == 0
    assert tries.spend("192.0.2.1", 110) == 10


def test_a_right_key_costs_nothing() -> None:
    tries = Attempts(burst=2, every_s=10)
    for _ in range(50):
        assert tries.spend("192.0.2.1", 100) == 0
        tries.give_back("192.0.2.1")
    tries.give_back("192.0.2.99")


def test_one_ipv6_network_is_one_guesser() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("") == network_of("not an address") == ""


@given(st.lists(st.tuples(st.integers(0, 60), st.floats(0, 5)), max_size=200))
def test_memory_is_bounded_and_nobody_gets_more_than_their_rate(steps: list[tuple[int, float]]) -> None:
    tries, now = Attempts(burst=5, every_s=2, addresses=1000), 0.0
    allowed: dict[int, int] = {}
    for host, passed in steps:
        now += passed
        allowed[host] = allowed.get(host, 0) + (tries.spend(f"192.0.2.{host}", now) == 0)
        assert allowed[host] <= 5 + now / 2
    assert len(tries) <= 60


def test_the_oldest_addresses_are_forgotten() -> None:
    tries = Attempts(addresses=10)
    for host in range(100):
        tries.spend(f"192.0.2.{host}", host)
    assert len(tries) == 10
