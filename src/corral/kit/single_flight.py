"""Single flight: callers that want the same result at the same time share one run of the work.

All callers wait for the same run and receive the same progress. The run is cancelled when its last caller has left; a
caller that leaves earlier does not disturb the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

from corral.kit.threads import wait_until_done

Key = TypeVar("Key", bound=Hashable)
Report = TypeVar("Report")
T = TypeVar("T")
OnProgress = Callable[[Report], None]
Work = Callable[[OnProgress[Report]], Awaitable[T]]


class _Run(Generic[Report, T]):
    def __init__(self, work: Work[Report, T]) -> None:
        self._last: Report | None = None
        self.listeners: list[OnProgress[Report]] = []
        self.is_cancelled = False
        self.task: asyncio.Task[T] = asyncio.get_running_loop().create_task(_call(work, self._on_progress))

    def _on_progress(self, report: Report) -> None:
        self._last = report
        for listener in tuple(self.listeners):
            listener(report)

    def join(self, listener: OnProgress[Report]) -> None:
        self.listeners.append(listener)
        if self._last is not None:  # a late caller sees the present state, not an empty bar until the next report
            listener(self._last)


class SingleFlight(Generic[Key, Report, T]):
    def __init__(self) -> None:
        self._runs: dict[Key, _Run[Report, T]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._runs

    async def run(self, key: Key, work: Work[Report, T], on_progress: OnProgress[Report] | None = None) -> T:
        """Return the result of the run under `key`; start `work` unless a run is active. An error reaches all callers.

        `work` receives a callback to which it may pass progress reports.
        """
        listener = _ignore if on_progress is None else on_progress
        while (run := self._runs.get(key)) is not None and run.is_cancelled:
            # The cancelled run may still be cleaning up files that the next run would use.
            await asyncio.wait([run.task])
            self._forget(key, run)
        if run is None:
            run = self._runs[key] = _Run(work)
            run.task.add_done_callback(partial(self._forget, key, run))
        run.join(listener)
        try:
            return await asyncio.shield(run.task)
        finally:
            run.listeners.remove(listener)
            if not run.listeners and not run.task.done():
                run.is_cancelled = True
                run.task.cancel()
                await wait_until_done(run.task)

    def _forget(self, key: Key, run: _Run[Report, T], _task: object = None) -> None:
        if self._runs.get(key) is run:
            del self._runs[key]


async def _call(work: Work[Report, T], on_progress: OnProgress[Report]) -> T:
    # Called in here: a coroutine made outside would never be awaited if the task is cancelled before it starts.
    return await work(on_progress)


def _ignore(_report: object) -> None:
    return None
