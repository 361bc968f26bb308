"""Parts of pages that are the same for everybody of a role: drawn once for all who ask at about the same time.

A part is kept for four times as long as it took to draw, so drawing it never takes more than a fifth of the
controller's time, however many pages are open. A small fleet's part is drawn in milliseconds and is practically never
old.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from corral.kit.clock import Clock
from corral.kit.single_flight import SingleFlight

_KEPT_FOR = 4.0  # times as long as drawing took
_MAX_KEPT_S = 2.0
MAX_PARTS = 32


@dataclass(frozen=True)
class _Drawn:
    text: str
    until: float


class SharedParts:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._drawings = SingleFlight[Hashable, None, str]()
        self._kept: dict[Hashable, _Drawn] = {}

    async def text(self, key: Hashable, draw: Callable[[], Awaitable[str]]) -> str:
        kept = self._kept.get(key)
        if kept is not None and self._clock.monotonic() < kept.until:
            return kept.text

        async def work(_: Callable[[None], None]) -> str:
            began = self._clock.monotonic()
            text = await draw()
            now = self._clock.monotonic()
            while len(self._kept) >= MAX_PARTS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = _Drawn(text, now + min(_MAX_KEPT_S, _KEPT_FOR * (now - began)))
            return text

        return await self._drawings.run(key, work)
