"""For how long this controller has been able to hear and to write, without a gap.

A process can be stopped for a minute, a laptop closed for a night, a clock set. Each time the heartbeats that came
meanwhile still wait in some buffer while the database's clock says that everybody has been silent for long. So two
clocks are watched, ours that only runs forward and the database's: a leap of either between two batches is a gap.
"""

from __future__ import annotations

from datetime import datetime

from corral.bus.api import Bus
from corral.kit.clock import Clock


class ObservationWindow:
    """Hearing is the bus's word; writing is told by the heartbeat batches, which also try when nothing waits."""

    def __init__(self, bus: Bus, clock: Clock, *, longest_gap_s: float) -> None:
        """`longest_gap_s`: batches further apart than this do not count as uninterrupted."""
        self._bus = bus
        self._clock = clock
        self._longest_gap_s = longest_gap_s
        self._writing_since: float | None = None
        self._last: tuple[float, datetime] | None = None  # our clock and the database's, at the last batch

    @property
    def is_deaf(self) -> bool:
        return self._bus.connected_since is None

    def recorded(self, at: datetime) -> None:
        """A batch was written; `at` is the database's time then."""
        now = self._clock.monotonic()
        if self._writing_since is None or self._is_gap(now, at):
            self._writing_since = now
        self._last = (now, at)

    def not_recorded(self) -> None:
        self._writing_since = self._last = None

    def seconds(self, at: datetime) -> float:
        """Up to now, which is `at` on the database's clock."""
        now = self._clock.monotonic()
        hearing_since = self._bus.connected_since
        if hearing_since is None or self._writing_since is None or self._is_gap(now, at):
            return 0.0
        return now - max(hearing_since, self._writing_since)

    def _is_gap(self, now: float, at: datetime) -> bool:
        if self._last is None:
            return True
        then, recorded_at = self._last
        ours, theirs = now - then, (at - recorded_at).total_seconds()
        return ours > self._longest_gap_s or abs(theirs - ours) > self._longest_gap_s
