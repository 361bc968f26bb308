"""For how long this controller has been able to hear and to write, without a gap."""

from __future__ import annotations

from corral.bus.api import Bus
from corral.kit.clock import Clock


class Listening:
    """Hearing is the bus's word; writing is told by the heartbeat batches, which also try when nothing waits."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._writing_since: float | None = None

    def recorded(self) -> None:
        if self._writing_since is None:
            self._writing_since = self._clock.monotonic()

    def not_recorded(self) -> None:
        self._writing_since = None

    def seconds(self) -> float:
        hearing_since = self._bus.connected_since
        if hearing_since is None or self._writing_since is None:
            return 0.0
        return self._clock.monotonic() - max(hearing_since, self._writing_since)
