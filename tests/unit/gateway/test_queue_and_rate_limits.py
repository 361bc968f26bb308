"""Who is served next, and who has had enough."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from corral.contract.view import KeyLimits
from corral.gateway.http.rate_limits import KeyLimiter, Limiters
from corral.gateway.routing.queue import FairQueue, Waiter


def test_keys_take_turns() -> None:
    queue: FairQueue[int] = FairQueue()
    served: list[str] = []
    for key in ("a", "a", "a", "b", "a", "c"):
        queue.add(key, lambda _what, key=key: served.append(key))  # type: ignore[misc]
    while queue.serve(1):
        pass
    assert served == ["a", "b", "c", "a", "a", "a"]
    assert queue.waiting == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["come", "leave", "serve"])), max_size=60))
def test_nobody_is_forgotten_and_nobody_served_twice(steps: list[tuple[str, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    served: Counter[int] = Counter()
    here: dict[int, tuple[str, Waiter[int]]] = {}
    for number, (key, step) in enumerate(steps):
        if step == "come":
            here[number] = key, queue.add(key, lambda _what, number=number: served.update([number]))  # type: ignore[misc]
        elif step == "serve":
            assert queue.serve(1) == bool(here)
            here = {each: row for each, row in here.items() if not served[each]}
        else:
            mine = [each for each, (whose, _) in here.items() if whose == key]
            for each in mine[:1]:
                queue.remove(here.pop(each)[1])
                queue.remove(Waiter(key, lambda _what: None))  # a stranger
        assert queue.waiting == len(here)
    queue.serve_all(2)
    assert all(served[each] == 1 for each in here)
    assert max(served.values(), default=1) == 1


def test_a_minutes_worth_may_come_at_once_and_then_as_it_fills() -> None:
    limiter = KeyLimiter(KeyLimits(requests_per_min=6), 0.0)
    for _ in range(6):
        assert limiter.check(0.0) is None
        limiter.begin()
        limiter.end(0)
    refusal = limiter.check(0.0)
    assert refusal is not None
    assert (refusal.what, refusal.limit) == ("requests", 6)
    assert abs(refusal.retry_after_s - 10) < 1e-6
    assert limiter.check(9.9) is not None
    assert limiter.check(10.1) is None


def test_tokens_are_paid_afterwards() -> None:
    limiter = KeyLimiter(KeyLimits(tokens_per_min=60), 0.0)
    limiter.begin()
    assert limiter.check(0.0) is None, "nobody knows yet what it costs"
    limiter.end(90)
    refusal = limiter.check(0.0)
    assert refusal is not None
    assert (refusal.what, round(refusal.retry_after_s)) == ("tokens", 31)
    assert limiter.check(32.0) is None


def test_so_many_at_once() -> None:
    limiter = KeyLimiter(KeyLimits(concurrent=2), 0.0)
    limiter.begin()
    limiter.begin()
    refusal = limiter.check(0.0)
    assert refusal is not None
    assert refusal.what == "concurrent"
    limiter.end(0)
    assert limiter.check(0.0) is None


def test_limits_outlive_views_and_follow_their_changes() -> None:
    limiters = Limiters()
    assert limiters.of("k", None, 0.0) is limiters.of("k", KeyLimits(), 0.0) is None
    first = limiters.of("k", KeyLimits(concurrent=1), 0.0)
    assert first is not None
    first.begin()
    assert limiters.of("k", KeyLimits(concurrent=1), 0.0) is first
    other = limiters.of("k", KeyLimits(concurrent=2), 0.0)
    assert other is not None
    assert (other.limits.concurrent, other.running) == (2, 1)
    first.end(0)
    assert other.running == 0, "what began under the old limits counts against the new ones only until it ends"
    limiters.retain({"k"})
    assert limiters.of("k", KeyLimits(concurrent=2), 0.0) is other
    limiters.retain({"another"})
    assert limiters.of("k", KeyLimits(concurrent=2), 0.0) is not other, "nothing is kept of keys that are gone"
