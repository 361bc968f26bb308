"""Whatever fails and whenever, the invariants hold after every commit, and in the end the world is as the rules say.

Seeds that are odd; the others are next door, so that two processes can share them."""

from __future__ import annotations

from collections.abc import Callable

EVERY_OTHER = 1


def test_nothing_is_lost_and_all_comes_to_rest(seed: int, survives: Callable[[int], None]) -> None:
    survives(seed)
