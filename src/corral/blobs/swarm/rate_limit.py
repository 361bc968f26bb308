"""A limit for bytes per second, shared by all transfers of one direction."""

from __future__ import annotations

from corral.kit.clock import Clock

BURST_S = 0.25  # of the rate may be used at once


class RateLimit:
    """A token bucket that may go into debt: a caller waits after its bytes, not before, so that any size passes."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        """0: no limit."""
        self._rate = bytes_per_s
        self._clock = clock
        self._level = bytes_per_s * BURST_S
        self._at_s = clock.monotonic()

    @property
    def is_limited(self) -> bool:
        return self._rate > 0

    async def take(self, count: int) -> None:
        """Account for `count` bytes, and wait until the rate allows more."""
        if not self.is_limited:
            return
        wait_s = self.reserve(count, self._clock.monotonic())
        if wait_s > 0:
            await self._clock.sleep(wait_s)

    def reserve(self, count: int, now_s: float) -> float:
        """Account for `count` bytes. Returns the seconds to wait."""
        self._level = min(self._rate * BURST_S, self._level + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        self._level -= count
        return max(0.0, -self._level / self._rate)
