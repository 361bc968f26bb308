"""An event loop whose clock jumps: when nobody has anything to do, it is the next timer's time at once.

No sockets, no threads, no signals: whatever would wait for the outside world fails here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2026, 1, 1, tzinfo=UTC)
_MOST_TURNS = 200_000  # of the loop without time passing: somebody goes round in circles


class Stuck(Exception):
    """Nobody waits for anything any more, or somebody never waits."""


class _JumpingSelector:
    """Where a loop would sleep until something happens, time passes."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        self._jump = jump
        self._turns = 0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stuck("nobody will ever wake up again")
        if timeout > 0:
            self._turns = 0
            self._jump(timeout)
        else:
            self._turns += 1
            if self._turns > _MOST_TURNS:
                raise Stuck("somebody goes round in circles without time passing")
        return []


class _NumberedTask(asyncio.Task[Any]):
    """Its hash is its number. Sets of tasks, of asyncio's own too, are cancelled and looked through in the order of
    their hashes, which would be addresses in memory: another order in each process."""

    __slots__ = ("_number",)

    def __init__(self, number: int, *words: Any, **more: Any) -> None:
        self._number = number
        super().__init__(*words, **more)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0
        numbers = itertools.count()
        self.set_task_factory(lambda loop, work, **more: _NumberedTask(next(numbers), work, loop=loop, **more))
        self._clock_resolution = 1e-6
        self._selector = _JumpingSelector(self._advance)

    def time(self) -> float:
        return self._virtual

    def _advance(self, seconds: float) -> None:
        self._virtual += seconds

    def _process_events(self, _events: list[Any]) -> None:
        """There is no outside."""

    def _write_to_self(self) -> None:
        """Nobody else's thread could have something for us."""


class VirtualClock:
    """One machine's clock: it may be wrong by some seconds, but runs as fast as everybody's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, wrong_by_s: float = 0.0) -> None:
        self._loop = loop
        self._start = START + timedelta(seconds=wrong_by_s)

    def now(self) -> datetime:
        return self._start + timedelta(microseconds=round(self._loop.time() * 1e6))

    def now_us(self) -> int:
        return round(self.now().timestamp() * 1e6)

    def monotonic(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
