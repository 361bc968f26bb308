"""Chooses a replica: each replica has a number, its rank, and the smallest rank wins. Pure.

`in_flight.py` updates a rank whenever a request begins or ends, so that the choice reads only a list of integers: ten
microseconds for a thousand replicas. Fewer requests in flight rank first; then come replicas without a free slot; then
replicas on nodes that did not respond lately (last resort); then replicas that were not reached a moment ago (ejected).
A request waits for a busy replica rather than use a last resort.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

BUSY = 1 << 20
LAST_RESORT = 1 << 40
EJECTED = 1 << 60

MAX_WEIGHED = 32  # replicas whose caches are compared; more would cost more than the cache saves


class Policy(NamedTuple):
    """How much a cached prompt prefix counts (docs/reference/wire/routing.md#prefix-cache)."""

    prefix_cache: bool = True
    min_match: float = 0.3
    abs_slack: int = 2
    rel_factor: float = 1.5


class PrefixMatch(NamedTuple):
    """The replica that has served the longest prefix of this prompt."""

    replica_index: int
    ratio: float  # of the prompt's blocks that it has served


class Picked(NamedTuple):
    replica_index: int
    is_miss: bool = False  # another replica matched the prompt well and was too busy


def rank(in_flight: int, slots: int, *, base: int = 0) -> int:
    """`base`: LAST_RESORT, EJECTED, both or neither."""
    return base + (in_flight if in_flight < slots else in_flight + BUSY)


def pick(ranks: Sequence[int], turn: int) -> int | None:
    """The index of the smallest rank, ties in turn from index `turn` on; None: all replicas are busy or ejected."""
    if not ranks:
        return None
    least = min(ranks)
    if least >= BUSY and (least >= EJECTED or least % LAST_RESORT >= BUSY):
        return None
    if turn < len(ranks):
        if ranks[turn] == least:  # the usual case at low load
            return turn
        try:
            return ranks.index(least, turn)
        except ValueError:
            pass
    return ranks.index(least)


def pick_by_prefix(
    ranks: Sequence[int], turn: int, policy: Policy, match: PrefixMatch | None, weight: Callable[[int], float]
) -> Picked | None:
    """`pick` for a prompt that may be cached: the replica that has its prefix in the cache, unless that one is too
    busy; else the replica with the smallest cache (`weight`, by index) among the least busy ones."""
    index = pick(ranks, turn)
    if index is None:
        return None
    least = ranks[index]
    if least >= BUSY:  # a last resort
        return Picked(index)
    limit = min(least + policy.abs_slack, least * policy.rel_factor + 1)
    is_strong = match is not None and match.ratio >= policy.min_match
    if match is not None and is_strong and ranks[match.replica_index] <= limit:
        return Picked(match.replica_index)
    best, lightest = index, weight(index)
    for other in _around(len(ranks), turn):
        if ranks[other] <= limit and (found := weight(other)) < lightest:
            best, lightest = other, found
    # A miss is a sign of too few replicas, but not where the matching replica could not be reached lately.
    return Picked(best, match is not None and is_strong and ranks[match.replica_index] < LAST_RESORT)


def _around(count: int, turn: int) -> Sequence[int]:
    if count <= MAX_WEIGHED:
        return range(count)
    return [index % count for index in range(turn, turn + MAX_WEIGHED)]
