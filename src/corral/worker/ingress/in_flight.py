"""Counts the requests in flight of each process.

Gateways balance by this count (`load_reports.py` publishes it), and a process is replaced when it is idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class InFlight:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}  # only of processes with any
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self.on_change: Callable[[], None] = _ignore  # called often

    def begin(self, process_id: str) -> None:
        self._counts[process_id] = self._counts.get(process_id, 0) + 1
        self.on_change()

    def end(self, process_id: str) -> None:
        left = self._counts[process_id] - 1
        if left:
            self._counts[process_id] = left
        else:
            del self._counts[process_id]
            for waiting in self._waiting.pop(process_id, ()):
                if not waiting.done():
                    waiting.set_result(None)
        self.on_change()

    def of(self, process_id: str) -> int:
        return self._counts.get(process_id, 0)

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    async def wait_idle(self, process_id: str, timeout_s: float) -> bool:
        """Whether all requests of a process have ended within this time. New requests keep it busy."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle(process_id)
        except TimeoutError:
            return False
        return True

    async def wait_all_idle(self) -> None:
        """Wait until each process that has requests now had a moment without any."""
        await asyncio.gather(*map(self._idle, tuple(self._counts)))

    async def _idle(self, process_id: str) -> None:
        if not self.of(process_id):
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(process_id, []).append(waiting)
        try:
            await waiting
        finally:
            if waiting in (others := self._waiting.get(process_id, [])):
                others.remove(waiting)


def _ignore() -> None:
    pass
