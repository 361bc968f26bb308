"""How far a piece of work is: counted here, published elsewhere. Pure: time is handed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from corral.contract.messages.backends import Phase

RATE_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    phase: Phase
    file: str = ""
    current_bytes: int = 0
    total_bytes: int = 0  # 0: nobody knows
    rate: float = 0.0  # bytes per second over the last seconds
    file_index: int = 0  # of several files: which one, from 1; the bytes are those of all of them
    file_count: int = 0
    share: float | None = None  # of all there is to do, 0 to 1, whatever the bytes count; None: as the bytes say


Tell = Callable[[Progress], None]


def tell_nobody(_progress: Progress) -> None:
    """For callers who do not watch."""


class Meter:
    """Bytes per second over a sliding window: what the line does now, not what it did on average."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def rate(self, total_bytes: int, now_s: float) -> float:
        self._seen.append((now_s, total_bytes))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._window_s:
            self._seen.popleft()
        since_s, before = self._seen[0]
        passed = now_s - since_s
        # A part that starts again from zero must not show as a negative rate.
        return max(0.0, (total_bytes - before) / passed) if passed > 0 else 0.0


class Tally:
    """Several files as one: the sum over all parts, against the sum of all sizes.

    What was there before (a resumed part) counts as done but not as speed.
    """

    def __init__(self, phase: Phase, tell: Tell, monotonic: Callable[[], float], *, total_bytes: int = 0) -> None:
        self._phase = phase
        self._tell = tell
        self._monotonic = monotonic
        self._total = total_bytes
        self._done: dict[str, int] = {}
        self._there: dict[str, int] = {}
        self._meter = Meter()

    def set_total(self, size_bytes: int) -> None:
        """The size became known only now."""
        self._total = size_bytes

    def there(self, part: str, size_bytes: int) -> None:
        """So much of the part was on the disk already."""
        self._there[part] = size_bytes
        self.at(part, size_bytes)

    def at(self, part: str, size_bytes: int) -> None:
        """The part is that far now."""
        self._done[part] = size_bytes
        done = sum(self._done.values())
        moved = done - sum(self._there.values())
        total = max(self._total, done) if self._total else 0
        self._tell(Progress(self._phase, part, done, total, self._meter.rate(moved, self._monotonic())))
