"""Retries work that failed for a transient reason: a limited number of times, with growing pauses.

A database that is away for a moment, a commit with an unknown outcome, a concurrent writer: none of these says anything
about the work itself.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from corral.kit.backoff import Backoff
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, CorralError, OutcomeUnknown, Unavailable

K = TypeVar("K", bound=Hashable)

MAX_ATTEMPTS = 8  # three quarters of a minute, with the pauses below
_TRANSIENT = (Unavailable, OutcomeUnknown, Conflict)


@dataclass
class _Failing:
    backoff: Backoff
    next_at: float


class RetryState(Generic[K]):
    def __init__(self, clock: Clock, *, first_s: float = 0.5, cap_s: float = 10.0) -> None:
        self._clock = clock
        self._first_s = first_s
        self._cap_s = cap_s
        self._failing: dict[K, _Failing] = {}

    def can_try(self, key: K) -> bool:
        """False during a pause."""
        failing = self._failing.get(key)
        return failing is None or failing.next_at <= self._clock.monotonic()

    def should_retry(self, key: K, error: CorralError) -> bool:
        """Record a failure. True: try again after the pause."""
        if not isinstance(error, _TRANSIENT):
            return False
        failing = self._failing.setdefault(key, _Failing(Backoff(self._first_s, self._cap_s), 0.0))
        failing.next_at = self._clock.monotonic() + failing.backoff.next_s()
        return failing.backoff.failures < MAX_ATTEMPTS

    def forget_all_but(self, keys: Collection[K]) -> None:
        self._failing = {key: failing for key, failing in self._failing.items() if key in keys}
