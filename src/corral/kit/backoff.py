"""The wait before a retry: exponential, capped, with jitter so that a fleet does not retry at the same moment."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """`next_s()` after each failure, `reset()` after a success."""

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
