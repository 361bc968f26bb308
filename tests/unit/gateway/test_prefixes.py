"""Prompts by their beginnings: what is equal hashes alike, what is remembered is forgotten."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from corral.gateway.routing.prefixes import BLOCK, MAX_BLOCKS, PrefixIndex, hash_blocks


def body(text: str, key: str = "prompt", **more: object) -> bytes:
    return json.dumps({"model": "m", key: text, **more}).encode()


def test_blocks_of_the_prompt_are_hashed_in_a_chain() -> None:
    chain = hash_blocks(body("a" * (3 * BLOCK)))
    assert len(chain) == 3
    assert len(set(chain)) == 3, "equal blocks at different depths are different beginnings"
    assert hash_blocks(body("a" * (3 * BLOCK), temperature=0.5)) == chain
    assert hash_blocks(body("a" * (2 * BLOCK) + "b" * BLOCK))[:2] == chain[:2]
    assert hash_blocks(body("b" + "a" * (3 * BLOCK)))[0] != chain[0]
    assert len(hash_blocks(body("a" * 1_000_000))) == MAX_BLOCKS


def test_what_has_no_prompt_or_a_short_one_has_no_chain() -> None:
    assert hash_blocks(b"") == hash_blocks(body("short")) == hash_blocks(body("a" * 1000, key="file")) == []
    assert hash_blocks(b"{" + b"x" * 1000) == hash_blocks(b"[" * 100_000) == []
    assert hash_blocks(json.dumps({"messages": [{"role": "user", "content": "a" * 1000}]}).encode())


@given(st.binary(max_size=2000))
def test_anything_at_all_may_be_asked(raw: bytes) -> None:
    assert len(hash_blocks(raw)) <= len(raw) // BLOCK


def test_the_deepest_beginning_among_those_there_are() -> None:
    index = PrefixIndex(ttl_s=10, half_life_s=5)
    index.observe([1, 2, 3], "a", 0.0)
    index.observe([1, 2], "b", 1.0)
    both = {"a": 0, "b": 1}
    assert index.match([1, 2, 3, 4], both, 2.0) == ("a", 3)
    assert index.match([1, 2, 9], both, 2.0) == ("b", 2)
    assert index.match([1, 2, 3], {"b": 0}, 2.0) == ("b", 2)
    assert index.match([7], both, 2.0) is None
    assert index.match([1, 2, 3], both, 10.5) == ("b", 2), "the deeper one is too old"
    assert index.match([1, 2, 3], both, 12.0) is None


def test_what_is_in_a_cache_weighs_less_with_time_and_nothing_after_a_restart() -> None:
    index = PrefixIndex(ttl_s=10, half_life_s=5)
    index.observe([1, 2, 3, 4], "a", 0.0)
    assert index.weight("a", 0.0) == 4
    assert abs(index.weight("a", 5.0) - 2) < 1e-9
    index.observe([1, 2, 3, 4], "a", 5.0)
    assert abs(index.weight("a", 5.0) - 2) < 1e-9, "it had them"
    index.observe([1, 2], "b", 5.0)
    assert index.weight("b", 5.0) == 2
    index.retain({"b"})
    assert index.weight("a", 5.0) == 0
    assert index.match([1, 2, 3], {"a": 0, "b": 1}, 5.0) == ("b", 2)


def test_it_does_not_grow_without_end() -> None:
    index = PrefixIndex(ttl_s=1e9, half_life_s=5)
    for number in range(2000):
        index.observe(list(range(number * 64, number * 64 + 64)), "a", float(number))
    assert len(index._seen) <= 65_536
    assert index.match([1999 * 64], {"a": 0}, 2000.0) == ("a", 1)
