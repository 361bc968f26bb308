"""The controller's clock, as far as this machine knows it.

Tokens carry an expiry on the controllers' clock. A worker whose own clock is minutes off must judge them right, so each
answer's `server_time` is kept together with the monotonic moment it came: stepping the wall clock changes nothing.
"""

from __future__ import annotations

from corral.kit.clock import Clock
from corral.kit.log import get_log

log = get_log(__name__)
NOTEWORTHY_SKEW_S = 30.0


class ServerClock:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._learnt: tuple[float, float] | None = None  # (server time, monotonic) of the same moment
        self._is_logged = False

    def learn(self, server_time: float) -> None:
        """`server_time` 0 means that the peer does not say (LocalAI)."""
        if server_time <= 0:
            return
        self._learnt = (server_time, self._clock.monotonic())
        if abs(self.skew_s) > NOTEWORTHY_SKEW_S and not self._is_logged:
            self._is_logged = True
            log.warning("this machine's clock differs from the controller's", skew_s=round(self.skew_s, 1))

    def now(self) -> float:
        """Seconds since the epoch on the controller's clock; before anything is learnt, on ours."""
        if self._learnt is None:
            return self._clock.now().timestamp()
        server_time, at = self._learnt
        return server_time + self._clock.monotonic() - at

    @property
    def skew_s(self) -> float:
        """How far ahead of ours the controller's clock is."""
        return self.now() - self._clock.now().timestamp()
