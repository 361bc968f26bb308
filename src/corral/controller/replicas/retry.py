"""What failed for a reason that passes is tried again: some times, with growing pauses. What fails then has failed.

The database away for a moment, a commit nobody knows the end of, somebody who was quicker: none of these says anything
about what was being done.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from corral.kit.backoff import Backoff
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, CorralError, OutcomeUnknown, Unavailable

K = TypeVar("K", bound=Hashable)

MOST_TRIES = 8  # three quarters of a minute, with the pauses below
_PASSES = (Unavailable, OutcomeUnknown, Conflict)


@dataclass
class _Failing:
    backoff: Backoff
    next_at: float


class Trying(Generic[K]):
    def __init__(self, clock: Clock, *, first_s: float = 0.5, cap_s: float = 10.0) -> None:
        self._clock = clock
        self._first_s = first_s
        self._cap_s = cap_s
        self._failing: dict[K, _Failing] = {}

    def may(self, key: K) -> bool:
        """Not during a pause."""
        failing = self._failing.get(key)
        return failing is None or failing.next_at <= self._clock.monotonic()

    def again(self, key: K, error: CorralError) -> bool:
        """It failed. Whether it is to be tried again, once it may."""
        if not isinstance(error, _PASSES):
            return False
        failing = self._failing.setdefault(key, _Failing(Backoff(self._first_s, self._cap_s), 0.0))
        failing.next_at = self._clock.monotonic() + failing.backoff.next_s()
        return failing.backoff.failures < MOST_TRIES

    def forget_all_but(self, keys: Collection[K]) -> None:
        self._failing = {key: failing for key, failing in self._failing.items() if key in keys}
