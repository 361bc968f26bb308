"""Retries: the wait before the next one, and a call that is made once more."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from corral.kit.clock import Clock
from corral.kit.errors import Unreachable

T = TypeVar("T")


@dataclass
class Backoff:
    """The wait before a retry: exponential, capped, with jitter so that a fleet does not retry at the same moment.
    `next_s()` after each failure, `reset()` after a success."""

    first_s: float
    cap_s: float
    jitter: float = 0.2
    roll: Callable[[], float] = field(default=random.random, repr=False)
    failures: int = 0

    def next_s(self) -> float:
        # The exponent is bounded: 2**5000 after a month of failures would raise OverflowError.
        plain = min(self.cap_s, self.first_s * 2.0 ** min(self.failures, 64))
        self.failures += 1
        return plain * (1 + self.jitter * (2 * self.roll() - 1))

    def reset(self) -> None:
        self.failures = 0


async def retry_unreachable(call: Callable[[], Awaitable[T]], *, clock: Clock, after_s: float) -> T:
    """Call again once if no process subscribed: one that just reconnects has no subscription for a moment. Raises
    `Unreachable` if there is none the second time either."""
    try:
        return await call()
    except Unreachable:
        await clock.sleep(after_s)
        return await call()
