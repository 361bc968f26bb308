"""Locks by name, for objects with several names: work that shares a name is serial, first come, first served; other
work is parallel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class NameLocks:
    def __init__(self) -> None:
        self._queue: list[tuple[frozenset[str], asyncio.Event]] = []

    @contextlib.asynccontextmanager
    async def hold(self, names: frozenset[str]) -> AsyncIterator[None]:
        """Hold these names: other holders that share a name wait until the block ends."""
        place = (names, asyncio.Event())
        self._queue.append(place)
        try:
            self._admit()
            await place[1].wait()
            yield
        finally:
            self._queue.remove(place)
            self._admit()

    def _admit(self) -> None:
        """Admit every waiter that shares no name with one further ahead in the queue."""
        ahead: set[str] = set()
        for names, turn in self._queue:
            if ahead.isdisjoint(names):
                turn.set()
            ahead |= names
