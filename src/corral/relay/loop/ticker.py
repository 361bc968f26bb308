"""One timer for many deadlines: it checks every connection a few times a second.

A check costs a tenth of a microsecond per connection; a timer per request would cost more than parsing the request.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

NEVER = float("inf")
_LATE = 2  # ticks; after more than that this process stood still


class Watched(Protocol):
    def check(self, now: float) -> None:
        """Called at every tick; acts if a deadline has passed."""

    def postpone(self, span_s: float) -> None:
        """Move every deadline by `span_s`."""


class Ticker:
    """Ticks while it has members. `now` is the monotonic time of the last tick: accurate enough for deadlines, and
    free."""

    __slots__ = ("_loop", "_members", "_timer", "now", "tick_s")

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.now = time.monotonic()
        self._members: dict[Watched, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def deadline(self, span_s: float) -> float:
        """The time in `span_s` or up to one tick later: `now` may be a tick old, and a deadline must not come early."""
        return self.now + span_s + self.tick_s

    def add(self, member: Watched) -> None:
        self._members[member] = None
        if self._timer is None:
            self.now = time.monotonic()
            self._loop = asyncio.get_running_loop()
            self._timer = self._loop.call_later(self.tick_s, self._tick)

    def discard(self, member: Watched) -> None:
        self._members.pop(member, None)
        if not self._members and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(self.tick_s, self._tick)
        before, now = self.now, time.monotonic()
        self.now = now
        members = list(self._members)
        late_s = now - before - self.tick_s
        if late_s > _LATE * self.tick_s:
            # This process was stopped or starved. It could read nothing for so long, and deadlines set since then
            # count from the last tick: peers are not charged for that time.
            for member in members:
                member.postpone(late_s)
        for member in members:
            member.check(now)
