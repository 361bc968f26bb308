"""A clock that only moves when a test moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class ManualClock:
    """`sleep` moves it, so a loop that waits runs through at once."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._now = datetime.fromtimestamp(start, UTC)
        self._monotonic = 1000.0
        self.slept: list[float] = []

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self._monotonic += seconds
        self._now += timedelta(seconds=seconds)

    def step_wall(self, seconds: float) -> None:
        """Somebody sets the clock; nothing has passed."""
        self._now += timedelta(seconds=seconds)
