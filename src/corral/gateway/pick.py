"""Which replica answers: one number per replica orders them, and the smallest is chosen. Pure.

The number (`rank`) is kept up to date by `inflight.py` whenever a request begins or ends, so that choosing looks at
nothing but a list of integers: with a thousand replicas that is some ten microseconds. In order of preference: requests
under way; then replicas whose slots are all taken; then those of nodes that did not answer lately; then those that
refused a connection a moment ago. Requests wait for a busy replica rather than use a last resort.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

BUSY = 1 << 20
LAST_RESORT = 1 << 40
EJECTED = 1 << 60

_MOST_WEIGHED = 32  # replicas compared by their caches; more would cost more than the cache saves


class Policy(NamedTuple):
    """How strongly a known prompt prefix counts (docs/reference/wire/routing.md#prefix-cache)."""

    prefix_cache: bool = True
    min_match: float = 0.3
    abs_slack: int = 2
    rel_factor: float = 1.5


class Warm(NamedTuple):
    """The replica that has seen the longest part of this prompt's beginning."""

    place: int
    ratio: float  # of the prompt's blocks it has seen


class Picked(NamedTuple):
    place: int
    disturbed: bool = False  # another one knew the prompt well, and had too much to do


def rank(in_flight: int, slots: int, *, base: int = 0) -> int:
    """`base`: LAST_RESORT, EJECTED, both or neither."""
    return base + (in_flight if in_flight < slots else in_flight + BUSY)


def pick(ranks: Sequence[int], turn: int) -> int | None:
    """The place of the one with the least to do, ties in turn, from place `turn` on; None: all are busy or ejected."""
    if not ranks:
        return None
    least = min(ranks)
    if least >= BUSY and (least >= EJECTED or least % LAST_RESORT >= BUSY):
        return None
    if turn < len(ranks):
        if ranks[turn] == least:  # as mostly, where nobody has much to do
            return turn
        try:
            return ranks.index(least, turn)
        except ValueError:
            pass
    return ranks.index(least)


def pick_warm(
    ranks: Sequence[int], turn: int, policy: Policy, warm: Warm | None, weight: Callable[[int], float]
) -> Picked | None:
    """The same for a prompt whose beginning is known: the replica that has it in its cache, unless that one has too
    much to do; else the one with the least in its cache (`weight`, by place) among those with about the least to do."""
    place = pick(ranks, turn)
    if place is None:
        return None
    least = ranks[place]
    if least >= BUSY:  # a last resort: nothing to be choosy about
        return Picked(place)
    most = min(least + policy.abs_slack, least * policy.rel_factor + 1)
    strong = warm is not None and warm.ratio >= policy.min_match
    if warm is not None and strong and ranks[warm.place] <= most:
        return Picked(warm.place)
    best, lightest = place, weight(place)
    for other in _around(len(ranks), turn):
        if ranks[other] <= most and (found := weight(other)) < lightest:
            best, lightest = other, found
    # One that could not be reached lately is no candidate: that it is not chosen tells nothing about too few replicas.
    return Picked(best, warm is not None and strong and ranks[warm.place] < LAST_RESORT)


def _around(count: int, turn: int) -> Sequence[int]:
    if count <= _MOST_WEIGHED:
        return range(count)
    return [place % count for place in range(turn, turn + _MOST_WEIGHED)]
