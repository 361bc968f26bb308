"""Work that many ask for and one does. All who ask wait for the same run and hear the same progress; the work is
given up when the last of them has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

from corral.blobs.progress import Progress, Tell, tell_nobody
from corral.blobs.threads import until_done

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")
Work = Callable[[Tell], Awaitable[T]]


class _Run(Generic[T]):
    def __init__(self, work: Work[T]) -> None:
        self._last: Progress | None = None
        self.listeners: list[Tell] = []
        self.given_up = False
        self.task: asyncio.Task[T] = asyncio.get_running_loop().create_task(_carry_out(work, self._tell))

    def _tell(self, progress: Progress) -> None:
        self._last = progress
        for listener in tuple(self.listeners):
            listener(progress)

    def join(self, tell: Tell) -> None:
        self.listeners.append(tell)
        if self._last is not None:  # who comes late sees where it stands, not an empty bar until the next byte
            tell(self._last)


class SharedRuns(Generic[Key, T]):
    def __init__(self) -> None:
        self._runs: dict[Key, _Run[T]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._runs

    async def join(self, key: Key, work: Work[T], tell: Tell = tell_nobody) -> T:
        """The result of the run under `key`, started now unless one is under way. An error reaches all who wait."""
        while (run := self._runs.get(key)) is not None and run.given_up:
            # It is being given up just now, and may still be tidying what the next one would use.
            await asyncio.wait([run.task])
            self._forget(key, run)
        if run is None:
            run = self._runs[key] = _Run(work)
            run.task.add_done_callback(partial(self._forget, key, run))
        run.join(tell)
        try:
            return await asyncio.shield(run.task)
        finally:
            run.listeners.remove(tell)
            if not run.listeners and not run.task.done():
                run.given_up = True
                run.task.cancel()
                await until_done(run.task)

    def _forget(self, key: Key, run: _Run[T], _task: object = None) -> None:
        if self._runs.get(key) is run:
            del self._runs[key]


async def _carry_out(work: Work[T], tell: Tell) -> T:
    # Called in here: a coroutine made outside would be left over if the task is cancelled before it begins.
    return await work(tell)
