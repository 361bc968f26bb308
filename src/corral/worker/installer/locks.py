"""Work on one backend is serial under any of its names; work on different ones is not held up. First come, first
served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class NameLocks:
    def __init__(self) -> None:
        self._line: list[tuple[frozenset[str], asyncio.Event]] = []

    @contextlib.asynccontextmanager
    async def hold(self, names: frozenset[str]) -> AsyncIterator[None]:
        """Nobody else who shares a name works until this ends."""
        place = (names, asyncio.Event())
        self._line.append(place)
        try:
            self._let_in()
            await place[1].wait()
            yield
        finally:
            self._line.remove(place)
            self._let_in()

    def _let_in(self) -> None:
        """Everybody with whom nobody further ahead in the line shares a name."""
        ahead: set[str] = set()
        for names, turn in self._line:
            if ahead.isdisjoint(names):
                turn.set()
            ahead |= names
